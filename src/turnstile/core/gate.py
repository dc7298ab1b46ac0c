"""The door: who may queue, how long they will wait, and when those turned away should come back.

Pure: time is passed in, so that the simulator refuses as the server does. From outside::

    gate = Gate(GateConfig(slots=128, budget=768, max_requests=1024, max_wait=60.0))
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
from dataclasses import replace

from turnstile.core.correction import Correction
from turnstile.core.crowd import Crowd, Place, Work
from turnstile.core.forecast import Ahead, EngineView, Estimate
from turnstile.core.forecaster import Forecaster, GateConfig
from turnstile.core.limits import CONCURRENT, REQUESTS, TOKENS, Allowance, Meter

MAX_REQUESTS = "max_num_queued_reqs"
MAX_TOKENS = "max_num_queued_tokens"
MAX_WAIT = "max_queue_wait"
TENANT_REASONS = (CONCURRENT, REQUESTS, TOKENS)
"""The tenant's own limits; the others are everybody's."""
REASONS = (MAX_REQUESTS, MAX_TOKENS, MAX_WAIT, *TENANT_REASONS)
RETRY_RANGE = (1.0, 60.0)
_MAX_PROMISES = 4096


class Refused(Exception):  # noqa: N818
    """The gate lets nobody in.

    Attributes
    ----------
    reason
        The bound that was met.
    bound
        Its value.
    waiting, waiting_tokens
        Prompts that wait without the refused ones, and their tokens.
    retry_after
        Seconds (1 to 60) after which a place should be free; None where the request alone is more
        than the bound allows, so that it never will be.
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


class Gate:
    """Reserves places, refuses, predicts. See the module."""

    def __init__(self, config: GateConfig) -> None:
        self.config = config
        self.view = EngineView(free_tokens=config.kv_tokens)
        self.wait = Correction()
        self.ttft = Correction()
        self.accepted = 0
        """Prompts let in."""
        self.rejections = dict.fromkeys(REASONS, 0)
        """Requests refused, by the bound they met."""
        self._crowd = Crowd(config.policy)
        self._forecaster = Forecaster(config, self._crowd)
        self._promises: list[float] = []
        self._meters: dict[str, Meter] = {}

    # -- queries ----------------------------------------------------------------------------------

    @property
    def load(self) -> int:
        """Everybody inside: prompts that wait, and samples that run."""
        return self.waiting + self.running

    @property
    def waiting(self) -> int:
        """Prompts inside that have not got a slot yet."""
        return self._crowd.waiting.prompts

    @property
    def waiting_tokens(self) -> int:
        """Their tokens."""
        return self._crowd.waiting.prompt_tokens

    @property
    def running(self) -> int:
        """Samples that have a slot."""
        return self._crowd.running_samples

    def predict(self, work: Work) -> Estimate | None:
        """What a newcomer would have to expect; None while the cost model is cold. O(tenants)."""
        return self._estimate(work, Ahead()) if self.view.warm else None

    def allowances(self, tenant: str, now: float) -> dict[str, Allowance]:
        """What is left of a tenant's minute: of its ``requests`` and ``tokens``, if limited."""
        meter = self._meters.get(tenant)
        if meter is None:
            return {}
        buckets = {"requests": meter.requests, "tokens": meter.tokens}
        return {name: Allowance.of(b, now) for name, b in buckets.items() if b is not None}

    # -- commands ---------------------------------------------------------------------------------

    def learn(self, view: EngineView) -> None:
        """Take note of the engine's last step. O(1)."""
        self.view = view

    def enter(self, works: Sequence[Work], now: float) -> list[Place]:
        """Reserve a place for each of a request's prompts, or raise :class:`Refused`.

        All of ``works`` belong to one tenant. Its own limits are looked at first.
        """
        expected = [self._crowd.expected(work) for work in works]
        queued = self._check(works, expected, now)
        estimate = self._forecast(works, expected)
        self._check_wait(works, estimate, queued, now)
        reserved = [0.0] * len(works)
        meter = self._meters.get(works[0].tenant)
        if meter is not None:
            tokens = _tokens(works, expected)
            reserved = meter.enter(tokens, sum(work.n for work in works), now)
        places = []
        for work, outputs, taken in zip(works, expected, reserved, strict=True):
            place = Place(self, work, outputs, now)
            place.estimate, place.reserved = estimate, taken
            self._crowd.enter(place)
            places.append(place)
        self.accepted += len(works)
        return places

    # -- the checks -------------------------------------------------------------------------------

    def check(self, works: Sequence[Work], now: float) -> None:
        """Raise :class:`Refused` where :meth:`enter` would; reserve nothing.

        For a request that is not tokenized yet, ``works`` holds the least it could cost: one that
        is refused even so need not be tokenized. No wait is predicted where there would be none.
        """
        expected = [self._crowd.expected(work) for work in works]
        queued = self._check(works, expected, now)
        if queued > 0 and self.config.max_wait is not None:
            self._check_wait(works, self._forecast(works, expected), queued, now)

    def _check(self, works: Sequence[Work], expected: Sequence[float], now: float) -> int:
        """All checks but that of the predicted wait; returns how many prompts would wait."""
        meter = self._meter(works[0], now)
        if meter is not None:
            self._check_tenant(meter, works, sum(_tokens(works, expected)), now)
        queued = self._queued(works, expected)
        if queued > 0:
            self._check_bounds(works, queued, now)
        return queued

    def _meter(self, work: Work, now: float) -> Meter | None:
        meter = self._meters.get(work.tenant)
        if meter is None and work.limits.any:
            meter = self._meters[work.tenant] = Meter(work.limits, now)
            meter.concurrent = self._crowd.samples_of(work.tenant)
        elif meter is not None:
            meter.set_limits(work.limits, now)
        return meter

    def _check_tenant(self, meter: Meter, works: Sequence[Work], tokens: float, now: float) -> None:
        samples = sum(work.n for work in works)
        prompt_tokens = sum(work.prompt_tokens for work in works)
        excess = meter.exceeded(prompt_tokens, tokens, samples, now)
        if excess is None:
            return
        seconds = excess.seconds
        if excess.reason == CONCURRENT and seconds is not None and self.view.warm:
            seconds = self._forecaster.seconds_until_end(works[0], self.view)
        self.rejections[excess.reason] += 1
        raise Refused(
            excess.reason,
            excess.bound,
            self.waiting,
            self.waiting_tokens,
            None if seconds is None else _clamped(seconds),
        )

    def _queued(self, works: Sequence[Work], expected: Sequence[float]) -> int:
        """Prompts that would wait, these included, were they let in: those without a free slot,
        or whose tokens find no free pages.
        """
        prompts = self._crowd.waiting.prompts + len(works)
        samples = self._crowd.waiting.samples + sum(work.n for work in works)
        fit: float = self.config.slots - self._crowd.running_samples
        if self.view.free_tokens is not None:
            tokens = self._crowd.waiting.prompt_tokens + self._crowd.waiting.outputs
            for work, outputs in zip(works, expected, strict=True):
                tokens += work.prompt_tokens + work.n * outputs
            room = self.view.free_tokens - self._forecaster.growth(self.view)
            fit = min(fit, samples * room / tokens if tokens else fit)
        fitting = max(0, min(prompts, int(fit * prompts / samples)))
        if not self._crowd.running_samples:
            fitting = max(1, fitting)  # whoever comes first runs, however large
        return prompts - fitting

    def _check_bounds(self, works: Sequence[Work], queued: int, now: float) -> None:
        config = self.config
        others = queued - len(works)
        if config.max_requests is not None and queued > config.max_requests:
            ever = len(works) <= config.max_requests + config.slots
            excess = queued - config.max_requests
            raise self._refusal(
                MAX_REQUESTS, config.max_requests, excess if ever else None, others, now
            )
        if config.max_tokens is None:
            return
        prompts = self._crowd.waiting.prompts + len(works)
        own = sum(work.prompt_tokens for work in works)
        tokens = (self._crowd.waiting.prompt_tokens + own) * queued / prompts
        if tokens > config.max_tokens:
            ever = len(works) <= config.slots or own <= config.max_tokens
            excess = math.ceil((tokens - config.max_tokens) * queued / tokens)
            raise self._refusal(
                MAX_TOKENS, config.max_tokens, excess if ever else None, others, now
            )

    def _forecast(self, works: Sequence[Work], expected: Sequence[float]) -> Estimate | None:
        """What the last of these would have to expect; None while the cost model is cold."""
        if not self.view.warm:
            return None
        first = works[:-1]
        before = Ahead(
            sum(work.n for work in first),
            sum(work.prompt_tokens for work in first),
            sum(w.n * e for w, e in zip(first, expected[:-1], strict=True)),
        )
        return self._estimate(works[-1], before)

    def _check_wait(
        self, works: Sequence[Work], estimate: Estimate | None, queued: int, now: float
    ) -> None:
        bound = self.config.max_wait
        if bound is None or estimate is None or queued <= 0 or estimate.wait <= bound:
            return
        raise self._refusal(MAX_WAIT, bound, 0, queued - len(works), now, estimate)

    def _refusal(
        self,
        reason: str,
        bound: float,
        starts: int | None,
        others: int,
        now: float,
        estimate: Estimate | None = None,
    ) -> Refused:
        """The exception for a request that does not fit until ``starts`` prompts have started
        (None: it never will).

        ``others`` is how many prompts wait without it and find no free slot. Those that do find one
        are inside too, but are not reported as waiting: the client would read of a queue longer
        than its bound.
        """
        self.rejections[reason] += 1
        retry = None if starts is None else self._retry_after(starts, bound, now, estimate)
        waiting = self._crowd.waiting
        others = min(max(0, others), waiting.prompts)
        tokens = waiting.prompt_tokens * others // waiting.prompts if waiting.prompts else 0
        return Refused(
            reason,
            bound,
            others,
            tokens,
            retry,
            estimate,
        )

    def _retry_after(
        self, starts: int, bound: float, now: float, estimate: Estimate | None
    ) -> float:
        """When a place should be free, behind everybody who was promised one before.

        Without that, all clients that a burst sent away would come back at the same moment, and all
        but a few would be sent away again.
        """
        promises = self._promises
        while promises and promises[0] <= now:
            heapq.heappop(promises)
        starts += len(promises)
        seconds = self._drain(starts) if starts else 0.0
        if estimate is not None:
            seconds += estimate.wait - bound
        seconds = _clamped(seconds)
        if len(promises) < _MAX_PROMISES:
            heapq.heappush(promises, now + seconds)
        return seconds

    def _drain(self, starts: int) -> float:
        if not self.view.warm:
            return RETRY_RANGE[0] * starts / self.config.slots
        return self.wait.correct(self._forecaster.seconds_until_started(starts, self.view))[0]

    def _estimate(self, work: Work, before: Ahead) -> Estimate:
        wait, ttft = self._forecaster.predict(work, before, self.view)
        told = (*self.wait.correct(wait), *self.ttft.correct(ttft))
        return Estimate(*told, wait, ttft, self.waiting)

    # -- what places tell -------------------------------------------------------------------------

    def on_start(self, place: Place, now: float) -> None:
        """A place got its slot: compare with what was predicted."""
        self._crowd.start(place)
        estimate = place.estimate
        if estimate is not None:
            waited = max(0.0, now - place.entered)
            told = (estimate.raw_wait, estimate.wait, estimate.wait_p90)
            self.wait.observe(*told, waited, estimate.ahead)

    def on_first_token(self, place: Place, now: float) -> None:
        """A place's prompt is computed."""
        self._crowd.first_token(place)
        place.first_step = self.view.steps
        estimate = place.estimate
        if estimate is not None:
            took = max(0.0, now - place.entered)
            told = (estimate.raw_ttft, estimate.ttft, estimate.ttft_p90)
            self.ttft.observe(*told, took, estimate.ahead)

    def on_leave(self, place: Place, now: float, outputs: Sequence[int], drawn: int | None) -> None:
        """A place is free again; its tenant pays for what was computed."""
        crowd, work = self._crowd, place.work
        meter = self._meters.get(work.tenant)
        if meter is not None:
            tokens = sum(outputs) if drawn is None else drawn
            used = work.prompt_tokens + tokens if place.started else 0
            meter.leave(work.n, place.reserved, used, now)
        crowd.leave(place, outputs)
        if not crowd.running_samples and not crowd.waiting.prompts:
            # An engine whose last request was cancelled says nothing more: all is free.
            free = self.config.kv_tokens
            self.view = replace(self.view, free_tokens=free, prefill_tokens=0)


def _tokens(works: Sequence[Work], expected: Sequence[float]) -> list[float]:
    return [w.prompt_tokens + w.n * e for w, e in zip(works, expected, strict=True)]


def _clamped(seconds: float) -> float:
    low, high = RETRY_RANGE
    return min(high, max(low, seconds))


__all__ = [
    "REASONS",
    "Gate",
    "GateConfig",
    "Place",
    "Refused",
    "Work",
]
