"""Send the requests of a plan at their moments, and note what comes back."""

from __future__ import annotations

import asyncio
import gc
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass

from turnstile.bench.arrivals import Arrivals, ClosedLoop
from turnstile.bench.client import Tokenizer
from turnstile.bench.endpoints import Completions, Endpoint, Said
from turnstile.bench.http import BrokenResponseError, Pool, Response, Server
from turnstile.bench.plan import Planned
from turnstile.bench.records import Attempt, answer_of


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


class Driver:
    """Sends one plan's requests to one server.

    Parameters
    ----------
    plan
        The requests, in the order of their arrival.
    time_limit
        Seconds after which running requests are cut off and count as incomplete; None for none.
    endpoint
        How a request is written; token ids to ``/v1/completions`` otherwise.
    tokenizer
        For conversations whose server does not tell the ids of its answers, and for chats.
    exact
        Whether an answer of another length than asked for has failed.
    turn_delay
        Seconds from an answer to the next question.
    """

    def __init__(
        self,
        server: Server,
        model: str,
        plan: Sequence[Planned],
        arrivals: Arrivals,
        time_limit: float | None = None,
        *,
        endpoint: Endpoint | None = None,
        tokenizer: Tokenizer | None = None,
        exact: bool = True,
        turn_delay: float = 0.0,
    ) -> None:
        self._server = server
        self._pool = Pool(server)
        self._endpoint = endpoint or Completions(
            model, return_token_ids=any(p.follow_ups for p in plan)
        )
        self._tokenizer = tokenizer
        self._plan = plan
        self._exact = exact
        self._delay = turn_delay
        # Encoded before the clock runs, so that the generator is idle while the server works.
        self._requests = [
            self._encode([Said("user", p.prompt, p.text)], p.output_tokens) for p in plan
        ]
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

        async def user() -> None:
            for index in queue:
                await self._converse(index, time.perf_counter())

        return [asyncio.create_task(user()) for _ in range(users)]

    def _open(self, start: float) -> list[asyncio.Task[None]]:
        assert not isinstance(self._arrivals, ClosedLoop)
        most = self._arrivals.max_concurrency
        room = asyncio.Semaphore(most) if most is not None else None

        async def arrive(index: int, due: float) -> None:
            await asyncio.sleep(max(due - time.perf_counter(), 0.0))
            if room is None:
                await self._converse(index, due)
                return
            async with room:
                await self._converse(index, due)

        times = self._arrivals.times
        return [asyncio.create_task(arrive(i, start + t)) for i, t in enumerate(times)]

    async def _converse(self, index: int, due: float) -> None:
        """Send a request, and what the user asks next, until an answer fails."""
        planned = self._plan[index]
        attempt = await self._send(self._requests[index], planned.output_tokens, due)
        history = [Said("user", planned.prompt, planned.text)]
        for following in planned.follow_ups:
            if attempt.error is not None or attempt.status != 200:
                return
            history.append(await self._answer(attempt))
            history.append(Said("user", following.prompt, following.text))
            if self._delay:
                await asyncio.sleep(self._delay)
            due = time.perf_counter()
            request = self._encode(history, following.output_tokens)
            attempt = await self._send(request, following.output_tokens, due)

    def _encode(self, history: Sequence[Said], output_tokens: int) -> bytes:
        body = self._endpoint.body(history, output_tokens)
        return self._server.request("POST", self._endpoint.path, body)

    async def _answer(self, attempt: Attempt) -> Said:
        ids, text = answer_of(attempt)
        if not ids and text and self._tokenizer is not None and not self._endpoint.needs_text:
            ids = await self._tokenizer(text)
        return Said("assistant", ids, text)

    async def _send(self, request: bytes, wanted: int, due: float) -> Attempt:
        attempt = Attempt(
            scheduled=due, sent=time.perf_counter(), wanted=wanted if self._exact else None
        )
        self._attempts.append(attempt)
        response = Response()
        try:
            await self._pool.send(request, response)
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
        return attempt


def _own_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
