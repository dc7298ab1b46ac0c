"""A whole measurement: plan, warm up, run the repetitions, gather the result."""

from __future__ import annotations

import asyncio
import contextlib
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from turnstile import __version__
from turnstile.bench.arrivals import ClosedLoop
from turnstile.bench.client import (
    LocalTokenizer,
    RemoteTokenizer,
    ServerError,
    Tokenizer,
    wait_until_ready,
)
from turnstile.bench.corpus import Prose
from turnstile.bench.drive import Driver, Run
from turnstile.bench.endpoints import Chat, Completions, Endpoint
from turnstile.bench.fields import detail, flat
from turnstile.bench.http import Server
from turnstile.bench.metrics import Figures, Limits, measure_records, median_of, records_of
from turnstile.bench.plan import Planned, passage, plan, with_text
from turnstile.bench.processes import ProcessTree
from turnstile.bench.workloads import Workload

LENGTH_SEED = 101  # W1: 50,735 prompt and 33,376 output tokens
FORMAT = "turnstile-bench-1"
ENDPOINTS = (Completions.path, Chat.path)


class MeasurementError(ValueError):
    """The measurement cannot be made like this; the message says why."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure.

    Parameters
    ----------
    repeat
        Repetitions, each with fresh text.
    warmup
        Requests sent one after another before the first repetition, not counted.
    length_seed, text_seed
        Seeds of the lengths and arrivals, and of the text.
    time_limit
        Seconds a repetition may take; None for no limit.
    server_pid
        First process of the server, whose CPU time and memory are to be watched.
    limits
        Limits of goodput in milliseconds, by the short names of the latencies.
    endpoint
        One of :data:`ENDPOINTS`.
    tokenizer
        Path of the model whose tokenizer cuts the prompts; None asks the server's.
    ready_s
        Seconds to wait for a server that is not there yet, or still loads.
    ignore_eos
        Ask for answers of exactly their length, and count others as failed.
    """

    repeat: int = 1
    warmup: int = 2
    length_seed: int = LENGTH_SEED
    text_seed: int = 0
    time_limit: float | None = None
    server_pid: int | None = None
    limits: Limits | None = None
    endpoint: str = Completions.path
    tokenizer: str | None = None
    ignore_eos: bool = True
    ready_s: float = 0.0

    def __post_init__(self) -> None:
        if self.repeat < 1 or self.warmup < 0:
            raise MeasurementError("--repeat must be at least 1 and --warmup at least 0")
        if self.time_limit is not None and self.time_limit <= 0:
            raise MeasurementError("--time-limit must be over 0 seconds")
        if self.endpoint not in ENDPOINTS:
            raise MeasurementError(
                f"--endpoint must be {' or '.join(ENDPOINTS)}, not {self.endpoint!r}"
            )


async def bench(
    server: Server,
    model: str | None,
    workload: Workload,
    settings: Settings,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure a server; returns what goes into the JSON file.

    ``details`` has the single requests of each repetition, and may be left out of the file.
    A server that answers nothing still gives a result, whose requests have all failed.

    Raises
    ------
    ServerError
        If the server cannot even name its model or tokenize a prompt.
    """
    started = time.time()
    if model is None or settings.ready_s:
        found = await wait_until_ready(server, settings.ready_s)
        model = model or found
    session = _Session(server, model, workload, settings)
    try:
        await session.warm_up()
        repetitions = []
        for number in range(settings.repeat):
            tell(f"repetition {number + 1} of {settings.repeat}: cutting the prompts")
            planned = await session.plan()
            tell(f"repetition {number + 1} of {settings.repeat}: {len(planned)} requests")
            repetitions.append(await session.repeat(planned))
    finally:
        session.tokenizer.close()
    median = median_of(repetitions)
    return {
        "format": FORMAT,
        "turnstile": __version__,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "machine": platform.processor() or platform.machine(),
        "server": f"http://{server.host}:{server.port}{server.path}",
        "model": session.model,
        "workload": asdict(workload),
        "length_seed": settings.length_seed,
        "text_seed": settings.text_seed,
        **flat(workload, session.model, settings.endpoint, median),
        "median": median,
        "repetitions": repetitions,
        "details": session.details,
    }


class _Session:
    """What the repetitions of one measurement share."""

    def __init__(self, server: Server, model: str, workload: Workload, settings: Settings) -> None:
        self.server, self.model = server, model
        self.workload, self.settings = workload, settings
        self.prose = Prose(settings.text_seed)
        self.tokenizer: Tokenizer = (
            LocalTokenizer(settings.tokenizer)
            if settings.tokenizer is not None
            else RemoteTokenizer(server, model)
        )
        self.endpoint: Endpoint = (
            Chat(model, ignore_eos=settings.ignore_eos)
            if settings.endpoint == Chat.path
            else Completions(
                model,
                ignore_eos=settings.ignore_eos,
                return_token_ids=workload.turns is not None,
            )
        )
        pid = settings.server_pid
        self.tree = ProcessTree(pid) if pid is not None else None
        self.details: list[dict[str, Any]] = []

    async def plan(self) -> list[Planned]:
        """The requests of the next repetition: the same lengths, fresh text."""
        return await self._with_text(
            await plan(self.workload, self.tokenizer, self.prose, self.settings.length_seed)
        )

    async def _with_text(self, planned: list[Planned]) -> list[Planned]:
        if self.endpoint.needs_text:
            return await with_text(planned, self.tokenizer.decode)
        return planned

    async def warm_up(self) -> None:
        """Send a few short requests, which are not counted."""
        count = self.settings.warmup
        planned = [Planned(await passage(self.tokenizer, self.prose, 32), 8) for _ in range(count)]
        if planned:
            # Whatever fails here fails again, and is reported, in the first repetition.
            driver = Driver(
                self.server,
                self.model,
                await self._with_text(planned),
                ClosedLoop(1),
                time_limit=60.0,
                endpoint=self.endpoint,
            )
            await driver.run()

    async def repeat(self, planned: list[Planned]) -> Figures:
        """Run one repetition and measure it."""
        driver = Driver(
            self.server,
            self.model,
            planned,
            self.workload.arrivals(self.settings.length_seed),
            self.settings.time_limit,
            endpoint=self.endpoint,
            tokenizer=self.tokenizer,
            exact=self.settings.ignore_eos,
            turn_delay=self.workload.turn_delay,
        )
        if self.tree is None:
            return self._measured(await driver.run())
        self.tree.start()
        watching = asyncio.create_task(self.tree.watch())
        try:
            run = await driver.run()
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
        figures = self._measured(run)
        return figures | {"server": self.tree.figures(figures["output_tokens"])}

    def _measured(self, run: Run) -> Figures:
        records = records_of(run)
        self.details.append(detail(records))
        return measure_records(run, records, self.settings.limits)


__all__ = ["ENDPOINTS", "FORMAT", "LENGTH_SEED", "ServerError", "Settings", "bench"]
