"""What a step costs: a linear model refit online, and the token budget that follows from it.

    seconds = alpha + beta · tokens + gamma · Σ q·context + delta · batch

``tokens`` are the rows of the flat batch (matrix products), ``Σ q·context`` the query-key pairs
(attention), ``batch`` the sequences (per-sequence overhead). Least squares over the measured steps
with exponential forgetting; a coefficient that would be negative is held at zero.

A pair of a row that decodes waits for memory, as nobody else reads that K and V; the pairs of a
prompt's chunk share what is read. Where both occur enough to be told apart, gamma is the chunks'
and epsilon that of decoding rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from turnstile.core.plan import Plan


@dataclass(frozen=True, slots=True)
class StepCost:
    """The features of one step. ``decode_context`` is the part of ``query_context`` that belongs to
    chunks of a single row.
    """

    tokens: int
    query_context: int
    batch: int
    decode_context: int = 0

    def __add__(self, other: StepCost) -> StepCost:
        return StepCost(
            self.tokens + other.tokens,
            self.query_context + other.query_context,
            self.batch + other.batch,
            self.decode_context + other.decode_context,
        )

    @classmethod
    def decoding(cls, rows: int, context: float) -> StepCost:
        """Of so many sequences that decode, with so much context each."""
        pairs = int(rows * context)
        return cls(rows, pairs, rows, pairs)

    @classmethod
    def of(cls, plan: Plan) -> StepCost:
        """Count a plan's. Query i of a chunk sees ``start + i + 1`` tokens."""
        tokens = query_context = decode_context = 0
        for chunk in plan.chunks:
            count = chunk.count
            tokens += count
            if count == 1:
                decode_context += chunk.start + 1
            else:
                query_context += count * chunk.start + count * (count + 1) // 2
        return cls(tokens, query_context + decode_context, len(plan.chunks), decode_context)


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Seconds: per step, per token, per query-key pair, per sequence, and per pair of a row that
    decodes (None: as any pair).
    """

    alpha: float
    beta: float
    gamma: float
    delta: float
    epsilon: float | None = None

    def predict(self, cost: StepCost) -> float:
        """Seconds the step takes."""
        seconds = (
            self.alpha
            + self.beta * cost.tokens
            + self.gamma * cost.query_context
            + self.delta * cost.batch
        )
        if self.epsilon is not None:
            seconds += (self.epsilon - self.gamma) * cost.decode_context
        return seconds

    def scaled(self, factor: float) -> Coefficients:
        """All of them times ``factor``."""
        epsilon = None if self.epsilon is None else self.epsilon * factor
        return Coefficients(
            self.alpha * factor, self.beta * factor, self.gamma * factor, self.delta * factor,
            epsilon,
        )  # fmt: skip


class CostModel:
    """Fits :class:`Coefficients` to the steps it is shown.

    ``observe`` is O(1); the fit is made anew at most every ``REFIT`` steps, when it is asked for.

    Parameters
    ----------
    apart
        Fit the pairs of decoding rows apart from those of chunks. It says more of steps like those
        that were seen, and less of others.
    """

    REFIT = 32
    HALF_LIFE = 1000.0
    WARM = 20
    # Brings the features to one magnitude, so that the ridge means the same for each.
    SCALE = np.array([1.0, 1e2, 1e5, 1e2, 1e4])

    def __init__(self, *, apart: bool = False) -> None:
        self.apart = apart
        self.samples = 0
        self.largest_batch = 0
        """Sequences of the largest step seen: what more cost is extrapolated."""
        size = 5 if apart else 4
        self._scale = self.SCALE[:size]
        self._gram = np.zeros((size, size))
        self._moment = np.zeros(size)
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
        values = [1.0, cost.tokens, cost.query_context, cost.batch]
        if self.apart:
            values[2] -= cost.decode_context
            values.append(cost.decode_context)
        features = np.array(values) / self._scale / seconds
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
        active = list(range(len(self._scale)))
        solution = np.zeros(len(active))
        while active:
            gram = self._gram[np.ix_(active, active)]
            ridge = 1e-6 * np.trace(gram) / len(active) + 1e-12
            part = np.linalg.solve(gram + ridge * np.eye(len(active)), self._moment[active])
            if (part >= 0).all():
                solution[active] = part
                break
            active.pop(int(np.argmin(part)))
        self._coefficients = Coefficients(*(solution / self._scale).tolist())
        self._fitted_at = self.samples
