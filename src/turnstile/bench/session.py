"""A whole measurement: plan, warm up, run the repetitions, gather the result."""

from __future__ import annotations

import asyncio
import contextlib
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from turnstile import __version__
from turnstile.bench.arrivals import ClosedLoop
from turnstile.bench.corpus import Prose
from turnstile.bench.drive import Driver, Run
from turnstile.bench.http import BrokenResponseError, Pool, Response, Server
from turnstile.bench.metrics import Figures, Limits, measure, median_of
from turnstile.bench.processes import ProcessTree
from turnstile.bench.workloads import Planned, Workload, passage, plan

LENGTH_SEED = 101  # W1: 50,735 prompt and 33,376 output tokens
FORMAT = "turnstile-bench-1"


class ServerError(Exception):
    """The server cannot be measured; the message says why."""


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
    """

    repeat: int = 1
    warmup: int = 2
    length_seed: int = LENGTH_SEED
    text_seed: int = 0
    time_limit: float | None = None
    server_pid: int | None = None
    limits: Limits | None = None

    def __post_init__(self) -> None:
        if self.repeat < 1 or self.warmup < 0:
            raise ValueError("--repeat must be at least 1 and --warmup at least 0")
        if self.time_limit is not None and self.time_limit <= 0:
            raise ValueError("--time-limit must be over 0 seconds")


async def bench(
    server: Server,
    model: str | None,
    workload: Workload,
    settings: Settings,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure a server; returns what goes into the JSON file.

    A server that answers nothing still gives a result, whose requests have all failed.

    Raises
    ------
    ServerError
        If the server cannot even name its model or tokenize a prompt.
    """
    started = time.time()
    model = model or await first_model(server)
    tree = ProcessTree(settings.server_pid) if settings.server_pid is not None else None
    prose = Prose(settings.text_seed)
    tokenizer = RemoteTokenizer(server, model)
    await _warm_up(server, model, tokenizer, prose, settings.warmup)
    repetitions: list[Figures] = []
    for number in range(settings.repeat):
        tell(f"repetition {number + 1} of {settings.repeat}: cutting the prompts")
        planned = await plan(workload, tokenizer, prose, settings.length_seed)
        tell(f"repetition {number + 1} of {settings.repeat}: {workload.requests} requests")
        driver = Driver(
            server,
            model,
            planned,
            workload.arrivals(settings.length_seed),
            settings.time_limit,
        )
        repetitions.append(await _repetition(driver, tree, settings.limits))
    tokenizer.close()
    return {
        "format": FORMAT,
        "turnstile": __version__,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "machine": platform.processor() or platform.machine(),
        "server": f"http://{server.host}:{server.port}{server.path}",
        "model": model,
        "workload": asdict(workload),
        "length_seed": settings.length_seed,
        "text_seed": settings.text_seed,
        "median": median_of(repetitions),
        "repetitions": repetitions,
    }


async def _repetition(driver: Driver, tree: ProcessTree | None, limits: Limits | None) -> Figures:
    if tree is None:
        return measure(await driver.run(), limits)
    tree.start()
    watching = asyncio.create_task(tree.watch())
    try:
        run: Run = await driver.run()
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    figures = measure(run, limits)
    return figures | {"server": tree.figures(figures["output_tokens"])}


async def _warm_up(
    server: Server, model: str, tokenizer: RemoteTokenizer, prose: Prose, count: int
) -> None:
    planned = [Planned(await passage(tokenizer, prose, 32), 8) for _ in range(count)]
    if planned:
        # Whatever fails here fails again, and is reported, in the first repetition.
        await Driver(server, model, planned, ClosedLoop(1), time_limit=60.0).run()


class RemoteTokenizer:
    """The server's own tokenizer, through ``POST /tokenize``.

    Sends what both vLLM (``prompt``) and llama-server (``content``) ask for.
    """

    def __init__(self, server: Server, model: str) -> None:
        self._pool = Pool(server)
        self._server = server
        self._model = model

    async def __call__(self, text: str) -> list[int]:
        body = {
            "model": self._model,
            "prompt": text,
            "content": text,
            "add_special_tokens": False,
            "add_special": False,
        }
        answer = await _json(self._pool, "POST", "/tokenize", msgspec.json.encode(body))
        tokens = answer.get("tokens")
        if not isinstance(tokens, list):
            raise ServerError("the server's /tokenize answers without tokens")
        return tokens

    def close(self) -> None:
        """Close the connection."""
        self._pool.close()


async def first_model(server: Server) -> str:
    """The name of the first model the server lists. Raises :class:`ServerError`."""
    pool = Pool(server)
    try:
        answer = await _json(pool, "GET", "/v1/models")
    finally:
        pool.close()
    models = answer.get("data")
    if not models:
        raise ServerError("the server lists no model in /v1/models: name one with --model")
    return str(models[0]["id"])


async def _json(pool: Pool, method: str, path: str, body: bytes = b"") -> dict[str, Any]:
    response = Response()
    try:
        await pool.send(pool.server.request(method, path, body), response)
        if response.status != 200:
            raise ServerError(f"{method} {path} answers HTTP {response.status}: {response.body!r}")
        answer = msgspec.json.decode(response.body)
    except OSError as error:
        where = f"{pool.server.host}:{pool.server.port}"
        raise ServerError(f"Nobody answers at {where} ({error.strerror or error}).") from None
    except (BrokenResponseError, msgspec.DecodeError) as error:
        raise ServerError(f"{method} {path}: {error}") from None
    return answer if isinstance(answer, dict) else {}
