"""An engine without a model: a script says which tokens come, one a sample a step.

It keeps the contract of :class:`EngineClient` (slots, stop ids, limits, cancel, deadlines), so
that what the server does with it is what it does with a real one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from turnstile.core import events
from turnstile.core.events import AnyEvent, WaitReason, encode
from turnstile.engine.client import (
    EngineClient,
    EngineState,
    EngineUnavailableError,
    Generation,
    NeverFitsError,
    Stream,
)
from turnstile.engine.protocol import (
    EngineInfo,
    FittedCost,
    Picture,
    Row,
    Snapshot,
    StepResult,
    TokenLogprobs,
)

Script = Callable[[Generation, int], list[int]]
"""The tokens of a sample; when they run out, they begin again."""


def fake_info(**changes: Any) -> EngineInfo:
    values: dict[str, Any] = {
        "epoch": 1, "pid": 1, "model": "tiny", "architecture": "fake", "vocab_size": 320,
        "max_model_len": 256, "page_size": 16, "num_pages": 64, "kv_bytes": 1, "kv_dtype": "f32",
        "weight_format": "float32", "weight_bytes": 1, "num_parameters": 1, "backend": "fake",
        "device": "cpu", "threads": 1, "max_num_seqs": 8, "max_num_batched_tokens": 64,
        "admission": "expected", "exact": True, "load_seconds": 0.0,
    }  # fmt: skip
    return EngineInfo(**(values | changes))


@dataclass(eq=False)
class _Sample:
    stream: FakeStream
    index: int
    tokens: list[int]
    produced: int = 0
    done: bool = False
    told_waiting: bool = False


class FakeStream(Stream):
    def __init__(self, engine: FakeEngine, generation: Generation) -> None:
        self.engine = engine
        self.request_id = generation.request_id
        self.generation = generation
        self.rows: list[Row] = []
        self.arrived = asyncio.Event()
        self.taker: Callable[[Row], bool] | None = None
        self.waiting = False
        self.cancelled: list[tuple[int | None, str]] = []
        self.samples = [_Sample(self, k, engine.script(generation, k)) for k in range(generation.n)]

    async def __aiter__(self) -> AsyncIterator[list[Row]]:
        while True:
            if not self.rows:
                if all(sample.done for sample in self.samples):
                    return
                self.arrived.clear()
                self.waiting = True
                try:
                    await self.arrived.wait()
                finally:
                    self.waiting = False
                continue
            rows, self.rows = self.rows, []
            yield rows

    @property
    def done(self) -> bool:
        return all(sample.done for sample in self.samples)

    def offer(self, taker: Callable[[Row], bool] | None) -> None:
        self.taker = taker

    def put(self, row: Row) -> None:
        idle = self.waiting and not self.rows and not self.arrived.is_set()
        if idle and self.taker is not None and self.taker(row):
            return
        self.rows.append(row)
        self.arrived.set()

    def cancel(self, sample_index: int | None = None, reason: str = "abort") -> None:
        self.cancelled.append((sample_index, reason))
        for sample in self.samples:
            if sample_index in (None, sample.index):
                sample.done = True
        self.arrived.set()

    def abort(self) -> None:
        for sample in self.samples:
            if not sample.done:
                self.engine._end(sample, [], finish="abort")


@dataclass
class Failure:
    """What a request is to suffer: an error row after ``after`` tokens."""

    message: str
    after: int = 0


class FakeEngine(EngineClient):
    """See the module. ``delay`` is the length of a step; ``held`` stops the steps altogether."""

    def __init__(self, script: Script, *, delay: float = 0.0, **info: Any) -> None:
        self.script = script
        self.delay = delay
        self.ready_info = fake_info(**info)
        self.state = EngineState.LOADING
        self.info: EngineInfo | None = None
        self.snapshot = Snapshot()
        self.streams: list[FakeStream] = []
        self.failures: dict[int, Failure] = {}
        self.held = False
        self.cached_tokens = 0
        self.cost = FittedCost()
        self.resets = 0
        self.alive = True
        self.epoch = 1
        self.watched: list[float | None] = []
        self._listeners: list[Callable[[StepResult], None]] = []
        self._queue: list[_Sample] = []
        self._running: list[_Sample] = []
        self._task: asyncio.Task[None] | None = None
        self._step = 0
        self._generated = 0
        self._events: list[AnyEvent] = []

    async def start(self) -> EngineInfo:
        self.info, self.state = self.ready_info, EngineState.READY
        self._say([])
        return self.info

    async def stop(self, grace: float) -> None:
        self.state = EngineState.DRAINING
        end = time.monotonic() + grace
        while self._task is not None and time.monotonic() < end:
            await asyncio.sleep(0.01)
        for sample in [*self._queue, *self._running]:
            if not sample.done:
                sample.done = True
                sample.stream.put(self._row(sample, [], finish="abort"))

    @property
    def healthy(self) -> bool:
        return self.alive

    def check_fits(self, prompt_tokens: int, max_tokens: int, n: int) -> None:
        assert self.info is not None
        capacity = self.info.kv_tokens
        if prompt_tokens + max_tokens > capacity:
            raise NeverFitsError(f"The whole page pool holds {capacity} tokens.", "num_pages")

    def submit(self, generation: Generation) -> FakeStream:
        if self.state is not EngineState.READY:
            raise EngineUnavailableError("Not now.", self.state)
        stream = FakeStream(self, generation)
        self.streams.append(stream)
        self._queue += stream.samples
        now = time.monotonic()
        for sample in stream.samples:
            # The real engine queues a group as one; every sample of this one is on its own.
            self._events.append(
                events.Queued(now, generation.request_id, sample.index, generation.tenant,
                              len(generation.prompt))
            )  # fmt: skip
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._loop())
        return stream

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def watch(self, interval: float | None) -> None:
        self.watched.append(interval)

    def show(self, picture: Picture, epoch: int | None = None) -> None:
        """Send a picture, with a step in which nothing else happened."""
        for listener in list(self._listeners):
            listener(
                StepResult(
                    epoch or self.epoch, self._step, [], [("somebody", 0)], self.snapshot,
                    picture=picture,
                )
            )  # fmt: skip

    def subscribe(self, listener: Callable[[StepResult], None]) -> Callable[[], None]:
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    async def _loop(self) -> None:
        try:
            while self._queue or self._running:
                await asyncio.sleep(self.delay)
                if not self.held:
                    self._run_step()
        finally:
            self._task = None

    def _run_step(self) -> None:
        assert self.info is not None
        now = time.monotonic()
        for sample in list(self._queue):
            deadline = sample.stream.generation.deadline
            if not sample.done and deadline is not None and now > deadline:
                sample.done = True
                sample.stream.put(self._row(sample, [], finish="timeout"))
        self._queue = [sample for sample in self._queue if not sample.done]
        while self._queue and len(self._running) < self.info.max_num_seqs:
            sample = self._queue.pop(0)
            self._running.append(sample)
            generation = sample.stream.generation
            self._events.append(
                events.Admitted(now, generation.request_id, sample.index, generation.tenant,
                                self.cached_tokens, 1, 0.0)
            )  # fmt: skip
        for sample in self._queue:
            if not sample.told_waiting:
                sample.told_waiting = True
                self._events.append(
                    events.Waiting(now, sample.stream.request_id, sample.index, WaitReason.SLOTS)
                )
        draws = len(self._running)
        for sample in self._running:
            if not sample.done:
                self._advance(sample)
        self._running = [sample for sample in self._running if not sample.done]
        self._step += 1
        self._events.append(
            events.Stepped(time.monotonic(), self._step, draws, 0, draws, draws, self.delay)
        )
        self._say(self._running)

    def _advance(self, sample: _Sample) -> None:
        generation = sample.stream.generation
        failure = self.failures.get(self.streams.index(sample.stream))
        if failure is not None and sample.produced >= failure.after:
            self._end(sample, [], finish="error", error=failure.message)
            return
        scored = generation.params.prompt_logprobs
        extras: dict[str, Any] = {}
        if sample.produced == 0 and scored is not None:
            extras["prompt_logprobs"] = [
                self._logprobs(token, scored) for token in generation.prompt[1:]
            ]
        if generation.max_tokens == 0:
            self._end(sample, [], finish="length", **extras)
            return
        token = sample.tokens[sample.produced % len(sample.tokens)]
        if generation.params.logprobs is not None:
            extras["logprobs"] = [self._logprobs(token, generation.params.logprobs)]
        late = generation.deadline is not None and time.monotonic() > generation.deadline
        early = sample.produced < generation.params.min_tokens
        if token in generation.params.stop_token_ids and not early:
            self._end(sample, [token], finish="stop", stop_token=token, **extras)
        elif sample.produced + 1 == generation.max_tokens:
            self._end(sample, [token], finish="length", **extras)
        elif late:
            self._end(sample, [token], finish="timeout", **extras)
        else:
            sample.stream.put(self._row(sample, [token], **extras))
        sample.produced += 1
        self._generated += 1
        if sample.produced == 1 and not sample.done:
            self._events.append(
                events.Decoding(time.monotonic(), generation.request_id, sample.index,
                                len(generation.prompt))
            )  # fmt: skip

    def _end(self, sample: _Sample, tokens: list[int], **fields: Any) -> None:
        sample.done = True
        sample.stream.put(self._row(sample, tokens, **fields))
        generation = sample.stream.generation
        self._events.append(
            events.Finished(time.monotonic(), generation.request_id, sample.index,
                            generation.tenant, fields["finish"], len(generation.prompt),
                            sample.produced + len(tokens), self.cached_tokens, 0)
        )  # fmt: skip

    def _logprobs(self, token: int, count: int) -> TokenLogprobs:
        return TokenLogprobs(-0.5, [((token + k) % 320, -0.5 - k) for k in range(count)])

    def _row(self, sample: _Sample, tokens: list[int], **fields: Any) -> Row:
        fields["cached_tokens"] = self.cached_tokens
        return Row(sample.stream.request_id, sample.index, sample.produced, tokens, **fields)

    def happen(self, *happened: AnyEvent) -> None:
        """Something the fake does not do by itself: told with the next step."""
        self._events += happened

    def _say(self, running: list[_Sample]) -> None:
        assert self.info is not None
        pages = self.info.num_pages
        self.snapshot = Snapshot(
            time=time.monotonic(), step=self._step, running=len(running),
            waiting=len(self._queue), pages_total=pages, pages_held=len(running),
            pages_free=pages - len(running), generated_tokens=self._generated, cost=self.cost,
            waiting_by_reason={"slots": len(self._queue)} if self._queue else {},
        )  # fmt: skip
        happened, self._events = [encode(event) for event in self._events], []
        for listener in self._listeners:
            listener(StepResult(self.epoch, self._step, [], [], self.snapshot, happened))
