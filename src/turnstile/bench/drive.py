"""Send the requests of a plan at their moments, and note what comes back."""

from __future__ import annotations

import asyncio
import gc
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from turnstile.bench.arrivals import Arrivals, ClosedLoop
from turnstile.bench.http import BrokenResponseError, Pool, Response, Server
from turnstile.bench.records import Attempt
from turnstile.bench.workloads import Planned


@dataclass(frozen=True, slots=True)
class Run:
    """Everything one repetition brought.

    Parameters
    ----------
    start, end
        The window, on ``time.perf_counter``'s clock: from the start until the last answer was
        over, or the time limit.
    client_cpu
        CPU seconds the generator itself took in the window.
    """

    attempts: list[Attempt]
    start: float
    end: float
    client_cpu: float


def body_of(planned: Planned, model: str) -> bytes:
    """The request's JSON: greedy, exactly the planned number of tokens, usage at the end."""
    return msgspec.json.encode(
        {
            "model": model,
            "prompt": planned.prompt,
            "max_tokens": planned.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


class Driver:
    """Sends one plan's requests to one server.

    Parameters
    ----------
    plan
        The requests, in the order of their arrival.
    time_limit
        Seconds after which running requests are cut off and count as incomplete; None for none.
    """

    def __init__(
        self,
        server: Server,
        model: str,
        plan: Sequence[Planned],
        arrivals: Arrivals,
        time_limit: float | None = None,
    ) -> None:
        self._pool = Pool(server)
        # Encoded before the clock runs, so that the generator is idle while the server works.
        self._requests = [
            server.request("POST", "/v1/completions", body_of(p, model)) for p in plan
        ]
        self._wanted = [p.output_tokens for p in plan]
        self._arrivals = arrivals
        self._limit = time_limit
        self._attempts: list[Attempt] = []

    async def run(self) -> Run:
        """Send everything and wait for the last answer, or the time limit."""
        gc.collect()
        gc.disable()  # a collection would shift the times of whatever arrives meanwhile
        cpu, start = _own_cpu(), time.perf_counter()
        work = self._closed if isinstance(self._arrivals, ClosedLoop) else self._open
        tasks = work(start)
        try:
            _, late = await asyncio.wait(tasks, timeout=self._limit)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
            end = time.perf_counter()
        finally:
            gc.enable()
            self._pool.close()
        for task in tasks:
            if not task.cancelled():
                task.result()  # a fault of the generator itself must not pass for a measurement
        return Run(self._attempts, start, end, _own_cpu() - cpu)

    def _closed(self, start: float) -> list[asyncio.Task[None]]:
        assert isinstance(self._arrivals, ClosedLoop)
        queue = iter(range(len(self._requests)))
        users = min(self._arrivals.users, len(self._requests))
        gap = self._arrivals.ramp_s / users

        async def user(number: int) -> None:
            if gap:
                await asyncio.sleep(gap * number)
            for index in queue:
                await self._send(index, time.perf_counter())

        return [asyncio.create_task(user(number)) for number in range(users)]

    def _open(self, start: float) -> list[asyncio.Task[None]]:
        assert not isinstance(self._arrivals, ClosedLoop)
        most = self._arrivals.max_concurrency
        room = asyncio.Semaphore(most) if most is not None else None

        async def arrive(index: int, due: float) -> None:
            await asyncio.sleep(max(due - time.perf_counter(), 0.0))
            if room is None:
                await self._send(index, due)
                return
            async with room:
                await self._send(index, due)

        times = self._arrivals.times
        return [asyncio.create_task(arrive(i, start + t)) for i, t in enumerate(times)]

    async def _send(self, index: int, due: float) -> None:
        attempt = Attempt(scheduled=due, sent=time.perf_counter(), wanted=self._wanted[index])
        self._attempts.append(attempt)
        response = Response()
        try:
            await self._pool.send(self._requests[index], response)
        except asyncio.CancelledError:
            attempt.cut = True
            raise
        except BrokenResponseError as error:
            attempt.error = str(error)
        except OSError as error:
            attempt.error = f"cannot connect: {error.strerror or error}"
        finally:
            attempt.ended = time.perf_counter()
            attempt.status = response.status
            attempt.pieces = response.pieces


def _own_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
