"""What a step costs: a linear model refit online, and the token budget that follows from it.

    seconds = alpha + beta · tokens + gamma · Σ q·context + delta · batch

``tokens`` are the rows of the flat batch (matrix products), ``Σ q·context`` the query-key pairs
(attention), ``batch`` the sequences (per-sequence overhead). Least squares over the measured steps
with exponential forgetting; a coefficient that would be negative is held at zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from turnstile.core.plan import Plan


@dataclass(frozen=True, slots=True)
class StepCost:
    """The features of one step."""

    tokens: int
    query_context: int
    batch: int

    @classmethod
    def of(cls, plan: Plan) -> StepCost:
        """Count a plan's. Query i of a chunk sees ``start + i + 1`` tokens."""
        tokens = query_context = 0
        for chunk in plan.chunks:
            count = chunk.count
            tokens += count
            query_context += count * chunk.start + count * (count + 1) // 2
        return cls(tokens, query_context, len(plan.chunks))


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Seconds: per step, per token, per query-key pair, per sequence."""

    alpha: float
    beta: float
    gamma: float
    delta: float

    def predict(self, cost: StepCost) -> float:
        """Seconds the step takes."""
        return (
            self.alpha
            + self.beta * cost.tokens
            + self.gamma * cost.query_context
            + self.delta * cost.batch
        )


class CostModel:
    """Fits :class:`Coefficients` to the steps it is shown.

    ``observe`` is O(1); the fit is made anew at most every ``REFIT`` steps, when it is asked for.
    """

    REFIT = 32
    HALF_LIFE = 1000.0
    WARM = 20
    # Brings the features to one magnitude, so that the ridge means the same for each.
    SCALE = np.array([1.0, 1e2, 1e5, 1e2])

    def __init__(self) -> None:
        self.samples = 0
        self.largest_batch = 0
        """Sequences of the largest step seen: what more cost is extrapolated."""
        self._gram = np.zeros((4, 4))
        self._moment = np.zeros(4)
        self._decay = 0.5 ** (1 / self.HALF_LIFE)
        self._fitted_at = -1
        self._coefficients = Coefficients(0.0, 0.0, 0.0, 0.0)

    @property
    def warm(self) -> bool:
        """Whether enough steps were seen for a prediction to mean something."""
        return self.samples >= self.WARM

    def observe(self, cost: StepCost, seconds: float) -> None:
        """Learn that a step of this cost took ``seconds``."""
        if cost.tokens == 0 or not seconds > 0.0:
            return
        # Relative errors count: a step of 5 ms matters as much as one of 500.
        features = np.array([1.0, cost.tokens, cost.query_context, cost.batch]) / self.SCALE
        features /= seconds
        self._gram = self._gram * self._decay + np.outer(features, features)
        self._moment = self._moment * self._decay + features
        self.samples += 1
        self.largest_batch = max(self.largest_batch, cost.batch)

    @property
    def coefficients(self) -> Coefficients:
        """The current fit, all zero while nothing was seen."""
        if self.samples and (
            self._fitted_at < 0
            or self.samples - self._fitted_at >= self.REFIT
            or self.samples <= self.WARM
        ):
            self._fit()
        return self._coefficients

    def predict(self, cost: StepCost) -> float:
        """Seconds a step of this cost takes, by the current fit."""
        return self.coefficients.predict(cost)

    def budget(
        self, seconds: float, decodes: StepCost, largest: int, context: float = 256.0
    ) -> int:
        """Tokens a step may compute within ``seconds``, of which ``decodes`` are given.

        ``context`` is how many tokens a prompt token attends to, in the mean. At least the decodes
        themselves, at most ``largest``; ``largest`` while the model is cold.
        """
        if not self.warm:
            return largest
        fit = self.coefficients
        left = seconds - fit.predict(decodes)
        per_token = fit.beta + fit.gamma * context
        if per_token <= 0:
            return largest
        return min(largest, decodes.tokens + max(0, int(left / per_token)))

    def _fit(self) -> None:
        active = [0, 1, 2, 3]
        solution = np.zeros(4)
        while active:
            gram = self._gram[np.ix_(active, active)]
            ridge = 1e-6 * np.trace(gram) / len(active) + 1e-12
            part = np.linalg.solve(gram + ridge * np.eye(len(active)), self._moment[active])
            if (part >= 0).all():
                solution[active] = part
                break
            active.pop(int(np.argmin(part)))
        alpha, beta, gamma, delta = (solution / self.SCALE).tolist()
        self._coefficients = Coefficients(alpha, beta, gamma, delta)
        self._fitted_at = self.samples
