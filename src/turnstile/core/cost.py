"""What a step costs: a linear model refit online, and the token budget that follows from it.

    seconds = alpha + beta · tokens + gamma · Σ q·context + delta · batch

``tokens`` are the rows of the flat batch (matrix products), ``Σ q·context`` the query-key pairs
(attention), ``batch`` the sequences (per-sequence overhead). Least squares over the measured steps
with exponential forgetting; a coefficient that would be negative is held at zero.

That is enough to cut prompts by. Who foretells whole loads (:mod:`turnstile.simulate`, the gate)
wants the finer model, a roofline in three places:

    seconds = alpha + beta · max(tokens, knee) + gamma · Σ q·context of prompts' chunks
              + delta · batch + epsilon · tokens of K and V that decoding rows read
              + zeta · those that they read which another row of the step has read

Up to the knee a step waits for the weights, however many rows it has. The pairs of a chunk share
what is read and take time to compute; rows that decode wait for their K and V, and less for those
of a page that another row has read in the same step: it is in the processor's cache by then. How
much less only loads that share tell; without any it is taken to be :data:`CACHED_READ`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from turnstile.core.pages import PagePool
from turnstile.core.plan import Plan

Matrix = NDArray[np.float64]

CACHED_READ = 0.22
"""What attending to K and V that another row of the step attends to as well costs of attending to a
row's own. Attention of 100 rows with contexts of 560 took 0.29 as long where the first 512 tokens
are in the same pages (int8 with AMX): 0.29 = 0.098 for what is read from memory + 0.902 · 0.22.
``scripts/bench_kernels.py --cached-read`` measures it and prints the line. It is what a cost model
believes until it has seen steps that share.
"""


@dataclass(frozen=True, slots=True)
class StepCost:
    """The features of one step.

    Attributes
    ----------
    tokens, query_context, batch
        Rows, query-key pairs, sequences.
    decode_context
        The part of ``query_context`` that belongs to chunks of a single row.
    decode_reads
        Tokens of K and V which those rows read from memory.
    shared_reads
        Those that they and drafts read besides, which another row has read in the same step.
    """

    tokens: int
    query_context: int
    batch: int
    decode_context: int = 0
    decode_reads: int = 0
    shared_reads: int = 0

    def __add__(self, other: StepCost) -> StepCost:
        return StepCost(
            self.tokens + other.tokens,
            self.query_context + other.query_context,
            self.batch + other.batch,
            self.decode_context + other.decode_context,
            self.decode_reads + other.decode_reads,
            self.shared_reads + other.shared_reads,
        )

    def sharing(self, tokens: int) -> StepCost:
        """The same where so many of those tokens have been read for another sequence before."""
        shared = min(tokens, self.decode_reads)
        return replace(
            self,
            decode_reads=self.decode_reads - shared,
            shared_reads=self.shared_reads + shared,
        )

    @classmethod
    def decoding(cls, rows: int, context: float) -> StepCost:
        """Of so many sequences that decode, with so much context each."""
        pairs = int(rows * context)
        return cls(rows, pairs, rows, pairs, pairs)

    @classmethod
    def of(cls, plan: Plan) -> StepCost:
        """Count a plan's. Query i of a chunk sees ``start + i + 1`` tokens. Nothing is taken to be
        shared (see :meth:`sharing`).
        """
        tokens = crowd = plan.num_decodes
        decode_context = crowd + sum([chunk.start for chunk in plan.chunks[:crowd]])
        query_context = seen_again = 0
        for chunk in plan.chunks[crowd:]:
            count = chunk.count
            tokens += count
            if count == 1 or chunk.drafts:  # drafts see what the row before them reads
                decode_context += chunk.start + 1
                seen_again += len(chunk.drafts) * (chunk.start + 1)
            else:
                query_context += count * chunk.start + count * (count + 1) // 2
        pairs = query_context + decode_context
        return cls(tokens, pairs, len(plan.chunks), decode_context, decode_context, seen_again)


NOTHING = StepCost(0, 0, 0)


def read_again(pool: PagePool, decoding: int, running: int) -> int:
    """Tokens of K and V that are read for more than one of the rows that decode, beyond the first.

    O(1): pages in several tables are taken to be in those of the ``decoding`` as often as in those
    of all ``running``. What prompts read for themselves is in the cost of their pairs.
    """
    repeats = pool.num_entries - pool.num_held
    return repeats * pool.page_size * decoding // running if repeats else 0


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Seconds: per step, per token, per query-key pair, per sequence, and per token that decoding
    rows read (None: their pairs cost what all do). Fewer tokens than ``knee`` cost as many.
    ``zeta`` is per token that a row reads after another; None: a part of ``epsilon``.
    """

    alpha: float
    beta: float
    gamma: float
    delta: float
    epsilon: float | None = None
    knee: int = 0
    zeta: float | None = None

    def predict(self, cost: StepCost) -> float:
        """Seconds the step takes."""
        seconds = (
            self.alpha
            + self.beta * max(self.knee, cost.tokens)
            + self.gamma * cost.query_context
            + self.delta * cost.batch
        )
        if self.epsilon is not None:
            zeta = CACHED_READ * self.epsilon if self.zeta is None else self.zeta
            seconds += self.epsilon * cost.decode_reads + zeta * cost.shared_reads
            seconds -= self.gamma * cost.decode_context
        return seconds

    def scaled(self, factor: float) -> Coefficients:
        """All of them times ``factor``."""
        epsilon = None if self.epsilon is None else self.epsilon * factor
        zeta = None if self.zeta is None else self.zeta * factor
        return Coefficients(
            self.alpha * factor, self.beta * factor, self.gamma * factor, self.delta * factor,
            epsilon, self.knee, zeta,
        )  # fmt: skip


class CostModel:
    """Fits :class:`Coefficients` to the steps it is shown.

    ``observe`` is O(1); the fit is made anew every ``REFIT`` steps (``REFIT_FINE`` for the finer
    model).

    Parameters
    ----------
    fine
        Fit the finer model. It says more of steps like those that were seen.
    """

    REFIT, REFIT_FINE = 32, 64
    HALF_LIFE = 1000.0
    WARM = 20
    TRUSTED = 4.0
    """How many times as long as foretold a step may take, or as short, and count in full."""
    # Brings the features to one magnitude, so that the ridge means the same for each.
    SCALE = np.array([1.0, 1e2, 1e5, 1e2, 1e4, 1e4])
    BELIEF = 1e-4
    """How firmly :data:`CACHED_READ` is believed, as a part of all that was seen: enough to decide
    where nothing was shared, next to nothing where something was.
    """
    KNEES = np.array([0, 8, 16, 32, 64, 128])
    """Those that are tried; the lowest is taken that leaves no more than chance to higher ones."""

    def __init__(self, *, fine: bool = False) -> None:
        self.fine = fine
        self.samples = 0
        self.largest_batch = 0
        """Sequences of the largest step seen: what more cost is extrapolated."""
        size = 6 if fine else 4
        self._scale = self.SCALE[:size]
        self._knees = self.KNEES if fine else self.KNEES[:1]
        # For each knee; and the sum of the squares that the knees are to explain.
        self._gram = np.zeros((len(self._knees), size, size))
        self._moment = np.zeros((len(self._knees), size))
        self._squares = 0.0
        belief = np.zeros(size)
        belief[4:] = (-CACHED_READ, 1.0) if fine else ()
        self._belief = np.outer(belief, belief)
        self._decay = 0.5 ** (1 / self.HALF_LIFE)
        self._fitted_at = 0
        self._coefficients = Coefficients(0.0, 0.0, 0.0, 0.0)

    @property
    def warm(self) -> bool:
        """Whether enough steps were seen for a prediction to mean something."""
        return self.samples >= self.WARM

    def observe(self, cost: StepCost, seconds: float) -> None:
        """Learn that a step of this cost took ``seconds``."""
        if cost.tokens == 0 or not seconds > 0.0:
            return
        values = [1.0, cost.tokens, cost.query_context, cost.batch]
        if self.fine:
            values[2] -= cost.decode_context
            values += (cost.decode_reads, cost.shared_reads)
        expected = self._expected(cost, seconds)
        features = np.tile(np.array(values), (len(self._knees), 1))
        np.maximum(features[:, 1], self._knees, out=features[:, 1])
        features /= self._scale * expected
        ratio = seconds / expected
        self._gram *= self._decay
        self._gram += features[:, :, None] * features[:, None, :]
        self._moment *= self._decay
        self._moment += features * ratio
        self._squares = self._squares * self._decay + ratio * ratio
        self.samples += 1
        self.largest_batch = max(self.largest_batch, cost.batch)
        due = self.REFIT_FINE if self.fine else self.REFIT
        if self.samples <= self.WARM or self.samples - self._fitted_at >= due:
            self._fit()

    def _expected(self, cost: StepCost, seconds: float) -> float:
        """What a step's error is measured by, so that one of 5 ms matters as much as one of 500.

        What the step was foretold to take, not what it took: relative to the latter a step that
        was held up would count for little, and the fit would tell the time of a step that is not
        held up, 3 to 7 % below the mean. Within bounds, as one that hung for a second must not
        weigh like a thousand others.
        """
        if not self.warm:
            return seconds
        foretold = self._coefficients.predict(cost)
        return min(max(foretold, seconds / self.TRUSTED), seconds * self.TRUSTED)

    @property
    def coefficients(self) -> Coefficients:
        """The current fit, all zero while nothing was seen."""
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
        least = math.inf
        for knee, gram, moment in zip(self._knees.tolist(), self._gram, self._moment, strict=True):
            belief = self.BELIEF * np.trace(gram) / len(gram) * self._belief
            solution = least_squares(gram + belief, moment)
            left = float(self._squares - 2.0 * moment @ solution + solution @ gram @ solution)
            # A higher knee must explain more than chance does.
            chance = 4.0 * max(left / self._squares, 1e-4)
            if least == math.inf or left < least - chance:
                least = left
                alpha, beta, gamma, delta, *rest = (solution / self._scale).tolist()
                epsilon, zeta = rest if self.fine else (None, None)
                self._coefficients = Coefficients(alpha, beta, gamma, delta, epsilon, knee, zeta)
        self._fitted_at = self.samples


def least_squares(gram: Matrix, moment: Matrix) -> Matrix:
    """The solution of the normal equations without what would be negative: that is 0."""
    active = list(range(len(moment)))
    solution = np.zeros(len(moment))
    while active:
        part_gram = gram[np.ix_(active, active)]
        ridge = 1e-6 * np.trace(part_gram) / len(active) + 1e-12
        part = np.linalg.solve(part_gram + ridge * np.eye(len(active)), moment[active])
        if (part >= 0).all():
            solution[active] = part
            break
        active.pop(int(np.argmin(part)))
    return solution
