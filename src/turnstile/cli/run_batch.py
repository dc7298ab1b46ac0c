"""``turnstile run-batch``: the requests of a file, without a server."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, TextIO

from cyclopts import App, Parameter

from turnstile.engine.config import EngineConfig
from turnstile.server.config import ConfigError, ServerConfig

if TYPE_CHECKING:
    import httpx

    from turnstile.cli.batch_file import Batch

_INPUT_ERRORS = "surrogateescape"
"""A byte that is no UTF-8 becomes half a surrogate pair: its line is refused, and no other."""
_OUTPUT_ERRORS = "backslashreplace"
"""Half a surrogate pair, out of somebody's id, is written as JSON's own escape for it."""

logger = logging.getLogger("turnstile.batch")

app = App(
    name="run-batch",
    help="Answer the requests in a file, in OpenAI's batch format.",
    help_epilogue="A line of the input: "
    '`{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {…}}`. '
    "Answers are written as they come, in any order.",
)


@app.default
def run_batch(
    model: str | None = None,
    /,
    *,
    input_file: Annotated[str, Parameter(name=["--input-file", "-i"])],
    output_file: Annotated[str, Parameter(name=["--output-file", "-o"])] = "-",
    resume: bool = False,
    in_flight: int = 256,
    url: str | None = None,
    api_key: str | None = None,
    chat_template: str | None = None,
    engine: Annotated[EngineConfig, Parameter(name="*", group="Engine")] | None = None,
) -> int:
    """Answer a file of requests. The exit code is 0 where every one has got its answer.

    Parameters
    ----------
    model
        The same as --model.
    input_file
        JSON lines; `-` reads standard input.
    output_file
        Where the answers go; `-` is standard output. A file that is there already must be told what
        to do with: see --resume.
    resume
        Go on with an output file: requests that have their answer in it are left out.
    in_flight
        Requests under way at a time.
    url
        Ask this server instead of running the model here.
    api_key
        The key, if that server wants one. Default: TURNSTILE_API_KEY.
    chat_template
        File with a chat template (Jinja) to use instead of the model's own.
    """
    from turnstile.cli.batch_file import Batch
    from turnstile.engine.logs import configure

    if in_flight < 1:
        raise ConfigError("--in-flight must be at least 1.")
    engine = engine or EngineConfig()
    if model is not None:
        engine.model = model
    engine.check()
    configure("info", "auto")
    server = ServerConfig(
        chat_template=chat_template,
        max_queue_wait=0,
        max_num_queued_reqs=None,
        disable_access_log=True,
    )
    with _files(input_file, output_file, resume=resume) as (lines, output, done):
        batch = Batch(lines, output, done, in_flight=in_flight)
        asyncio.run(_run(batch, engine, server, url, api_key))
    logger.info("%s", batch.summary())
    return 0 if batch.failed == 0 else 1


@contextlib.contextmanager
def _files(
    source: str, target: str, *, resume: bool
) -> Iterator[tuple[IO[str], IO[str], frozenset[str]]]:
    """The input, the output, and the ids that have been answered already."""
    from turnstile.cli.batch_file import answered

    with contextlib.ExitStack() as opened:
        lines = (
            _as_utf8(sys.stdin, _INPUT_ERRORS)
            if source == "-"
            else opened.enter_context(_open(Path(source), "r", _INPUT_ERRORS))
        )
        if target == "-":
            yield lines, _as_utf8(sys.stdout, _OUTPUT_ERRORS), frozenset()
            return
        path = Path(target)
        there = path.is_file()  # a pipe or a device is written to, and never read
        if there and not resume:
            raise ConfigError(f"{path} exists: name another file, or go on with it by --resume.")
        done: frozenset[str] = frozenset()
        if there:
            with _open(path, "r", _INPUT_ERRORS) as before:
                done = answered(before)
        output = opened.enter_context(_open(path, "a", _OUTPUT_ERRORS))
        if there and not _ends_a_line(path):
            output.write("\n")  # it was cut off in the middle of a line
        yield lines, output, done


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return True
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def _as_utf8(stream: TextIO, errors: str) -> TextIO:
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(encoding="utf-8", errors=errors)
    return stream


def _open(path: Path, mode: str, errors: str) -> IO[str]:
    try:
        # Some editors begin a file with a mark of its encoding.
        return path.open(mode, encoding="utf-8-sig" if mode == "r" else "utf-8", errors=errors)
    except OSError as error:
        raise ConfigError(f"Cannot open {path}: {error.strerror}.") from None


async def _run(
    batch: Batch, engine: EngineConfig, config: ServerConfig, url: str | None, key: str | None
) -> None:
    answering = _engine_here(engine, config) if url is None else _server_there(url, key)
    async with answering as client:
        await batch.run(client)


@contextlib.asynccontextmanager
async def _engine_here(
    engine_config: EngineConfig, config: ServerConfig
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the HTTP side in this process, which no socket leads to."""
    import httpx

    from turnstile.cli.serve import find_model, make_engine
    from turnstile.server.app import App as Http
    from turnstile.server.service import Service
    from turnstile.server.startup import load_model

    engine = make_engine(engine_config)
    engine.prepare()
    try:
        source = find_model(engine_config)
        service = Service(config, engine)
        service.ready(await load_model(engine, source, config))
        transport = httpx.ASGITransport(app=Http(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://batch") as client:
            yield client
    finally:
        await engine.stop(0)
        engine.abandon()


@contextlib.asynccontextmanager
async def _server_there(url: str, key: str | None) -> AsyncIterator[httpx.AsyncClient]:
    import httpx

    from turnstile.cli.client import connection

    base, settings = connection(url, key)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=base, limits=limits, **settings) as client:
        yield client
