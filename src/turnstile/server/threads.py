"""Work that would hold up the event loop: :class:`Threads`, and how long anybody waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from turnstile.server.errors import ApiError, deadline_exceeded

T = TypeVar("T")


class Threads:
    """A few threads of one purpose, and a bounded queue before them.

    The event loop's own threads are left to those who must never wait: probes, metrics, the
    engine's process.

    Parameters
    ----------
    name
        Of the threads, for a debugger.
    number
        How many there are.
    most
        Weight of all work that is inside, waiting or running. Heavier work is still taken where
        it is alone.
    what
        What the queue is full of, for the refusal.
    """

    def __init__(self, name: str, *, number: int, most: int, what: str) -> None:
        self._executor = ThreadPoolExecutor(number, thread_name_prefix=name)
        self._most = most
        self._what = what
        self._lock = threading.Lock()
        self._inside = 0

    @property
    def inside(self) -> int:
        """Weight of the work that waits or runs."""
        return self._inside

    async def run(self, weight: int, work: Callable[[], T]) -> T:
        """Do ``work`` in a thread. Where the caller is cancelled, work that has not begun is
        dropped at once, with what it holds; work that has begun ends in its own time.

        Raises :class:`ApiError` 503 where the queue is full.
        """
        with self._lock:
            if self._inside and self._inside + weight > self._most:
                raise ApiError(
                    503,
                    f"Too many {self._what} are waiting. Try again in a moment.",
                    code="engine_overloaded",
                    kind="overloaded",
                    retry_after=1.0,
                )
            self._inside += weight
        held = [work]  # the executor keeps what was cancelled until its turn would have come

        def ended(_: Future[T]) -> None:
            held.clear()
            with self._lock:
                self._inside -= weight

        job = self._executor.submit(lambda: held.pop()())
        job.add_done_callback(ended)
        return await asyncio.wrap_future(job)


@contextlib.asynccontextmanager
async def ends_by(deadline: float | None) -> AsyncIterator[None]:
    """End what is awaited inside at ``deadline`` (``time.monotonic()``; None: never).

    Raises :class:`ApiError` 504.
    """
    try:
        async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
            yield
    except TimeoutError:
        raise deadline_exceeded() from None
