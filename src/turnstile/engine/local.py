"""The engine in a thread of this process: :class:`LocalEngine`, for the Python API and for tests.

The same journal and streams as with a process of its own, without its safety: what kills the
engine here kills the program, and a loop that fails is not started again.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from turnstile.engine.build import build_engine
from turnstile.engine.client import EngineState, EngineUnavailableError
from turnstile.engine.config import EngineConfig
from turnstile.engine.journal import Entry, JournalError
from turnstile.engine.journaled import JournaledClient
from turnstile.engine.loop import StepLoop
from turnstile.engine.protocol import Command, Control, EngineInfo, Loading, StepResult

logger = logging.getLogger(__name__)

_LOOK_AGAIN = 0.01
_EPOCH = 1
_T = TypeVar("_T")


class LocalEngine(JournaledClient):
    """An engine that runs in a thread. Not yet started."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self.config = config
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._started: asyncio.Future[EngineInfo] | None = None
        self._heard = 0.0

    # -- EngineClient -----------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        loop = asyncio.get_running_loop()
        self._started = loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(loop,), name="engine", daemon=True)
        self._thread.start()
        return await self._started

    async def stop(self, grace: float) -> None:
        if self.state is not EngineState.DEAD:
            self.state = EngineState.DRAINING
            await self._wait_until_empty(grace)
        self._end_all("abort")
        self._commands.put(Control("stop"))
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        self.state = EngineState.DEAD

    @property
    def healthy(self) -> bool:
        if self._thread is None or not self._thread.is_alive():
            return False
        silence = time.monotonic() - self._heard
        return not self._journal.entries or silence < self.config.step_timeout

    # -- in the event loop's thread ---------------------------------------------------------------

    def _enter(self, entry: Entry) -> None:
        if len(self._journal.entries) == 1:
            self._heard = time.monotonic()
        for command in entry.submits():
            self._send(command)

    def _send(self, command: Command) -> None:
        self._commands.put(command)

    def _on_ready(self, info: EngineInfo) -> None:
        self.info, self.loading = info, None
        if self.state is EngineState.LOADING:
            self.state = EngineState.READY
        if self._started is not None and not self._started.done():
            self._started.set_result(info)

    def _on_loading(self, loading: Loading) -> None:
        self.loading = loading

    def _on_step(self, result: StepResult) -> None:
        self._heard = time.monotonic()
        try:
            self._take(result)
        except JournalError as error:
            self._on_failed(str(error))

    def _on_failed(self, why: str) -> None:
        self.state = EngineState.DEAD
        if self._started is not None and not self._started.done():
            self._started.set_exception(EngineUnavailableError(why, EngineState.DEAD))
        self._end_all("error", f"The engine has failed. {why}")

    # -- in the engine's thread -------------------------------------------------------------------

    def _run(self, home: asyncio.AbstractEventLoop) -> None:
        try:
            make_loop, info = build_engine(
                self.config,
                _EPOCH,
                lambda stage, fraction: _tell(
                    home, self._on_loading, Loading(_EPOCH, stage, fraction)
                ),
            )
            loop = make_loop(lambda result: _tell(home, self._on_step, result))
            _tell(home, self._on_ready, info)
            self._step_until_stopped(loop)
        except Exception as error:
            # The thread ends here whatever it was; the streams must hear of it.
            logger.debug("The engine thread has failed", exc_info=True)
            _tell(home, self._on_failed, str(error) or type(error).__name__)

    def _step_until_stopped(self, loop: StepLoop) -> None:
        timeout: float | None = None
        while True:
            for command in self._pending(timeout):
                if isinstance(command, Control) and command.action == "stop":
                    return
                loop.apply(command)
            timeout = 0 if loop.has_work else None
            if loop.has_work:
                before = loop.scheduler.statistics.steps
                loop.step()
                if loop.has_work and loop.scheduler.statistics.steps == before:
                    timeout = _LOOK_AGAIN  # nothing could run: do not spin

    def _pending(self, timeout: float | None) -> list[Command]:
        """The commands that have come; waits for the first (None: for ever, 0: not at all)."""
        commands: list[Command] = []
        try:
            commands.append(self._commands.get(timeout != 0, timeout or None))
            while True:
                commands.append(self._commands.get_nowait())
        except queue.Empty:
            return commands


def _tell(home: asyncio.AbstractEventLoop, take: Callable[[_T], None], what: _T) -> None:
    """Hand something over to the event loop, unless that has ended."""
    try:
        home.call_soon_threadsafe(take, what)
    except RuntimeError:
        logger.debug("The event loop ended before its engine")


__all__ = ["LocalEngine"]
