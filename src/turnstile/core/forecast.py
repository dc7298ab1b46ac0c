"""How long a newcomer will wait: from the cost of steps, who runs, and who stands before it.

The engine is seen through :class:`EngineView`, a few numbers of its last step. With ``W`` slots in
use every sample draws one token a step, so a slot is free again after as many steps as its sample
has outputs to come, and after as many again as the next one's outputs. The k-th to start does so

    at step  r[(k - 1) mod W] + s · ((k - 1) div W)

where ``r`` are the outputs still to come of those that run, ascending, and ``s`` the mean outputs
of those that wait. Steps become seconds by the fitted cost model, prompts to be computed meanwhile
are added by their tokens. What that leaves out (pages, cached prefixes, lengths that come out
otherwise) is put right by :mod:`correction`, which learns from actual ÷ predicted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from turnstile.core.cost import Coefficients, CostModel, StepCost
from turnstile.core.fairness import OUTPUT_CHARGE
from turnstile.core.request import Sequence as Running
from turnstile.core.scheduler import Scheduler


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
        """This work times ``share``."""
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


__all__ = [
    "Ahead",
    "EngineView",
    "Estimate",
    "Speed",
    "prefill_left",
    "steps_until_start",
]
