"""``turnstile serve``: the server, from the flags to the exit code."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Iterator
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from turnstile.engine.config import EngineConfig
from turnstile.server.config import ServerConfig

if TYPE_CHECKING:
    import socket

    from turnstile.engine.client import EngineClient
    from turnstile.models.source import ModelSource
    from turnstile.server.model import ServedModel
    from turnstile.server.service import Service

logger = logging.getLogger("turnstile.server")

app = App(
    name="serve",
    help="Serve a model over HTTP, with OpenAI's API.",
    help_epilogue="Settings come from flags, from TURNSTILE_SERVE_* variables, from the file of "
    "--config, and from the defaults, in this order. Sizes may be written 1k, 32K or 25.6k. "
    "--help=WORD shows the flags that have to do with a word.",
)


@app.default
def serve(
    model: str | None = None,
    /,
    *,
    config: str | None = None,
    engine: Annotated[EngineConfig, Parameter(name="*", group="Engine")] | None = None,
    server: Annotated[ServerConfig, Parameter(name="*", group="Server")] | None = None,
) -> int:
    """Serve a model.

    Parameters
    ----------
    model
        The same as --model.
    config
        File with settings, TOML or YAML.
    """
    engine = engine or EngineConfig()
    server = server or ServerConfig()
    if model is not None:
        engine.model = model
    if not server.api_key:
        server.api_key = os.environ.get("TURNSTILE_API_KEY", "").split()
    return start(engine, server)


def start(engine_config: EngineConfig, config: ServerConfig) -> int:
    """Run the server with these settings; returns the exit code.

    What is quick to find out is found out first: impossible settings, a taken port, a missing
    model. Only then does the engine load; its process is started before, for its imports.
    """
    began = time.monotonic()
    config.check()
    engine_config.check()
    engine = make_engine(engine_config)
    engine.prepare()
    try:
        with _listening(config) as listener:
            source = find_model(engine_config)
            service = _make_service(engine, engine_config, config)
            return _run(service, source, listener, began)
    finally:
        engine.abandon()


@contextlib.contextmanager
def _listening(config: ServerConfig) -> Iterator[socket.socket]:
    """The socket, bound; what is wrong with keys is known before. Logs are set up on the way."""
    from turnstile.engine.logs import configure
    from turnstile.server.http.auth import KeyRing
    from turnstile.server.http.binding import bind

    KeyRing.of(config)  # a mistake in the tenants' file is known before a model is fetched
    configure(config.log_level, config.log_format)
    listener = bind(config)
    try:
        yield listener
    finally:
        listener.close()
        if config.uds is not None and os.path.exists(config.uds):
            os.unlink(config.uds)


def find_model(config: EngineConfig) -> ModelSource:
    """The model's files, fetched where they are not here yet. What is wrong with them, or asks too
    much of them, is known here; the engine would need seconds for it.
    """
    from turnstile.models.source import resolve

    source = resolve(
        config.model,
        revision=config.revision,
        report=lambda text: logger.info("%s", text),
    )
    config.check_positions(source.config.max_positions)
    source.open_tensors()
    return source


def _make_service(
    engine: EngineClient, engine_config: EngineConfig, config: ServerConfig
) -> Service:
    from turnstile.server.service import Service
    from turnstile.server.watch.trace import Trace

    environment: dict[str, object] = {"engine_config": vars(engine_config)}
    trace = Trace(config.trace, config.trace_max_bytes) if config.trace else None
    return Service(config, engine, environment=environment, trace=trace)


def _run(service: Service, source: ModelSource, listener: socket.socket, began: float) -> int:
    """Serve until told to stop; returns the exit code. ``began``: of the start, for the panel."""
    from turnstile.cli.panel import LoadingBar, announce
    from turnstile.server.http.binding import url_of
    from turnstile.server.run import run
    from turnstile.server.startup import load_model

    url = url_of(listener)
    logger.info("Listening at %s, loading %s", url, source.name)
    bar = LoadingBar(service.config)

    def load() -> Awaitable[ServedModel]:
        return load_model(service.engine, source, service.config, bar.show)

    def on_ready() -> None:
        bar.close()
        announce(service, url, time.monotonic() - began)

    try:
        return run(service, listener, load, on_ready)
    finally:
        bar.close()
        if service.trace is not None:
            service.trace.close()


def make_engine(config: EngineConfig) -> EngineClient:
    """The supervised engine process of this configuration, not yet started."""
    from turnstile.engine.supervisor import ProcessEngine

    return ProcessEngine(config)
