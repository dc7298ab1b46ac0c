"""The life of the server process: listen, load, serve, drain, stop. :func:`run`.

The first SIGTERM or SIGINT drains: what runs may finish within ``--shutdown-timeout``, new
requests are sent elsewhere. The second aborts, and every stream still gets its last chunk. The
third leaves at once. SIGHUP reads the tenants' file again. Where there is none it changes nothing,
but drains a server whose terminal was closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import uvicorn

from turnstile.engine.client import EngineState, EngineUnavailableError
from turnstile.engine.wording import counted
from turnstile.server.app import App
from turnstile.server.http.connection import Connection
from turnstile.server.model import ServedModel
from turnstile.server.notify import notify, watched
from turnstile.server.service import Phase, Service
from turnstile.server.watch.stats import ThroughputLine

logger = logging.getLogger("turnstile.server")

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_ABORTED = 130

YOUNG_OBJECTS = 20_000
"""Objects allocated, less those freed, that start a garbage collection. Python's default of 700 is
reached in one step of a hundred streams, and its older generations hold everything about the live
requests: all streams wait while those are scanned. Nearly everything here is freed by its reference
count; cycles are rare, and can wait.
"""
_POLL = 0.05
_WATCH = 1.0
_LAST_CHUNKS = 5.0
"""Seconds handlers get to write their last chunks once the engine has stopped."""

Load = Callable[[], Awaitable[ServedModel]]


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers: stopping is ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Life:
    """One run of the server.

    Parameters
    ----------
    service
        What is served.
    listener
        The bound socket.
    load
        Starts the engine and reads the tokenizer; runs while the server answers 503 already.
    on_ready
        Called once requests are taken.
    """

    def __init__(
        self,
        service: Service,
        listener: socket.socket,
        load: Load,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._service = service
        self._listener = listener
        self._load = load
        self._on_ready = on_ready
        self._signals = 0
        self._first = asyncio.Event()
        self._second = asyncio.Event()
        self._failed = False

    async def run(self) -> int:
        """Serve until told to stop; returns the exit code."""
        config = self._service.config
        self._handle_signals()
        server = _Server(
            uvicorn.Config(
                App(self._service),
                log_config=None,
                access_log=False,
                lifespan="off",
                http=partial(Connection, files=self._service.files),  # type: ignore[arg-type]
                ws="none",
                server_header=False,
                backlog=self._service.files.backlog,
                timeout_keep_alive=config.keep_alive_timeout,
                timeout_graceful_shutdown=int(_LAST_CHUNKS),
            )
        )
        serving = asyncio.create_task(server.serve([self._listener]))
        coming_up = asyncio.create_task(self._bring_up())
        watching = asyncio.create_task(self._watch())
        await self._first.wait()
        await _end(coming_up)
        try:
            await self._drain()
        finally:
            await _end(watching)
            server.should_exit = True
            await serving
            logger.info("Stopped.")
        if self._failed:
            return EXIT_FAILED
        return EXIT_ABORTED if self._second.is_set() else EXIT_OK

    # -- coming up ----------------------------------------------------------------------------

    async def _bring_up(self) -> None:
        try:
            model = await self._load()
        except EngineUnavailableError as error:
            self._fail(str(error))
            return
        except Exception as error:
            expected = isinstance(error, (ValueError, OSError)) or _is_ours(error)
            debug = logger.isEnabledFor(logging.DEBUG) or not expected
            logger.log(
                logging.DEBUG if expected else logging.ERROR, "Loading failed", exc_info=debug
            )
            self._fail(str(error) or type(error).__name__)
            return
        service = self._service
        service.ready(model)
        if service.config.max_num_queued_reqs is not None:
            service.files.warn_if_too_few(
                service.config.max_num_queued_reqs + model.info.max_num_seqs
            )
        # What lives now lives until the end: spare the collector from looking at it again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
        notify("READY=1")
        self._on_ready()

    def _fail(self, message: str) -> None:
        logger.error("%s", message)
        self._failed = True
        self._service.phase = Phase.FAILED
        self._first.set()

    async def _watch(self) -> None:
        """Look once a second whether the engine died for good and a throughput line is due, and
        show systemd's watchdog that the event loop turns. The engine has a watchdog of its own.
        """
        service = self._service
        shown = watched()
        line = ThroughputLine(service.metrics, service.clock())
        interval = service.config.log_stats_interval
        due = service.clock() + interval
        while True:
            await asyncio.sleep(_WATCH)
            if shown:
                notify("WATCHDOG=1")
            if service.phase is Phase.READY and service.engine.state is EngineState.DEAD:
                self._fail("The engine has died and cannot be restarted; leaving.")
                return
            if interval > 0 and service.clock() >= due:
                due = service.clock() + interval
                line.write(service.clock())

    # -- going down ---------------------------------------------------------------------------

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)

    def _on_hangup(self) -> None:
        """A reload, or the terminal was closed: it may say so twice, which must abort nobody."""
        if self._service.config.tenants is not None:
            self._service.reload_keys()
        elif os.isatty(0):
            self._first.set()
        else:
            logger.info("SIGHUP: nothing to reload, there is no --tenants file.")

    def _on_signal(self) -> None:
        self._signals += 1
        if self._signals == 1:
            self._first.set()
        elif self._signals == 2:
            self._second.set()
        else:
            os._exit(EXIT_ABORTED)

    async def _drain(self) -> None:
        """Let running requests finish, then end the engine; its streams get their last chunks."""
        service = self._service
        notify("STOPPING=1")
        if not self._failed:
            service.drain()
            await self._wait_for_requests()
        if service.engine.state is EngineState.DEAD:  # while it drained
            self._failed = True
        await service.engine.stop(0)
        service.watchers.close()
        end = service.clock() + _LAST_CHUNKS
        while service.metrics.in_flight and service.clock() < end:
            await asyncio.sleep(_POLL)

    async def _wait_for_requests(self) -> None:
        service = self._service
        timeout = service.config.shutdown_timeout
        running = service.metrics.in_flight
        if not running or timeout <= 0:
            return
        logger.info(
            "Shutting down: %s may finish within %g s. Again to abort.",
            counted(running, "request"),
            timeout,
        )
        end = service.clock() + timeout
        while service.metrics.in_flight and not self._second.is_set():
            if service.clock() >= end:
                left = counted(service.metrics.in_flight, "request")
                logger.warning("Aborting %s: out of time.", left)
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._second.wait(), _POLL)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _is_ours(error: Exception) -> bool:
    return type(error).__module__.startswith("turnstile.")


def run(
    service: Service,
    listener: socket.socket,
    load: Load,
    on_ready: Callable[[], None] = lambda: None,
) -> int:
    """Run the server in this thread, on uvloop, until it is told to stop; returns the exit code."""
    import uvloop

    service.files.raise_limit(service.config.max_num_queued_reqs or 0)

    async def main() -> int:
        return await Life(service, listener, load, on_ready).run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())
