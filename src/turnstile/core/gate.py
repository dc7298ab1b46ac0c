"""The door: who may queue, how long they will wait, and when those turned away should come back.

Pure: time is passed in, so that the simulator refuses as the server does. From outside::

    gate = Gate(GateConfig(slots=128, budget=512, max_requests=1024, max_wait=60.0))
    places = gate.enter([Work(tenant="a", prompt_tokens=90, max_tokens=200)], now)   or Refused
    gate.learn(EngineView.of(scheduler))           after every step
    place.start(now)                               it got a slot
    place.first_token(now)
    place.leave(now, outputs)                      however it ended

A place is reserved at the check itself, so that a burst cannot slip through between looking and
entering; prompts of one request enter together or not at all. Work that finds a free slot does not
count as waiting: a bound of 0 still serves, and an idle server refuses nobody. What has a place
keeps it through preemption and a restart of the engine: nothing that was let in is ever refused.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from turnstile.core.forecast import (
    Ahead,
    Calibration,
    EngineView,
    Estimate,
    OutputMeans,
    Speed,
    steps_until_start,
)
from turnstile.core.scheduler import OUTPUT_CHARGE

MAX_REQUESTS = "max_num_queued_reqs"
MAX_TOKENS = "max_num_queued_tokens"
MAX_WAIT = "max_queue_wait"
REASONS = (MAX_REQUESTS, MAX_TOKENS, MAX_WAIT)
RETRY_RANGE = (1.0, 60.0)
_MAX_PROMISES = 4096


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
    policy
        The engine's queue policy: who stands before whom.
    ageing, reserved_slots
        As the engine has them.
    """

    slots: int
    budget: int = 512
    max_requests: int | None = None
    max_tokens: int | None = None
    max_wait: float | None = None
    policy: str = "fair"
    ageing: float = 30.0
    reserved_slots: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one prompt will cost.

    Attributes
    ----------
    tenant, weight, priority
        Whose it is, and where it stands in the queue.
    prompt_tokens, n
        Tokens to compute, samples wanted.
    min_tokens, max_tokens
        Least and most outputs of each sample.
    """

    tenant: str = "default"
    weight: float = 1.0
    priority: int = 0
    prompt_tokens: int
    max_tokens: int
    min_tokens: int = 0
    n: int = 1


class Refused(Exception):  # noqa: N818
    """The gate lets nobody in.

    Attributes
    ----------
    reason
        The bound that was met.
    bound
        Its value.
    waiting, waiting_tokens
        Prompts that wait, and their tokens.
    retry_after
        Seconds (1 to 60) after which a place should be free; None where the request alone is more
        than the queue holds, so that it never will be.
    estimate
        What was predicted for it, where the bound is on that.
    """

    def __init__(
        self,
        reason: str,
        bound: float,
        waiting: int,
        waiting_tokens: int,
        retry_after: float | None,
        estimate: Estimate | None = None,
    ) -> None:
        super().__init__(f"{reason} is {bound:g}")
        self.reason = reason
        self.bound = bound
        self.waiting = waiting
        self.waiting_tokens = waiting_tokens
        self.retry_after = retry_after
        self.estimate = estimate


class Place:
    """A place in the queue, from acceptance until the prompt's last sample ends."""

    __slots__ = (
        "_gate",
        "entered",
        "estimate",
        "expected",
        "first_step",
        "left",
        "started",
        "work",
    )

    def __init__(self, gate: Gate, work: Work, expected: float, now: float) -> None:
        self._gate = gate
        self.work = work
        self.expected = expected
        """Outputs of each sample, as forecast."""
        self.entered = now
        self.estimate: Estimate | None = None
        """What was predicted at the door; None while the cost model was cold."""
        self.started = False
        self.first_step: int | None = None
        self.left = False

    def start(self, now: float) -> None:
        """It got a slot. May be said again."""
        if not self.started and not self.left:
            self.started = True
            self._gate._on_start(self, now)

    def first_token(self, now: float) -> None:
        """Its first token came out. May be said again."""
        if self.first_step is None and not self.left:
            self.start(now)
            self._gate._on_first_token(self, now)

    def leave(self, now: float, outputs: Sequence[int] = ()) -> None:
        """It ended, however. May be said again.

        ``outputs`` are the lengths of the samples that ended by themselves: what the gate learns
        output lengths from.
        """
        if not self.left:
            self.left = True
            self._gate._on_leave(self, outputs)


class _Lane:
    """The waiting work of one tenant at one priority, in sums."""

    __slots__ = ("outputs", "prompt_tokens", "prompts", "samples")

    def __init__(self) -> None:
        self.prompts = 0
        self.samples = 0
        self.prompt_tokens = 0
        self.outputs = 0.0

    def add(self, place: Place, sign: int) -> None:
        work = place.work
        self.prompts += sign
        self.samples += sign * work.n
        self.prompt_tokens += sign * work.prompt_tokens
        self.outputs += sign * work.n * place.expected

    @property
    def charge(self) -> float:
        """What all of it will be charged."""
        return self.prompt_tokens + OUTPUT_CHARGE * self.outputs


class Gate:
    """Reserves places, refuses, predicts. See the module."""

    def __init__(self, config: GateConfig) -> None:
        self.config = config
        self.view = EngineView()
        self.wait = Calibration()
        self.ttft = Calibration()
        self.accepted = 0
        """Prompts let in."""
        self.rejections = dict.fromkeys(REASONS, 0)
        """Requests refused, by the bound they met."""
        self._lanes: dict[str, dict[int, _Lane]] = {}
        self._weights: dict[str, float] = {}
        self._waiting = _Lane()
        self._running: dict[Place, None] = {}
        self._running_samples = 0
        self._running_of: dict[str, int] = {}
        self._outputs: dict[str, OutputMeans] = {}
        self._promises: list[float] = []
        self._remaining: tuple[int, list[float], float] | None = None

    # -- queries ----------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Prompts inside that have not got a slot yet."""
        return self._waiting.prompts

    @property
    def waiting_tokens(self) -> int:
        """Their tokens."""
        return self._waiting.prompt_tokens

    @property
    def running(self) -> int:
        """Samples that have a slot."""
        return self._running_samples

    def predict(self, work: Work) -> Estimate | None:
        """What a newcomer would have to expect; None while the cost model is cold. O(tenants)."""
        return self._estimate(work, Ahead()) if self.view.warm else None

    # -- commands ---------------------------------------------------------------------------------

    def learn(self, view: EngineView) -> None:
        """Take note of the engine's last step. O(1)."""
        self.view = view

    def enter(self, works: Sequence[Work], now: float) -> list[Place]:
        """Reserve a place for each of a request's prompts, or raise :class:`Refused`."""
        expected = [self._expected(work) for work in works]
        queued = self._queued(works, expected)
        if queued > 0:
            self._check_bounds(works, queued, now)
        estimate = self._check_wait(works, expected, queued, now)
        places = []
        for work, outputs in zip(works, expected, strict=True):
            place = Place(self, work, outputs, now)
            place.estimate = estimate
            self._lane(work).add(place, 1)
            self._waiting.add(place, 1)
            places.append(place)
        self.accepted += len(works)
        return places

    # -- the checks -------------------------------------------------------------------------------

    def _queued(self, works: Sequence[Work], expected: Sequence[float]) -> int:
        """Prompts that would wait, these included, were they let in: those without a free slot,
        or whose tokens find no free pages.
        """
        prompts = self._waiting.prompts + len(works)
        samples = self._waiting.samples + sum(work.n for work in works)
        fit: float = self.config.slots - self._running_samples
        if self.view.free_tokens is not None:
            tokens = self._waiting.prompt_tokens + self._waiting.outputs
            for work, outputs in zip(works, expected, strict=True):
                tokens += work.prompt_tokens + work.n * outputs
            room = self.view.free_tokens - self.view.prefill_tokens - sum(self._ends()[0])
            fit = min(fit, samples * room / tokens if tokens else fit)
        fitting = max(0, min(prompts, int(fit * prompts / samples)))
        if not self._running:
            fitting = max(1, fitting)  # whoever comes first runs, however large
        return prompts - fitting

    def _check_bounds(self, works: Sequence[Work], queued: int, now: float) -> None:
        config = self.config
        if config.max_requests is not None and queued > config.max_requests:
            ever = len(works) <= config.max_requests + config.slots
            excess = queued - config.max_requests
            raise self._refusal(MAX_REQUESTS, config.max_requests, excess if ever else None, now)
        if config.max_tokens is None:
            return
        prompts = self._waiting.prompts + len(works)
        own = sum(work.prompt_tokens for work in works)
        tokens = (self._waiting.prompt_tokens + own) * queued / prompts
        if tokens > config.max_tokens:
            ever = len(works) <= config.slots or own <= config.max_tokens
            excess = math.ceil((tokens - config.max_tokens) * queued / tokens)
            raise self._refusal(MAX_TOKENS, config.max_tokens, excess if ever else None, now)

    def _check_wait(
        self, works: Sequence[Work], expected: Sequence[float], queued: int, now: float
    ) -> Estimate | None:
        """The estimate for the last of these; raises where it is beyond the bound."""
        if not self.view.warm:
            return None
        before = Ahead(
            sum(work.n for work in works[:-1]),
            sum(work.prompt_tokens for work in works[:-1]),
            sum(w.n * e for w, e in zip(works[:-1], expected[:-1], strict=True)),
        )
        estimate = self._estimate(works[-1], before)
        bound = self.config.max_wait
        if bound is not None and queued > 0 and estimate.wait > bound:
            raise self._refusal(MAX_WAIT, bound, 0, now, estimate)
        return estimate

    def _refusal(
        self,
        reason: str,
        bound: float,
        starts: int | None,
        now: float,
        estimate: Estimate | None = None,
    ) -> Refused:
        """``starts`` prompts must have started before the request fits; None: it never does."""
        self.rejections[reason] += 1
        retry = None if starts is None else self._retry_after(starts, bound, now, estimate)
        return Refused(
            reason, bound, self._waiting.prompts, self._waiting.prompt_tokens, retry, estimate
        )

    def _retry_after(
        self, starts: int, bound: float, now: float, estimate: Estimate | None
    ) -> float:
        """When a place should be free, counting those who were told so before: they come first.
        Else all that a burst sent away would come back at once, to be sent away again.
        """
        promises = self._promises
        while promises and promises[0] <= now:
            heapq.heappop(promises)
        starts += len(promises)
        seconds = self._drain(starts) if starts else 0.0
        if estimate is not None:
            seconds += estimate.wait - bound
        low, high = RETRY_RANGE
        seconds = min(high, max(low, seconds))
        if len(promises) < _MAX_PROMISES:
            heapq.heappush(promises, now + seconds)
        return seconds

    def _drain(self, starts: float) -> float:
        """Seconds until so many of those waiting will have started."""
        if not self.view.warm:
            return RETRY_RANGE[0] * starts / self.config.slots
        ends, context = self._ends()
        waiting = self._waiting
        service = waiting.outputs / waiting.samples if waiting.samples else 1.0
        prompt = waiting.prompt_tokens / waiting.samples if waiting.samples else 0.0
        speed = Speed.of(self.view, max(1, len(ends)), context, self.config.budget)
        steps = steps_until_start(ends, 0, service, starts)
        return self.wait.correct(speed.seconds(steps, starts * prompt))[0]

    # -- the estimate -----------------------------------------------------------------------------

    def _estimate(self, work: Work, before: Ahead) -> Estimate:
        config, view = self.config, self.view
        ends, context = self._ends()
        ahead = self._ahead(work, before)
        slots = config.slots
        if len(self._running_of) > 1 and self._running_of.get(work.tenant):
            slots -= min(config.reserved_slots, config.slots // 8)
        width = self._width(slots, ends, ahead, context)
        running = max(1, min(width, len(ends) + math.ceil(ahead.samples) + work.n))
        speed = Speed.of(view, running, context or work.prompt_tokens, config.budget)
        place = ahead.samples + work.n
        free = width - len(ends)
        wait = 0.0
        if place <= free:
            if ends:  # it enters at the next step: half of the one that runs is still to come
                wait = speed.seconds(1, min(view.prefill_tokens, speed.room)) / 2
        else:
            service = ahead.outputs / ahead.samples if ahead.samples else self._expected(work)
            steps = steps_until_start(ends, free, service, place)
            wait = speed.seconds(steps, view.prefill_tokens + ahead.prompt_tokens)
        # Prompts share a step: while its own is computed, as much of each other's may be.
        others = min(
            view.prefill_tokens + ahead.prompt_tokens, work.prompt_tokens * max(0, running - 1)
        )
        ttft = wait + speed.seconds(1, work.prompt_tokens + others)
        return Estimate(*self.wait.correct(wait), *self.ttft.correct(ttft), wait, ttft)

    def _width(self, slots: int, ends: Sequence[float], ahead: Ahead, context: float) -> int:
        """Samples that run at once when all is full: as many as there are slots, or pages for."""
        free = self.view.free_tokens
        if free is None or ahead.samples + len(ends) == 0:
            return slots
        growth = self.view.prefill_tokens + sum(ends)
        mean = (ahead.prompt_tokens + ahead.outputs) / ahead.samples if ahead.samples else context
        fit = len(ends) + max(0, int((free - growth) / mean)) if mean else slots
        return max(1, min(slots, max(fit, len(ends))))

    def _ahead(self, work: Work, before: Ahead) -> Ahead:
        """Who starts before a newcomer, by the engine's policy."""
        samples, prompt, outputs = before.samples, before.prompt_tokens, before.outputs
        policy = self.config.policy
        own = self._lanes.get(work.tenant, {}) if policy == "fair" else {}
        if policy != "fair":
            for lanes in self._lanes.values():
                for priority, lane in lanes.items():
                    if policy != "priority" or priority <= work.priority:
                        samples += lane.samples
                        prompt += lane.prompt_tokens
                        outputs += lane.outputs
            return Ahead(samples, prompt, outputs)
        for priority, lane in own.items():
            if priority <= work.priority:
                samples += lane.samples
                prompt += lane.prompt_tokens
                outputs += lane.outputs
        return self._other_tenants(work, Ahead(samples, prompt, outputs))

    def _other_tenants(self, work: Work, own: Ahead) -> Ahead:
        """Add what other tenants are owed by the time the newcomer's turn comes: the least served
        goes first, so each gets as much for its weight as the newcomer's tenant.
        """
        served = self.view.served
        least = min(served.values(), default=0.0)
        charge = own.prompt_tokens + OUTPUT_CHARGE * own.outputs
        turn = served.get(work.tenant, least) + charge / work.weight
        samples, prompt, outputs = own.samples, own.prompt_tokens, own.outputs
        for tenant, lanes in self._lanes.items():
            if tenant == work.tenant:
                continue
            owed = (turn - served.get(tenant, least)) * self._weights[tenant]
            if owed <= 0:
                continue
            total = sum(lane.charge for lane in lanes.values())
            share = min(1.0, owed / total) if total else 1.0
            for lane in lanes.values():
                samples += share * lane.samples
                prompt += share * lane.prompt_tokens
                outputs += share * lane.outputs
        return Ahead(samples, prompt, outputs)

    def _expected(self, work: Work) -> float:
        means = self._outputs.get(work.tenant)
        if means is None:
            means = self._outputs[work.tenant] = OutputMeans()
        return means.expected(min(work.min_tokens, work.max_tokens), work.max_tokens)

    def _ends(self) -> tuple[list[float], float]:
        """Outputs to come of every sample that runs, ascending, and their mean context.

        O(running), once a step at most.
        """
        step = self.view.steps
        if self._remaining is None or self._remaining[0] != step:
            ends: list[float] = []
            context = 0.0
            for place in self._running:
                work = place.work
                first = step + 1 if place.first_step is None else place.first_step
                done = max(0, step - first + 1)
                left = place.expected - done
                if left < 1.0:  # it has outlived its forecast: the older, the more to come
                    left = max(1.0, done / 3)
                left = max(1.0, min(left, work.max_tokens - done))
                ends += [left] * work.n
                context += work.n * (work.prompt_tokens + done)
            ends.sort()
            self._remaining = (step, ends, context / len(ends) if ends else 0.0)
        return self._remaining[1], self._remaining[2]

    # -- what places tell -------------------------------------------------------------------------

    def _lane(self, work: Work) -> _Lane:
        self._weights[work.tenant] = work.weight
        lanes = self._lanes.setdefault(work.tenant, {})
        lane = lanes.get(work.priority)
        if lane is None:
            lane = lanes[work.priority] = _Lane()
        return lane

    def _stop_waiting(self, place: Place) -> None:
        work = place.work
        self._waiting.add(place, -1)
        lanes = self._lanes[work.tenant]
        lanes[work.priority].add(place, -1)
        if not lanes[work.priority].prompts:
            del lanes[work.priority]
            if not lanes:
                del self._lanes[work.tenant], self._weights[work.tenant]

    def _on_start(self, place: Place, now: float) -> None:
        self._stop_waiting(place)
        work = place.work
        self._running[place] = None
        self._running_samples += work.n
        self._running_of[work.tenant] = self._running_of.get(work.tenant, 0) + work.n
        self._remaining = None
        estimate = place.estimate
        if estimate is not None:
            waited = max(0.0, now - place.entered)
            self.wait.observe(estimate.raw_wait, estimate.wait, estimate.wait_p90, waited)

    def _on_first_token(self, place: Place, now: float) -> None:
        place.first_step = self.view.steps
        estimate = place.estimate
        if estimate is not None:
            took = max(0.0, now - place.entered)
            self.ttft.observe(estimate.raw_ttft, estimate.ttft, estimate.ttft_p90, took)

    def _on_leave(self, place: Place, outputs: Sequence[int]) -> None:
        work = place.work
        if not place.started:
            self._stop_waiting(place)
            return
        del self._running[place]
        self._remaining = None
        self._running_samples -= work.n
        self._running_of[work.tenant] -= work.n
        if not self._running_of[work.tenant]:
            del self._running_of[work.tenant]
        means = self._outputs.get(work.tenant)
        if means is not None:
            for length in outputs:
                means.add(length)


__all__ = [
    "REASONS",
    "Gate",
    "GateConfig",
    "Place",
    "Refused",
    "Work",
]
