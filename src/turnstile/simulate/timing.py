"""How long a step takes, by a running server's own fit.

A roofline for hardware that is not here is in :mod:`turnstile.simulate.hardware`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from turnstile.core.cost import Coefficients, CostModel, StepCost
from turnstile.core.plan import Plan


@dataclass(slots=True)
class StepWork:
    """What a step computes, by kind.

    Attributes
    ----------
    decodes, decode_context
        Chunks of one token, and the tokens they attend to (themselves included), summed.
    chunks, chunk_tokens, chunk_pairs, chunk_context
        Longer chunks: how many, their tokens, their query-key pairs, and the tokens of K and V
        they have to read (each once).
    read_again
        Tokens of K and V that are read for more than one of the ``decodes``, beyond the first.
    """

    decodes: int = 0
    decode_context: int = 0
    chunks: int = 0
    chunk_tokens: int = 0
    chunk_pairs: int = 0
    chunk_context: int = 0
    read_again: int = 0

    def add(self, plan: Plan) -> StepWork:
        """Count a plan's chunks too; returns itself."""
        for chunk in plan.chunks:
            count, start = chunk.count, chunk.start
            if count == 1:
                self.decodes += 1
                self.decode_context += start + 1
            else:
                self.chunks += 1
                self.chunk_tokens += count
                self.chunk_pairs += count * start + count * (count + 1) // 2
                self.chunk_context += start + count
        return self

    @property
    def cost(self) -> StepCost:
        """The features of the linear model (:mod:`turnstile.core.cost`)."""
        cost = StepCost(
            self.decodes + self.chunk_tokens,
            self.decode_context + self.chunk_pairs,
            self.decodes + self.chunks,
            self.decode_context,
            self.decode_context,
        )
        return cost.sharing(self.read_again) if self.read_again else cost


class TimingError(ValueError):
    """Steps cannot take this long; the message says why."""


class StepTiming(Protocol):
    """Foretells the seconds of a step."""

    @property
    def coefficients(self) -> Coefficients:
        """The linear model nearest to it, for a scheduler that budgets by time."""

    def seconds(self, work: StepWork, step: int) -> float:
        """Seconds from one commit to the next when ``work`` is what step number ``step`` does."""


@dataclass(frozen=True, slots=True)
class LinearTiming:
    """The linear model of :mod:`turnstile.core.cost`."""

    coefficients: Coefficients

    def seconds(self, work: StepWork, step: int) -> float:
        return self.coefficients.predict(work.cost)


@dataclass(frozen=True, slots=True)
class MeanTiming:
    """The mean of several linear models: of one machine, learned at several times. ``coefficients``
    is the one that a scheduler on it goes by.
    """

    models: tuple[Coefficients, ...]
    coefficients: Coefficients

    def seconds(self, work: StepWork, step: int) -> float:
        cost = work.cost
        return sum(model.predict(cost) for model in self.models) / len(self.models)

    def scaled(self, pace: float) -> MeanTiming:
        """The same machine, all of whose steps take ``pace`` times as long."""
        models = tuple(model.scaled(pace) for model in self.models)
        return MeanTiming(models, self.coefficients.scaled(pace))


@dataclass(frozen=True, slots=True)
class RecordedTiming:
    """Steps take as long as they did in a real run, one after the other: to tell what is wrong
    besides. What comes after the last of them takes as long as another timing says.
    """

    recorded: Sequence[float]
    after: StepTiming

    @property
    def coefficients(self) -> Coefficients:
        return self.after.coefficients

    def seconds(self, work: StepWork, step: int) -> float:
        return self.recorded[step] if step < len(self.recorded) else self.after.seconds(work, step)


class KnownCost(CostModel):
    """A cost model that knows the truth from the start and has nothing to learn."""

    def __init__(self, coefficients: Coefficients) -> None:
        super().__init__()
        self._known = coefficients

    @property
    def warm(self) -> bool:
        return True

    @property
    def coefficients(self) -> Coefficients:
        return self._known

    def observe(self, cost: StepCost, seconds: float) -> None:
        """Nothing to learn."""


def finite(coefficients: Coefficients) -> Coefficients:
    """Return them, once they make sense.

    Raises
    ------
    ValueError
        One is negative or not a number, or a step would take no time at all.
    """
    values = {
        "alpha": coefficients.alpha,
        "beta": coefficients.beta,
        "gamma": coefficients.gamma,
        "delta": coefficients.delta,
        "epsilon": coefficients.epsilon or 0.0,
        "zeta": coefficients.zeta or 0.0,
    }
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise TimingError(f"The cost coefficient {name} is {value}; it must be 0 or more.")
    if not any(values.values()):
        raise TimingError("All cost coefficients are 0: the server has measured no step yet.")
    return coefficients
