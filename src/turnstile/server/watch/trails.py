"""Where requests are, and where their time went: :class:`RequestLog`, a view of the event stream.

A sample is in one :class:`Part` of its way at any time, and an event of the engine moves it to the
next. The times of the parts add up to its life, so whatever a request's latency was, this says
what it was spent on. Nothing here is done per token: a sample that decodes costs nothing until
something happens to it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from turnstile.core import events
from turnstile.core.events import AnyEvent, WaitReason
from turnstile.engine.protocol import StepResult
from turnstile.server.answer.usage import Record

SampleKey = tuple[str, int]
"""Engine request id and sample index."""

KEPT = 1000
"""Ended requests that are remembered."""
_MAX_NOTES = 48
_RATE_WINDOW = 32


class Part(StrEnum):
    """A part of a sample's way."""

    QUEUE = "queue"
    """Waits for its first slot."""
    PREFILL = "prefill"
    """Its prompt is computed."""
    DECODE = "decode"
    """One token a step."""
    PREEMPTED = "preempted"
    """Lost its slot and pages, and waits for new ones."""
    RECOMPUTE = "recompute"
    """What it lost to a preemption or a crash is computed again."""
    RECOVERY = "recovery"
    """The engine died; from its last sign of life until the sample is with the next one."""


_WAITS = (Part.QUEUE, Part.PREEMPTED)
_FURTHEST_BEHIND = (
    Part.RECOVERY, Part.QUEUE, Part.PREEMPTED, Part.PREFILL, Part.RECOMPUTE, Part.DECODE,
)  # fmt: skip
_ORDER = {part: place for place, part in enumerate(_FURTHEST_BEHIND)}


@dataclass(slots=True)
class SampleTrail:
    """One sample on its way. Times are seconds on the engine's clock.

    ``spent`` are the seconds in each part that is over; ``since`` is when the one it is in began.
    ``reason`` is why it waits, while it does. ``slotted``: it has had a slot.
    ``handed_over``: the engine that runs now knows of it.
    """

    part: Part = Part.QUEUE
    since: float = 0.0
    spent: dict[Part, float] = field(default_factory=dict)
    reason: WaitReason = WaitReason.QUEUED
    slotted: bool = False
    handed_over: bool = True
    finish: str | None = None
    ended: float | None = None
    preemptions: int = 0
    crashes: int = 0
    recomputed: int = 0
    expected: int = 0

    @property
    def waits(self) -> bool:
        """Whether it is alive, with the engine, and has no slot."""
        lost = self.part is Part.RECOVERY and self.handed_over
        return self.ended is None and (self.part in _WAITS or lost)

    def move(self, part: Part, now: float) -> None:
        """Enter the next part; what is over is booked."""
        self.spent[self.part] = self.spent.get(self.part, 0.0) + max(0.0, now - self.since)
        self.part, self.since = part, max(now, self.since)

    def end(self, finish: str, now: float) -> None:
        """It has ended."""
        self.move(self.part, now)
        self.finish, self.ended = finish, self.since

    def times(self, now: float) -> dict[Part, float]:
        """Seconds in every part up to ``now``; they add up to the sample's life."""
        times = {part: self.spent.get(part, 0.0) for part in Part}
        if self.ended is None:
            times[self.part] += max(0.0, now - self.since)
        return times

    def fork(self) -> SampleTrail:
        """A sibling: it has come all the way with this one."""
        return SampleTrail(
            self.part, self.since, dict(self.spent), slotted=True, crashes=self.crashes
        )


class RequestTrail:
    """One HTTP request on its way: what it is, and the trails of its samples.

    Attributes
    ----------
    record
        While it lives; what is told of an ended one is in ``counts``.
    estimate
        What the gate foretold of its first prompt; None while it was cold.
    samples
        By engine request id and sample index: several prompts are several engine requests.
    notes
        What happened, in order: seconds since arrival, a word, and details. The first ones are
        kept; ``more_notes`` counts those that were not.
    """

    __slots__ = (
        "accepted",
        "answer_id",
        "arrived",
        "counts",
        "ended",
        "estimate",
        "id",
        "more_notes",
        "notes",
        "outcome",
        "path",
        "priority",
        "record",
        "samples",
        "tenant",
    )

    def __init__(
        self, request_id: str, answer_id: str, path: str, tenant: str, record: Record, now: float
    ) -> None:
        self.id = request_id
        self.answer_id = answer_id
        self.path = path
        self.tenant = tenant
        self.record: Record | None = record
        self.priority = record.jobs[0].generation.priority
        self.arrived = record.arrived
        self.accepted = now
        self.ended: float | None = None
        place = record.jobs[0].place
        self.estimate = None if place is None else place.estimate
        self.outcome: str | None = None
        self.counts: dict[str, int] = {}
        self.samples = {
            (job.generation.request_id, 0): SampleTrail(since=now) for job in record.jobs
        }
        self.notes: list[tuple[float, str, dict[str, object]]] = []
        self.more_notes = 0

    def note(self, now: float, word: str, **details: object) -> None:
        """Write down that something happened."""
        if len(self.notes) < _MAX_NOTES:
            self.notes.append((now - self.arrived, word, details))
        else:
            self.more_notes += 1

    def tokens(self) -> dict[str, int]:
        """Its sizes: prompt, cached, output, the most it may grow, and samples."""
        record = self.record
        if record is None:
            return self.counts
        return {
            "prompt_tokens": record.num_prompt,
            "cached_tokens": record.num_cached,
            "output_tokens": record.num_output,
            "largest_output": max(
                (choice.num_tokens for job in record.jobs for choice in job.choices), default=0
            ),
            "max_tokens": max(job.generation.max_tokens for job in record.jobs),
            "choices": sum(job.generation.n for job in record.jobs),
        }

    def leading(self) -> SampleTrail:
        """The sample the answer waits for: the one furthest behind, or the last to end."""
        return min(self.samples.values(), key=_behind)

    def close(self, outcome: str, now: float) -> None:
        """The answer is complete or given up: keep figures only, no text and no tokens."""
        self.counts = self.tokens()
        self.record = None
        self.outcome, self.ended = outcome, now


def _behind(sample: SampleTrail) -> tuple[int, float]:
    if sample.ended is not None:
        return (len(_ORDER), -sample.ended)
    return (_ORDER[sample.part], sample.since)


class Observer(Protocol):
    """Somebody who draws the ways of samples while they are gone."""

    def request_began(self, trail: RequestTrail) -> None:
        """A request has passed the gate."""

    def part_began(self, trail: RequestTrail, key: SampleKey, part: Part, now: float) -> None:
        """A sample enters a part of its way."""

    def part_ended(self, trail: RequestTrail, key: SampleKey, part: Part, now: float) -> None:
        """A sample leaves a part of its way."""

    def request_ended(self, trail: RequestTrail) -> None:
        """A request has ended, and its trail is closed."""

    def engine_lost(self, now: float) -> None:
        """The engine is gone since ``now``."""


class RequestLog:
    """All requests that are alive, and the last ones that ended.

    Parameters
    ----------
    keep
        How many ended requests to remember.
    """

    def __init__(self, keep: int = KEPT) -> None:
        self._keep = keep
        self._alive: dict[str, RequestTrail] = {}
        self._by_engine_id: dict[str, RequestTrail] = {}
        self._ended: OrderedDict[str, RequestTrail] = OrderedDict()
        self._epoch: int | None = None
        self._lost = False
        self.heard: float | None = None
        """When the engine last gave a sign of life."""
        self._starts: deque[float] = deque(maxlen=_RATE_WINDOW)
        self.observer: Observer | None = None

    # -- queries ------------------------------------------------------------------------------

    def alive(self) -> list[RequestTrail]:
        """Those alive, in order of acceptance."""
        return list(self._alive.values())

    def ended(self) -> Iterator[RequestTrail]:
        """Those remembered, the last one to end first."""
        return reversed(self._ended.values())

    def by_engine_id(self, engine_id: str) -> RequestTrail | None:
        """The one alive whose prompt the engine knows by this id."""
        return self._by_engine_id.get(engine_id)

    def find(self, name: str) -> list[RequestTrail]:
        """All that go by a name: ours, or the one the client sent (not unique); newest first."""
        known = [*self._ended.values(), *self._alive.values()]
        return [trail for trail in reversed(known) if name in (trail.id, trail.answer_id)]

    def seconds_per_start(self, now: float) -> float | None:
        """Mean seconds between the last starts; None where fewer than two are known."""
        starts = self._starts
        if len(starts) < 2:
            return None
        mean = (starts[-1] - starts[0]) / (len(starts) - 1)
        # If nothing has started for longer than that, the queue has become slower.
        return max(mean, (now - starts[0]) / len(starts))

    # -- the life of a request ----------------------------------------------------------------

    def accepted(self, trail: RequestTrail) -> None:
        """A request has passed the gate."""
        self._alive[trail.answer_id] = trail
        for engine_id, _ in trail.samples:
            self._by_engine_id[engine_id] = trail
        if self.observer is not None:
            self.observer.request_began(trail)
            for key, sample in trail.samples.items():
                self.observer.part_began(trail, key, sample.part, sample.since)

    def closed(self, answer_id: str, outcome: str, now: float) -> RequestTrail | None:
        """Its answer has ended, however. Returns its trail, None where it never was accepted."""
        trail = self._alive.pop(answer_id, None)
        if trail is None:
            return None
        for engine_id, _ in trail.samples:
            self._by_engine_id.pop(engine_id, None)
        for key, sample in trail.samples.items():
            if sample.ended is None:
                self._end(trail, key, outcome, now)
        trail.close(outcome, now)
        if self.observer is not None:
            self.observer.request_ended(trail)
        self._ended[answer_id] = trail
        while len(self._ended) > self._keep:
            self._ended.popitem(last=False)
        return trail

    # -- the engine ---------------------------------------------------------------------------

    def on_step(self, result: StepResult, happened: Iterable[AnyEvent]) -> None:
        """Take what happened in a step."""
        if result.epoch != self._epoch:
            if self._epoch is not None:
                self.engine_lost()
            self._epoch, self._lost = result.epoch, False
        if result.rows or result.draws or result.members or result.events:
            # What says nothing may come from the supervisor, and is no sign of the engine's life.
            self.heard = result.snapshot.time
        for event in happened:
            if isinstance(event, events.Stepped | events.Repaired):
                continue
            if isinstance(event, events.Admitted):
                self._starts.append(event.time)
            trail = self._by_engine_id.get(event.request_id)
            if trail is not None:
                self._apply(trail, event)
        if not result.snapshot.waiting:
            self._starts.clear()

    def engine_lost(self) -> None:
        """The engine is gone. Said again before the next one speaks, it changes nothing."""
        if self._lost:
            return
        self._lost = True
        self._starts.clear()
        if self.observer is not None and self.heard is not None:
            self.observer.engine_lost(self.heard)
        for trail in self._alive.values():
            for key, sample in trail.samples.items():
                if sample.ended is None:
                    at = max(self.heard or 0.0, sample.since)
                    self._move(trail, key, Part.RECOVERY, at)
                    sample.crashes += 1
                    sample.handed_over = False
                    trail.note(at, "engine_lost")

    def _apply(self, trail: RequestTrail, event: events.Event) -> None:
        now, key = event.time, (event.request_id, event.index)
        sample = trail.samples.get(key)
        if isinstance(event, events.Forked):
            leader = trail.samples.get((event.request_id, event.parent))
            if leader is not None:
                trail.samples[key] = sibling = leader.fork()
                if self.observer is not None:
                    self.observer.part_began(trail, key, sibling.part, now)
                trail.note(now, "forked", sample=event.index)
            return
        if sample is None and isinstance(event, events.Queued):
            sample = trail.samples[key] = SampleTrail(since=trail.accepted)
            if self.observer is not None:
                self.observer.part_began(trail, key, sample.part, now)
        if sample is None or sample.ended is not None:
            return
        match event:
            case events.Queued():
                sample.expected = event.tokens
                sample.reason = WaitReason.QUEUED
                sample.handed_over = True
                if sample.part is Part.RECOVERY and not sample.slotted:
                    self._move(trail, key, Part.QUEUE, now)
                trail.note(now, "queued", tokens=event.tokens)
            case events.Waiting():
                sample.reason = event.reason
                trail.note(now, "waiting", reason=str(event.reason))
            case events.Admitted():
                if sample.slotted:
                    sample.recomputed += max(0, sample.expected - event.cached)
                part = Part.RECOMPUTE if sample.slotted else Part.PREFILL
                self._move(trail, key, part, now)
                sample.slotted = True
                trail.note(now, "admitted", cached_tokens=event.cached, pages=event.pages)
            case events.Decoding():
                self._move(trail, key, Part.DECODE, now)
                trail.note(now, "decoding", computed_tokens=event.computed)
            case events.Preempted():
                self._move(trail, key, Part.PREEMPTED, now)
                sample.reason = WaitReason.PREEMPTED
                sample.preemptions += 1
                sample.expected = event.lost
                trail.note(now, "preempted", lost_tokens=event.lost)
            case events.Finished():
                self._end(trail, key, event.reason, now)
                trail.note(now, "finished", reason=event.reason)

    def _move(self, trail: RequestTrail, key: SampleKey, part: Part, now: float) -> None:
        sample = trail.samples[key]
        before = sample.part
        sample.move(part, now)
        if self.observer is not None:
            self.observer.part_ended(trail, key, before, sample.since)
            self.observer.part_began(trail, key, part, sample.since)

    def _end(self, trail: RequestTrail, key: SampleKey, finish: str, now: float) -> None:
        sample = trail.samples[key]
        sample.end(finish, now)
        if self.observer is not None:
            self.observer.part_ended(trail, key, sample.part, sample.since)
