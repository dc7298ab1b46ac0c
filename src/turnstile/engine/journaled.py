"""What both engine clients are made of: a journal, and a stream for each request in it."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable

from turnstile.core.admission import check_lengths, check_slots
from turnstile.engine.client import (
    EngineClient,
    EngineState,
    EngineUnavailableError,
    Generation,
    Stream,
)
from turnstile.engine.journal import Entry, Journal
from turnstile.engine.protocol import (
    Cancel,
    Command,
    Control,
    Draws,
    EngineInfo,
    Loading,
    Row,
    Snapshot,
    StepResult,
    Watch,
)

_POLL = 0.02


class Outlet:
    """Where the draws of one sample go: to ``taker`` if there is one and the stream is idle, else
    into the stream as rows.
    """

    __slots__ = ("index", "stream", "taker")

    def __init__(self, stream: JournaledStream, index: int) -> None:
        self.stream = stream
        self.index = index
        self.taker: Callable[[int], bool] | None = None


class JournaledStream(Stream):
    """The rows of a request, as they are written into its journal entry. Its reader wakes up once
    a step, however many rows the step brought.

    Attributes
    ----------
    idle
        Its reader has read everything there was, and waits.
    numbers, outlets
        The numbers of its samples in :class:`Draws`, and where their draws go.
    """

    def __init__(self, client: JournaledClient, entry: Entry) -> None:
        self.request_id = entry.generation.request_id
        self.numbers = range(entry.number, entry.number + len(entry.samples))
        self._client = client
        self._entry = entry
        self._rows: list[Row] = []
        self._waiter: asyncio.Future[None] | None = None
        self._taker: Callable[[Row], bool] | None = None
        self.idle = False
        self.outlets = [Outlet(self, index) for index in range(entry.generation.n)]

    def __aiter__(self) -> JournaledStream:
        return self

    async def __anext__(self) -> list[Row]:
        while not self._rows:
            if not self._entry.unfinished:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            self.idle = True
            try:
                await self._waiter
            finally:
                self._waiter, self.idle = None, False
        rows, self._rows = self._rows, []
        return rows

    def offer(self, taker: Callable[[Row], bool] | None) -> None:
        self._taker = taker
        for outlet in self.outlets:
            outlet.taker = None

    def pass_tokens(self, sample_index: int, taker: Callable[[int], bool]) -> None:
        self.outlets[sample_index].taker = taker

    def cancel(self, sample_index: int | None = None, reason: str = "abort") -> None:
        ended = [sample_index is None or row.sample_index == sample_index for row in self._rows]
        self._rows = [row for row, gone in zip(self._rows, ended, strict=True) if not gone]
        self._client.cancel(self.request_id, sample_index, reason)
        self.wake()

    def abort(self) -> None:
        self._client.abort(self.request_id)

    def put(self, row: Row) -> None:
        """Hand a row to the reader: directly where it can take it, else for its next turn."""
        if self.idle and self._taker is not None and self._taker(row):
            return
        self._rows.append(row)
        self.wake()

    def wake(self) -> None:
        """Let the reader look."""
        self.idle = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class JournaledClient(EngineClient):
    """Takes requests, writes them down, hands out streams. Where the engine is, a subclass knows.

    Everything here runs in the thread of the event loop.
    """

    def __init__(self) -> None:
        self.state = EngineState.LOADING
        self.info: EngineInfo | None = None
        self.snapshot = Snapshot()
        self.loading: Loading | None = None
        self._journal = Journal()
        self._streams: dict[str, JournaledStream] = {}
        self._outlets: dict[int, Outlet] = {}
        """Those of all samples, by their numbers."""
        self._listeners: list[Callable[[StepResult], None]] = []
        self._interval: float | None = None
        """Seconds between two pictures, while somebody watches."""

    # -- what a subclass does ---------------------------------------------------------------------

    @abstractmethod
    def _enter(self, entry: Entry) -> None:
        """A new request is in the journal: have it computed, now or later."""

    @abstractmethod
    def _send(self, command: Command) -> None:
        """Tell the engine that runs now, if one does."""

    def _left(self, request_id: str) -> None:
        """A request has ended, one way or another."""

    # -- EngineClient -----------------------------------------------------------------------------

    def submit(self, generation: Generation) -> JournaledStream:
        if self.state not in (EngineState.READY, EngineState.RECOVERING):
            raise EngineUnavailableError(_WHY_NOT[self.state], self.state)
        self.check_fits(len(generation.prompt), generation.max_tokens, generation.n)
        entry = self._journal.add(generation)
        stream = self._streams[generation.request_id] = JournaledStream(self, entry)
        self._outlets.update(zip(stream.numbers, stream.outlets, strict=True))
        self._enter(entry)
        return stream

    def cancel(self, request_id: str, sample_index: int | None, reason: str) -> None:
        """End a sample of a request, or all: what :meth:`Stream.cancel` does."""
        command = self._journal.cancel(request_id, sample_index, reason)
        if command is not None:
            self._send(command)
        self._forget_if_ended(request_id)

    def abort(self, request_id: str) -> None:
        """End a request and say so to its reader: what :meth:`Stream.abort` does."""
        entry = self._journal.entries.get(request_id)
        if entry is not None:
            self._end(entry, "abort")
            self._send(Cancel(request_id))

    def check_fits(self, prompt_tokens: int, max_tokens: int, n: int) -> None:
        info = self.info
        if info is None:
            raise EngineUnavailableError(_WHY_NOT[EngineState.LOADING], EngineState.LOADING)
        check_lengths(
            prompt_tokens, max_tokens, n, info.max_model_len, info.num_pages, info.page_size
        )
        check_slots(n, info.max_num_seqs)

    def reset_prefix_cache(self) -> None:
        self._send(Control("reset_prefix_cache"))

    def watch(self, interval: float | None) -> None:
        self._interval = interval
        self._send(Watch(interval))

    def subscribe(self, listener: Callable[[StepResult], None]) -> Callable[[], None]:
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    # -- for subclasses ---------------------------------------------------------------------------

    def _take(self, result: StepResult) -> None:
        """Write a step down and wake its readers. Raises :class:`JournalError`."""
        if result.draws is not None:
            self._take_draws(result.draws)
        for row in result.rows:
            self._take_row(row)
        cancels = self._journal.cancels
        while cancels:
            self._send(cancels.pop(0))
        self._tell(result)

    def _tell(self, result: StepResult) -> None:
        """Let everybody know where the engine stands."""
        self.snapshot = result.snapshot
        for listener in self._listeners:
            listener(result)

    def _take_draws(self, draws: Draws) -> None:
        write, outlets = self._journal.draw, self._outlets
        for number, first, token, charged in draws:
            if not write(number, first, token, charged):
                continue
            outlet = outlets[number]
            stream, taker = outlet.stream, outlet.taker
            if taker is None or not stream.idle or not taker(token):
                stream.put(Row(stream.request_id, outlet.index, first, [token]))

    def _take_row(self, row: Row) -> None:
        news = self._journal.take(row)
        if news is not None:
            self._streams[row.request_id].put(news)
            if news.finish is not None:
                self._forget_if_ended(row.request_id)

    def _forget_if_ended(self, request_id: str) -> None:
        if request_id not in self._journal.entries:
            stream = self._streams.pop(request_id, None)
            if stream is not None:
                for number in stream.numbers:
                    del self._outlets[number]
                self._left(request_id)

    def _end(self, entry: Entry, finish: str, error: str | None = None) -> None:
        """End all samples of a request that have not ended, with a row."""
        request_id = entry.generation.request_id
        for index, sample in enumerate(entry.samples):
            if sample.finish is None:
                first = len(sample.outputs)
                self._take_row(Row(request_id, index, first, [], finish=finish, error=error))

    def _end_all(self, finish: str, error: str | None = None) -> None:
        for entry in list(self._journal.entries.values()):
            self._end(entry, finish, error)

    async def _wait_until_empty(self, seconds: float) -> None:
        """Return when no request is alive, or time is up."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while self._journal.entries and loop.time() < end:
            await asyncio.sleep(min(_POLL, max(0.0, end - loop.time())))


_WHY_NOT = {
    EngineState.LOADING: "The model is still being loaded.",
    EngineState.DRAINING: "The server is shutting down and takes no new requests.",
    EngineState.DEAD: "The engine has died and could not be restarted.",
}
