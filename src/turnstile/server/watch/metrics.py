"""What the server counts: :class:`Metrics`, fed by the routes and by the engine's steps.

Two sources are kept apart. What clients were given (tokens, outcomes, latencies) is counted here,
where it is given. What the engine did (steps, pages, preemptions) comes in its snapshots; their
counters begin anew with every engine process, so what earlier ones counted is added.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from itertools import zip_longest

from turnstile.core.events import WaitReason
from turnstile.engine.client import EngineClient
from turnstile.engine.protocol import EngineInfo, Snapshot, StepResult
from turnstile.server.answer.choices import Job
from turnstile.server.answer.usage import Record
from turnstile.server.gate import Gate
from turnstile.server.http.open_files import OpenFiles
from turnstile.server.model import ServedModel
from turnstile.server.threads import Threads
from turnstile.server.watch.ended import EndedRequests, Use
from turnstile.server.watch.histogram import ITL_BOUNDS, TTFT_BOUNDS, Histogram
from turnstile.server.watch.trails import RequestLog, RequestTrail
from turnstile.text.sections import SectionCache

OUTCOMES = ("stop", "length", "timeout", "abort", "error", "refused")
ENGINE_COUNTERS = (
    "step",
    "busy_seconds",
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
    "recomputed_tokens",
    "preemptions",
    "evictions",
    "prefix_queries",
    "prefix_hits",
    "bad_rows",
    "repairs",
    "drafts",
    "draft_tokens",
    "accepted_tokens",
)
BUSY_WINDOW = 60.0
"""Seconds over which the share of busy time is taken."""
_BUSY_SAMPLE = 2.0


class Metrics:
    """Counters and histograms of one server.

    Parameters
    ----------
    requests
        Who is inside: what those alive have been given so far is counted with the rest.
    """

    def __init__(
        self,
        engine: EngineClient,
        requests: RequestLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.requests = requests or RequestLog()
        self._clock = clock
        self.model_name = ""
        self.info: EngineInfo | None = None
        self.gate: Gate | None = None
        self.sections: SectionCache | None = None
        self.threads: Mapping[str, Threads] = {}
        """Where requests are read, by the kind of work."""
        self.files = OpenFiles()
        self.outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self.responses: Counter[str] = Counter()
        self.in_flight = 0
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.generated_tokens = 0
        self.ttft = Histogram(TTFT_BOUNDS)
        self.itl = Histogram(ITL_BOUNDS)
        self.ended = EndedRequests()
        self.iteration_tokens = Histogram([1, *(8 << k for k in range(12))])
        self._busy: deque[tuple[float, float]] = deque()
        self.snapshot = Snapshot()
        self._earlier: dict[str, float] = dict.fromkeys(ENGINE_COUNTERS, 0)
        self._earlier_by_place: list[int] = []
        self._epoch: int | None = None
        self.engine_starts = 0
        engine.subscribe(self.on_step)

    def ready(self, model: ServedModel, info: EngineInfo, gate: Gate) -> None:
        """The model is known: label the series with its name."""
        self.model_name, self.sections = model.name, model.sections
        self.info, self.gate = info, gate

    # -- the engine ---------------------------------------------------------------------------

    def on_step(self, result: StepResult) -> None:
        """Take a step's snapshot."""
        if result.epoch != self._epoch:
            for name in ENGINE_COUNTERS:
                self._earlier[name] += getattr(self.snapshot, name)
            self._earlier_by_place = self._by_place()
            self._epoch = result.epoch
            self.engine_starts += 1
        if not self._busy or result.snapshot.time - self._busy[-1][0] >= _BUSY_SAMPLE:
            self._note_busy(result.snapshot.time)
        # Not every message ends a step: some only tell who left, or that the engine is gone.
        stepped = result.snapshot.step != self.snapshot.step
        self.snapshot = result.snapshot
        if stepped and result.snapshot.step_tokens:
            self.iteration_tokens.observe(result.snapshot.step_tokens)

    def engine_total(self, name: str) -> float:
        """A counter of the engine over all its processes."""
        return self._earlier[name] + float(getattr(self.snapshot, name))

    def accepted_by_place(self) -> dict[str, float]:
        """Draft tokens that were right, by their place in the draft, over all engine processes:
        of all places there can be, of the first in any case.
        """
        places = 1 if self.info is None else max(1, self.info.draft_tokens)
        counts = self._by_place()
        counts += [0] * (places - len(counts))
        return {str(place): count for place, count in enumerate(counts)}

    def _by_place(self) -> list[int]:
        pairs = zip_longest(self._earlier_by_place, self.snapshot.accepted_by_place, fillvalue=0)
        return [earlier + now for earlier, now in pairs]

    @property
    def epoch(self) -> int:
        """Number of the newest engine process, whether it has spoken yet or not."""
        return max(self.engine.epoch, self._epoch or 0)

    def _note_busy(self, now: float) -> None:
        """Remember how much was busy when the engine spoke last."""
        at = self.snapshot.time or now
        self._busy.append((at, self.engine_total("busy_seconds")))
        while len(self._busy) > 2 and now - self._busy[1][0] >= BUSY_WINDOW:
            self._busy.popleft()

    def busy_ratio(self) -> float:
        """Share of the last minute's wall time that was spent inside steps, 0 to 1."""
        if not self._busy:
            return 0.0
        now, busy = self._clock(), self.engine_total("busy_seconds")
        began, before = self._busy[0]
        for moment, total in (*self._busy, (self.snapshot.time, busy)):
            if now - moment >= BUSY_WINDOW:
                began, before = now - BUSY_WINDOW, total
        return min(1.0, (busy - before) / (now - began)) if now > began else 0.0

    def headroom_steps(self) -> float:
        """Steps that all who run can go on, each with a token a step, before the pool is full."""
        now, info = self.snapshot, self.info
        if info is None:
            return 0.0
        room = (now.pages_free + now.pages_cached) * info.page_size + now.unused_tokens
        return room / max(1, now.running)

    def waiting_by_reason(self) -> dict[str, int]:
        """Sequences without a slot, by why. Those a step did not come to look at wait for what
        stopped it: slots, or the first of the queue.
        """
        counts = dict.fromkeys(map(str, WaitReason), 0) | self.snapshot.waiting_by_reason
        unseen = counts[WaitReason.QUEUED]
        for blocked, behind in (
            (WaitReason.SLOTS, WaitReason.SLOTS),
            (WaitReason.PAGES, WaitReason.BEHIND_HEAD),
        ):
            if counts[blocked] and unseen:
                counts[WaitReason.QUEUED] = 0
                counts[behind] += unseen
                break
        return counts

    def waiting_by_kind(self) -> dict[str, float]:
        """In vLLM's two words: for room, or put off by a rule."""
        by_reason = self.snapshot.waiting_by_reason
        deferred = sum(by_reason.get(r, 0) for r in (WaitReason.PREFIX, WaitReason.TENANT_TURN))
        return {"capacity": sum(by_reason.values()) - deferred, "deferred": deferred}

    # -- requests -----------------------------------------------------------------------------

    def request_began(self) -> None:
        """A request knocks at the gate."""
        self.in_flight += 1

    def refused(self) -> None:
        """A request was turned away before it came to the gate."""
        self.outcomes["refused"] += 1

    def prompt_computed(self, job: Job) -> None:
        """A prompt went through the model."""
        self.prompt_tokens += job.num_prompt
        self.cached_prompt_tokens += job.cached_tokens

    def first_token(self, seconds: float) -> None:
        """A request's first token came out, ``seconds`` after the request came in."""
        self.ttft.observe(seconds)

    def next_tokens(self, gap: float, count: int) -> None:
        """A sample got ``count`` more tokens, ``gap`` seconds after the one before."""
        self.itl.observe(gap / count, count)

    def request_ended(self, record: Record, outcome: str) -> None:
        """A request that had knocked is done; whatever its ``n``, it counts once."""
        self.in_flight -= 1
        self.outcomes[outcome] += 1
        if record.accepted is not None:
            self.ended.answered(record, outcome)

    def request_closed(self, trail: RequestTrail) -> None:
        """A request that was let in has ended, and all is known of it."""
        self.ended.closed(trail)

    def by_tenant(self, use: Use) -> dict[str, float]:
        """How much of one thing each tenant has used, by requests that are alive too (their seconds
        in the queue are booked when they end).
        """
        books = self.ended.tenants.copy()
        for trail in self.requests.alive():
            record = trail.record
            if record is not None:
                books.book(trail.tenant, record.num_prompt, record.num_output)
        return books.column(use)
