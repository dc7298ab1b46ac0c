"""Work that would hold up the event loop: :class:`Threads`, and how long anybody waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from turnstile.server.errors import ApiError, deadline_exceeded
from turnstile.server.tenants import Tenant

T = TypeVar("T")

_MOST_SECONDS = 60.0
"""Longest that anybody is told to stay away."""
_MEMORY = 0.9
"""What the pace of the work so far counts beside that of the piece that has just ended."""


@dataclass(eq=False, slots=True)
class _Job:
    """A piece of work. ``work`` is None once it has begun, or never will."""

    number: int
    size: int
    line: _Line
    work: Callable[[], Any] | None
    future: Future[Any] = field(default_factory=Future)


@dataclass(eq=False, slots=True)
class _Line:
    """A tenant's work: what waits, oldest first, and what its turns have cost so far."""

    tenant: Tenant
    served: float
    light: dict[_Job, None] = field(default_factory=dict)
    heavy: dict[_Job, None] = field(default_factory=dict)
    waiting: int = 0
    heavy_running: int = 0
    inside: int = 0

    @property
    def greed(self) -> float:
        """Size of all that waits, divided by the tenant's weight."""
        return self.waiting / self.tenant.weight

    def newest(self) -> _Job:
        """The piece that came last."""
        heads = [next(reversed(jobs)) for jobs in (self.light, self.heavy) if jobs]
        return max(heads, key=lambda job: job.number)


class Threads:
    """A few threads of one purpose, and before them a bounded queue in which tenants take turns.

    Next is the oldest piece of the tenant that was served least: start-time fair queueing (Goyal,
    Vin, Cheng, 1996) over the size of the work divided by the tenant's weight. Nothing can be
    taken away from a thread, so heavy work of one tenant gets at most all threads but one. In a
    full queue the newest piece of whoever has most waiting makes room: no tenant can keep the
    others out.

    The event loop's own threads are left to those who must never wait: probes, metrics, the
    engine's process.

    Parameters
    ----------
    name
        Of the threads, for a debugger.
    number
        How many there are.
    most
        Size of all work that is inside, waiting or running. A larger piece is still taken where
        it is alone.
    heavy
        Size from which on a piece of work is heavy.
    what
        What the queue is full of, for the refusal.
    """

    def __init__(self, name: str, *, number: int, most: int, heavy: int, what: str) -> None:
        self._executor = ThreadPoolExecutor(number, thread_name_prefix=name)
        self._number = number
        self._most = most
        self._heavy = heavy
        self._what = what
        self._lock = threading.Lock()
        self._lines: dict[str, _Line] = {}
        self._numbers = itertools.count()
        self._turn = 0.0
        """What the tenant had been served whose turn came last: newcomers begin there."""
        self._inside = 0
        self._busy = 0
        self._spent_seconds = self._spent_size = 0.0
        self.refused = 0

    @property
    def inside(self) -> int:
        """Size of the work that waits or runs."""
        return self._inside

    @property
    def waiting(self) -> int:
        """How many pieces of work wait."""
        return sum(len(line.light) + len(line.heavy) for line in list(self._lines.values()))

    async def run(self, size: int, work: Callable[[], T], tenant: Tenant) -> T:
        """Do ``work`` in a thread, when it is the tenant's turn. ``size`` is how much it is, in
        whatever unit these threads count in (characters, say). Where the caller is cancelled,
        work that has not begun is dropped at once, with what it holds; work that has begun ends
        in its own time.

        Raises :class:`ApiError` 503 where the queue is full, or becomes it while this waits and
        is what has to make room.
        """
        with self._lock:
            line = self._lines.get(tenant.name) or _Line(tenant, self._turn)
            line.tenant = tenant  # its weight may have changed
            evicted = self._make_room(line, size)
            job = _Job(next(self._numbers), size, line, work)
            self._enter(job)
            starts = self._busy < self._number
            self._busy += starts
        job.future.add_done_callback(lambda _: self._leave(job))
        for other in evicted:
            other.future.set_exception(self._overloaded(other.size))
        if starts:
            self._executor.submit(self._serve)
        return await asyncio.wrap_future(job.future)

    # -- coming and going -------------------------------------------------------------------------

    def _enter(self, job: _Job) -> None:
        line = job.line
        if not line.inside:
            line.served = max(line.served, self._turn)
        self._lines[line.tenant.name] = line
        self._jobs_of(line, job.size)[job] = None
        line.waiting += job.size
        line.inside += job.size
        self._inside += job.size

    def _jobs_of(self, line: _Line, size: int) -> dict[_Job, None]:
        return line.heavy if size >= self._heavy else line.light

    def _make_room(self, newcomer: _Line, size: int) -> list[_Job]:
        """Take out of the queue what has to go for ``size`` more to fit.

        Raises :class:`ApiError` 503 where it is the newcomer's that would have to go; all others
        then stay.
        """
        if not self._inside or self._inside + size <= self._most:
            return []
        greed = (newcomer.waiting + size) / newcomer.tenant.weight
        others = [line for line in self._lines.values() if line is not newcomer and line.waiting]
        leaving: list[_Job] = []
        while self._inside + size > self._most:
            greediest = max(others, key=lambda line: line.greed, default=None)
            if greediest is None or greediest.greed <= greed:
                for job in reversed(leaving):
                    self._put_back(job)
                self.refused += 1
                raise self._overloaded(size)
            job = greediest.newest()
            self._take_out(job)
            leaving.append(job)
        self.refused += len(leaving)
        for job in leaving:
            job.work = None
        return leaving

    def _take_out(self, job: _Job) -> None:
        del self._jobs_of(job.line, job.size)[job]
        job.line.waiting -= job.size
        job.line.inside -= job.size
        self._inside -= job.size

    def _put_back(self, job: _Job) -> None:
        self._jobs_of(job.line, job.size)[job] = None  # it was the newest, and is again
        job.line.waiting += job.size
        job.line.inside += job.size
        self._inside += job.size

    def _leave(self, job: _Job) -> None:
        """The caller has gone, or the work is done: called once for each piece."""
        with self._lock:
            if job in self._jobs_of(job.line, job.size):
                self._take_out(job)
                job.work = None
            self._forget(job.line)

    def _forget(self, line: _Line) -> None:
        """Keep no line that is as if it were new."""
        if not self._inside:
            self._lines.clear()
        elif not line.inside and line.served <= self._turn:
            self._lines.pop(line.tenant.name, None)

    # -- in the threads -------------------------------------------------------------------------

    def _serve(self) -> None:
        """Work until nothing is left that this thread may do."""
        while True:
            with self._lock:
                job, work = self._next()
                if job is None:
                    self._busy -= 1
                    return
            result, error, began = None, None, time.monotonic()
            try:
                assert work is not None
                result = work()
            except BaseException as raised:
                error = raised
            with self._lock:
                self._account(job, time.monotonic() - began)
            if error is not None:
                job.future.set_exception(error)
            else:
                job.future.set_result(result)
            del job, work, result, error

    def _next(self) -> tuple[_Job | None, Callable[[], Any] | None]:
        """The next piece and its work, counted as running."""
        while True:
            heads = [head for head in map(self._head, self._lines.values()) if head is not None]
            if not heads:
                return None, None
            job = min(heads, key=lambda head: head.line.served)
            line = job.line
            del self._jobs_of(line, job.size)[job]
            line.waiting -= job.size
            line.heavy_running += job.size >= self._heavy
            work, job.work = job.work, None
            self._turn = line.served
            line.served += job.size / line.tenant.weight
            if job.future.set_running_or_notify_cancel():
                return job, work
            self._account(job, 0.0)  # it was cancelled in this moment

    def _head(self, line: _Line) -> _Job | None:
        """The oldest piece of a line that may be taken up now."""
        light = next(iter(line.light), None)
        heavy = next(iter(line.heavy), None)
        if heavy is None or line.heavy_running >= max(1, self._number - 1):
            return light
        return heavy if light is None or heavy.number < light.number else light

    def _account(self, job: _Job, seconds: float) -> None:
        """A piece that was running has ended."""
        line = job.line
        line.heavy_running -= job.size >= self._heavy
        line.inside -= job.size
        self._inside -= job.size
        self._spent_seconds = _MEMORY * self._spent_seconds + seconds
        self._spent_size = _MEMORY * self._spent_size + job.size

    def _overloaded(self, size: int) -> ApiError:
        """503, with the time in which the threads make that much room."""
        seconds = 0.0
        if self._spent_size:
            needed = max(0, min(size, self._most) + self._inside - self._most)
            seconds = needed * self._spent_seconds / self._spent_size / self._number
        return ApiError(
            503,
            f"Too many {self._what} are waiting. Try again in a moment.",
            code="engine_overloaded",
            kind="overloaded",
            retry_after=min(_MOST_SECONDS, max(1.0, math.ceil(seconds))),
        )


def ends_by(deadline: float | None) -> AbstractAsyncContextManager[None]:
    """End what is awaited inside at ``deadline`` (``time.monotonic()``; None: never).

    Raises :class:`ApiError` 504, also where it has passed already and nothing is awaited.
    """
    return contextlib.nullcontext() if deadline is None else _ends_by(deadline)


@contextlib.asynccontextmanager
async def _ends_by(deadline: float) -> AsyncIterator[None]:
    left = deadline - time.monotonic()
    if left <= 0:
        raise deadline_exceeded()
    try:
        async with asyncio.timeout(left):
            yield
    except TimeoutError:
        raise deadline_exceeded() from None
