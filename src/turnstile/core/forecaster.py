"""From who is inside and what a step costs to seconds: :class:`Forecaster`."""

from __future__ import annotations

from dataclasses import dataclass

from turnstile.core.crowd import Crowd, Ends, Work
from turnstile.core.fairness import FairQueue, QueuePolicy
from turnstile.core.forecast import Ahead, EngineView, Speed, steps_until_start


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """The bounds of a gate, and the sizes of the engine behind it.

    Attributes
    ----------
    slots, budget
        Samples the engine runs at once, tokens of a step.
    max_requests, max_tokens, max_wait
        Most prompts waiting, most of their tokens, most seconds predicted until a slot; None for
        no bound.
    kv_tokens
        Tokens the whole page pool holds; None where there is none.
    policy
        The engine's queue policy: who stands before whom.
    reserved_slots
        As the engine has them.
    """

    slots: int
    budget: int = 768
    max_requests: int | None = None
    max_tokens: int | None = None
    max_wait: float | None = None
    kv_tokens: int | None = None
    policy: type[QueuePolicy] = FairQueue
    reserved_slots: int = 1


class Forecaster:
    """Predicts for a gate. No side effects; raw figures, not corrected by what was learned."""

    def __init__(self, config: GateConfig, crowd: Crowd) -> None:
        self._config = config
        self._crowd = crowd

    def growth(self, view: EngineView) -> float:
        """Tokens that those who run will still add to their pages."""
        return view.prefill_tokens + self._ends(view).outputs

    def seconds_until_end(self, work: Work, view: EngineView) -> float:
        """Seconds until a sample of this work's tenant should end."""
        ends = self._ends(view)
        own = self._crowd.next_end(work.tenant, view.steps)
        steps = self._crowd.expected(work) if own is None else own
        return self._speed(ends, len(ends.steps), view).seconds(steps, 0)

    def seconds_until_started(self, starts: float, view: EngineView) -> float:
        """Seconds until so many of those waiting will have started."""
        ends, waiting = self._ends(view), self._crowd.waiting
        speed = self._speed(ends, len(ends.steps), view)
        ahead = Ahead(waiting.samples, waiting.prompt_tokens, waiting.outputs)
        service = _service(ahead, 1.0, max(1, len(ends.steps)), speed)
        steps = steps_until_start(ends.steps, 0, service, starts)
        share = starts / waiting.samples if waiting.samples else 0.0
        return speed.seconds(steps, view.prefill_tokens + min(1.0, share) * waiting.prompt_tokens)

    def predict(self, work: Work, before: Ahead, view: EngineView) -> tuple[float, float]:
        """Seconds until a newcomer, behind ``before``, gets a slot, and its first token."""
        ends = self._ends(view)
        ahead = self._crowd.ahead(work, before, view.served)
        wait = self._wait(work, ends, ahead, view)
        ahead, wait = self._with_who_comes(work, before, ends, ahead, wait, view)
        width, busy = self._width(work, ends, ahead, view), len(ends.steps)
        speed = self._speed(ends, min(width, busy + ahead.samples + work.n), view)
        # Prompts share steps: in the time its own is computed, each prompt beside it gets as many
        # tokens. Prompts ahead of it are beside it only where all start at once: where it has to
        # wait for a slot, most of them are computed by then.
        together = ahead.samples + work.n <= width - busy
        sharing = self._crowd.prompts_beside(work) + (ahead.samples if together else 0.0)
        beside = work.prompt_tokens * sharing
        tokens = work.prompt_tokens + min(beside, view.prefill_tokens + ahead.prompt_tokens)
        return wait, wait + speed.seconds(max(1.0, tokens / speed.room), tokens)

    def _wait(self, work: Work, ends: Ends, ahead: Ahead, view: EngineView) -> float:
        """Seconds until a newcomer gets a slot."""
        width, busy = self._width(work, ends, ahead, view), len(ends.steps)
        speed = self._speed(ends, min(width, busy + ahead.samples + work.n), view)
        place, free = ahead.samples + work.n, width - busy
        if place > free:
            service = _service(ahead, self._crowd.expected(work), width, speed)
            steps = steps_until_start(ends.steps, free, service, place)
            return speed.seconds(steps, view.prefill_tokens + ahead.prompt_tokens)
        # It enters at the next step: half of the one that runs is still to come.
        return speed.seconds(1, view.prefill_tokens) / 2 if busy else 0.0

    def _with_who_comes(
        self, work: Work, before: Ahead, ends: Ends, ahead: Ahead, wait: float, view: EngineView
    ) -> tuple[Ahead, float]:
        """Add those who come while the newcomer waits and are served before it, which makes it wait
        for longer, in which more come: the wait ``t`` with ``t = f(t)``.

        ``f`` is nearly a straight line, until others have had what they are owed: where the line
        through the first two points meets ``t`` is the first guess, which comes down from there.
        """
        if wait <= 0.0 or not self._crowd.others_ask(work.tenant):
            return ahead, wait
        horizon = wait
        for _ in range(_ROUNDS):
            ahead = self._crowd.ahead(work, before, view.served, horizon)
            longer = self._wait(work, ends, ahead, view)
            if horizon == wait:
                longer = wait / max(1.0 / _MOST_LONGER, 1.0 - (longer - wait) / wait)
            horizon = longer
        return ahead, horizon

    def _ends(self, view: EngineView) -> Ends:
        room = max(1, self._config.budget - self._crowd.running_samples)
        return self._crowd.ends(view.steps, room, view.prefill_tokens)

    def _speed(self, ends: Ends, running: float, view: EngineView) -> Speed:
        """The speed with ``running`` samples, of which the same share decodes as now."""
        busy = len(ends.steps)
        decoding = running * ends.decoding / busy if busy else running
        return Speed.of(view, max(1, round(decoding)), ends.context, self._config.budget)

    def _width(self, work: Work, ends: Ends, ahead: Ahead, view: EngineView) -> int:
        """Samples that run at once when all is full: as many as there are slots, or pages for."""
        config, crowd, busy = self._config, self._crowd, len(ends.steps)
        slots = config.slots
        reserved = min(config.reserved_slots, slots // 8) if config.policy.tenants_share else 0
        if reserved and crowd.running_of.get(work.tenant):
            slots -= reserved if len(crowd.running_of) > 1 else 0
        elif reserved and busy and not ahead.samples and crowd.knows(work.tenant):
            # A slot, and pages, are kept for tenants that run nothing.
            return max(1, min(slots, busy + work.n))
        if view.free_tokens is None or not (ahead.samples or busy):
            return slots
        room = view.free_tokens - view.prefill_tokens - ends.outputs
        mean = ends.context
        if ahead.samples:
            mean = (ahead.prompt_tokens + ahead.outputs) / ahead.samples
        fit = busy + max(0, int(room / mean)) if mean else slots
        return max(1, min(slots, max(fit, busy)))


def _service(ahead: Ahead, otherwise: float, width: int, speed: Speed) -> float:
    """Steps that one of those ahead has its slot: for its outputs, or, where prompts are what is
    short of room, until those of all slots are computed.
    """
    if not ahead.samples:
        return otherwise
    prompt = ahead.prompt_tokens / ahead.samples
    return max(ahead.outputs / ahead.samples, width * prompt / speed.room)


_ROUNDS = 3
_MOST_LONGER = 10.0
"""How much longer a wait may become by those who come in it, at the first guess."""

__all__ = ["Forecaster", "GateConfig"]
