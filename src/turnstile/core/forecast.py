"""How long a newcomer will wait: from the cost of steps, who runs, and who stands before it.

The engine is seen through :class:`EngineView`, a few numbers of its last step. With ``W`` slots in
use every sample draws one token a step, so a slot is free again after as many steps as its sample
has outputs to come, and after as many again as the next one's outputs. The k-th to start does so

    at step  r[(k - 1) mod W] + s · ((k - 1) div W)

where ``r`` are the outputs still to come of those that run, ascending, and ``s`` the mean outputs
of those that wait. Steps become seconds by the fitted cost model, prompts to be computed meanwhile
are added by their tokens. What that leaves out (pages, cached prefixes, lengths that come out
otherwise) is corrected by :class:`Calibration`, which learns from actual ÷ predicted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from turnstile.core.cost import Coefficients, CostModel, StepCost
from turnstile.core.request import Sequence as Running
from turnstile.core.scheduler import OUTPUT_CHARGE, Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """What a gate knows of its engine, at a step boundary.

    Attributes
    ----------
    steps
        Forward passes so far.
    cost, cost_samples
        The fitted cost model, and how many steps it was fitted to.
    free_tokens
        Tokens that the pages nobody holds have room for; None where nobody knows.
    prefill_tokens
        Prompt tokens that those running have still to compute.
    served
        Virtual token counter of each tenant that is active.
    """

    steps: int = 0
    cost: Coefficients = field(default_factory=lambda: Coefficients(0.0, 0.0, 0.0, 0.0))
    cost_samples: int = 0
    free_tokens: int | None = None
    prefill_tokens: int = 0
    served: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, scheduler: Scheduler) -> EngineView:
        """The view of a scheduler in this process. O(running)."""
        pool = scheduler.pool
        return cls(
            steps=scheduler.statistics.steps,
            cost=scheduler.cost.coefficients,
            cost_samples=max(scheduler.cost.samples, CostModel.WARM * scheduler.cost.warm),
            free_tokens=pool.num_available * pool.page_size,
            prefill_tokens=prefill_left(scheduler.running),
            served=scheduler.queue.counters(),
        )

    @property
    def warm(self) -> bool:
        """Whether the cost model has seen enough steps to predict with."""
        return self.cost_samples >= CostModel.WARM


def prefill_left(running: Collection[Running]) -> int:
    """Tokens that those running have to compute before each is down to its newest. O(running)."""
    return sum([len(s.tokens) - s.computed for s in running]) - len(running)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds from arrival to a slot, and to the first token: medians and 90th percentiles; the
    raw figures they were made from, and how many waited then.
    """

    wait: float
    wait_p90: float
    ttft: float
    ttft_p90: float
    raw_wait: float
    raw_ttft: float
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class Ahead:
    """Work before a newcomer's: samples, their prompt tokens, their expected outputs."""

    samples: float = 0.0
    prompt_tokens: float = 0.0
    outputs: float = 0.0

    def __add__(self, other: Ahead) -> Ahead:
        return Ahead(
            self.samples + other.samples,
            self.prompt_tokens + other.prompt_tokens,
            self.outputs + other.outputs,
        )

    def scaled(self, share: float) -> Ahead:
        """So large a part of it."""
        return Ahead(share * self.samples, share * self.prompt_tokens, share * self.outputs)

    @property
    def charge(self) -> float:
        """Service that all of it will be charged."""
        return self.prompt_tokens + OUTPUT_CHARGE * self.outputs


def steps_until_start(remaining: Sequence[float], free: int, service: float, place: float) -> float:
    """Steps until the ``place``-th of those waiting (1 is the first) gets a slot.

    Parameters
    ----------
    remaining
        Steps to come of those that run, ascending.
    free
        Slots that nobody has.
    service
        Mean steps of those that wait.
    """
    if place <= free:
        return 0.0
    ends = [*remaining, *[service] * max(0, free)]
    if not ends:
        return 0.0
    ends.sort()
    rounds, index = divmod(math.ceil(place - free) - 1, len(ends))
    return ends[index] + rounds * service


@dataclass(frozen=True, slots=True)
class Speed:
    """What work costs on this engine now.

    Attributes
    ----------
    step
        Seconds of a step in which everybody that runs draws one token.
    prompt_token
        Seconds a prompt token adds to its step.
    room
        Prompt tokens a step has room for beside the decodes.
    """

    step: float
    prompt_token: float
    room: int

    @classmethod
    def of(cls, view: EngineView, running: int, context: float, budget: int) -> Speed:
        """With ``running`` samples of ``context`` tokens each, under a token budget."""
        cost = view.cost
        decode = cost.predict(StepCost.decoding(running, context))
        return cls(decode, cost.beta + cost.gamma * context / 2, max(1, budget - running))

    def seconds(self, steps: float, prompt_tokens: float) -> float:
        """Time for ``steps``, with as many of ``prompt_tokens`` as they have room for."""
        return steps * self.step + min(prompt_tokens, steps * self.room) * self.prompt_token


class Calibration:
    """Predicted against actual: learns how far predictions of each magnitude are off.

    For each decade of the raw prediction two numbers are kept, so that a drift is followed and
    nothing is stored: the median of log(actual ÷ raw), by stochastic approximation (Robbins and
    Monro 1951), and the *margin* from the median that was told to the 90th percentile.

    In a queue errors come in flocks: all who wait at the same time find the same speed, and how
    they came out is known only when their waits are over, when many others have been told the same.
    A quantile that follows each outcome forgets in one flock what the last one taught, and is wrong
    for all of the next. So an outcome counts the less the more stood before it, ``FLOCK`` as much
    as one; the margin is measured from what was told, grows no further than what would have
    covered, and shrinks slowly. A magnitude that was never seen begins with the margin of the next
    smaller one, as queues grow through all of them.
    """

    RATE = 0.05
    GROWTH, DECLINE = 0.09, 0.005
    """Steps of the margin for an outcome beyond it, and within."""
    FLOCK = 8.0
    LEAST_MARGIN, FIRST_MARGIN, MOST_MARGIN = math.log(1.13), math.log(2.0), math.log(20.0)
    INHERITED = (math.log(1.3), math.log(1.6))
    """Range of a margin that comes from a smaller magnitude."""
    FLOOR = 0.01
    """Seconds added to both sides: below it nobody cares, and a wait of 0 has no logarithm."""
    _DECADES = 5
    _KNOWN = 20

    def __init__(self) -> None:
        self.count = 0
        self.covered = 0
        """Predictions whose actual was within the 90th percentile predicted."""
        self.predicted_seconds = 0.0
        self.actual_seconds = 0.0
        self._medians = [0.0] * self._DECADES
        self._margins: list[float | None] = [None] * self._DECADES
        self._seen = [0] * self._DECADES

    def correct(self, raw: float) -> tuple[float, float]:
        """The median and the 90th percentile for a raw prediction, both at least 0."""
        i = self._decade(raw)
        median = (raw + self.FLOOR) * math.exp(self._medians[i])
        p90 = median * math.exp(max(self.LEAST_MARGIN, self._margin(i)))
        return max(0.0, median - self.FLOOR), max(0.0, p90 - self.FLOOR)

    def observe(
        self, raw: float, median: float, p90: float, actual: float, ahead: float = 0.0
    ) -> None:
        """Learn how a prediction came out that was told when ``ahead`` others waited."""
        self.count += 1
        self.covered += actual <= p90
        self.predicted_seconds += median
        self.actual_seconds += actual
        i, weight = self._decade(raw), self.FLOCK / (self.FLOCK + ahead)
        error = math.log((actual + self.FLOOR) / (raw + self.FLOOR))
        self._medians[i] += self.RATE * weight * (0.5 - (error <= self._medians[i]))
        needed = math.log((actual + self.FLOOR) / (median + self.FLOOR))
        margin = self._margin(i)
        if needed > margin:
            self._margins[i] = min(needed, margin + self.GROWTH, self.MOST_MARGIN)
        else:
            self._margins[i] = max(0.0, margin - self.DECLINE * weight)
        self._seen[i] += 1

    @property
    def coverage(self) -> float:
        """Share of actual values within the predicted 90th percentile; 0 before the first."""
        return self.covered / self.count if self.count else 0.0

    def _margin(self, decade: int) -> float:
        known = self._margins[decade]
        if known is not None:
            return known
        for smaller in range(decade - 1, -1, -1):
            inherited = self._margins[smaller]
            if inherited is not None and self._seen[smaller] >= self._KNOWN:
                least, most = self.INHERITED
                return min(most, max(least, inherited))
        return self.FIRST_MARGIN

    def _decade(self, raw: float) -> int:
        decade = math.floor(math.log10(raw + self.FLOOR)) + 2
        return min(max(decade, 0), self._DECADES - 1)


class OutputMeans:
    """The mean outputs of a sample, from those that ended: E[min(length, limit)].

    Lengths are kept in geometric buckets with slow forgetting. Cold, it behaves as if
    ``PRIOR_WEIGHT`` outputs had been seen, spread evenly in the logarithm from 16 to 1,024.
    """

    EDGES = tuple(2 ** (i / 2) for i in range(41))
    PRIOR_WEIGHT = 4.0
    HALF_LIFE = 500.0

    def __init__(self) -> None:
        prior = [16 <= round(edge) <= 1024 for edge in self.EDGES]
        weight = self.PRIOR_WEIGHT / sum(prior)
        self._counts = [weight * known for known in prior]
        self._sums = [c * e for c, e in zip(self._counts, self.EDGES, strict=True)]
        self._gain = 1.0
        self._tables: tuple[list[float], list[float]] | None = None

    def add(self, length: int) -> None:
        """A sample ended by itself after ``length`` outputs."""
        # Newer ones weigh more, instead of all older ones less: the same mean for one addition.
        self._gain *= 2 ** (1 / self.HALF_LIFE)
        if self._gain > 1e6:
            self._counts = [c / self._gain for c in self._counts]
            self._sums = [s / self._gain for s in self._sums]
            self._gain = 1.0
        bucket = self._bucket(length)
        self._counts[bucket] += self._gain
        self._sums[bucket] += self._gain * length
        self._tables = None

    def expected(self, least: int, most: int) -> float:
        """Mean outputs of a sample that draws from ``least`` to ``most`` tokens."""
        if self._tables is None:
            self._tables = list(accumulate(self._counts)), list(accumulate(self._sums))
        counts, sums = self._tables
        bucket = self._bucket(most) - 1
        below, short = (counts[bucket], sums[bucket]) if bucket >= 0 else (0.0, 0.0)
        mean = (short + (counts[-1] - below) * most) / counts[-1]
        return min(float(most), max(mean, float(least), 1.0))

    def _bucket(self, length: int) -> int:
        """The first bucket whose edge is at least ``length``."""
        if length <= 1:
            return 0
        return min(len(self.EDGES) - 1, math.ceil(2 * math.log2(length) - 1e-9))


__all__ = [
    "Ahead",
    "Calibration",
    "EngineView",
    "Estimate",
    "OutputMeans",
    "Speed",
    "prefill_left",
    "steps_until_start",
]
