"""One engine process, seen from its parent: :class:`EngineProcess`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import msgspec

import turnstile
from turnstile.engine.config import EngineConfig
from turnstile.engine.logs import current_format
from turnstile.engine.protocol import (
    PRELOAD,
    SUPERVISORS_SIGNALS,
    Command,
    Commands,
    Control,
    encode_commands,
)
from turnstile.engine.wire import Unframer, frame

_WORKER = "turnstile.engine.worker"


@dataclass(frozen=True, slots=True)
class Spawned:
    """A worker process that waits for its setup, and the socket to it."""

    process: subprocess.Popen[bytes]
    ours: socket.socket
    theirs: int
    """The other end, as the worker's file descriptor."""

    def end(self) -> None:
        """End a worker that was never set up."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.ours.close()
        self.process.kill()
        self.process.wait()

    def set_up(self, config: EngineConfig, epoch: int) -> None:
        """Tell the worker what to load; it begins at once."""
        setup = {
            "config": asdict(config),
            "epoch": epoch,
            "parent": os.getpid(),
            "socket": self.theirs,
            "log_format": current_format(),
            "log_level": logging.getLogger("turnstile").getEffectiveLevel(),
        }
        assert self.process.stdin is not None
        try:
            with self.process.stdin as stdin:
                stdin.write(msgspec.json.encode(setup))
        except BrokenPipeError:
            logging.getLogger(__name__).debug("The engine ended before it read its setup")


def spawn(config: EngineConfig) -> Spawned:
    """Start a worker, which imports what it computes with and then waits for its setup.

    To be called in the main thread: the process is tied to the life of the thread that starts it.
    Needs no event loop.
    """
    preload = [] if config.model.startswith("fake:") else [PRELOAD]
    ours, theirs = socket.socketpair()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SUPERVISORS_SIGNALS)  # the worker inherits it
    try:
        with theirs:
            process = subprocess.Popen(
                # -P: a torch.py in the current directory is none of ours.
                [sys.executable, "-P", "-m", _WORKER, *preload],
                stdin=subprocess.PIPE,
                stdout=2,
                pass_fds=[theirs.fileno()],
                env=_environment(),
            )
            return Spawned(process, ours, theirs.fileno())
    except BaseException:
        ours.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class EngineProcess(asyncio.Protocol):
    """A worker process and the socket to it.

    Parameters
    ----------
    on_message
        Called with this object and each message of the engine, undecoded.
    on_lost
        Called with this object once, when the process is gone and all it said has been heard.
    """

    def __init__(
        self,
        epoch: int,
        on_message: Callable[[EngineProcess, bytes], None],
        on_lost: Callable[[EngineProcess], None],
    ) -> None:
        self.epoch = epoch
        self._on_message = on_message
        self._on_lost = on_lost
        self._unframer = Unframer()
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._outbox: list[Command] = []
        self.gone = asyncio.Event()

    async def launch(self, config: EngineConfig, spawned: Spawned | None = None) -> None:
        """Start the process, in the main thread, or take one that was started ahead."""
        spawned = spawned or spawn(config)
        self._process = spawned.process
        spawned.set_up(config, self.epoch)
        await self._loop.create_unix_connection(lambda: self, sock=spawned.ours)

    # -- asyncio.Protocol -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not an isinstance check: the transports of uvloop are of classes of its own.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for payload in self._unframer.feed(data):
            self._on_message(self, payload)

    def connection_lost(self, exc: Exception | None) -> None:
        self.kill()
        # The kill is on its way, but reaping can take a moment: not in the event loop.
        threading.Thread(target=self._reap, name="engine-reaper", daemon=True).start()

    def _reap(self) -> None:
        if self._process is not None:
            self._process.wait()
        try:
            self._loop.call_soon_threadsafe(self._report_lost)
        except RuntimeError:
            return  # the event loop has ended before the engine: nobody waits for this

    def _report_lost(self) -> None:
        self.gone.set()
        self._on_lost(self)

    # -- for the supervisor -----------------------------------------------------------------------

    def send(self, *commands: Command) -> None:
        """Tell the engine, with all else that is said in this turn of the event loop."""
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox += commands

    def _flush(self) -> None:
        commands, self._outbox = self._outbox, []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(encode_commands(Commands(commands))))

    def kill(self) -> None:
        """End the process at once, whatever it does. The loss is reported as any other."""
        if self._process is not None:
            self._process.kill()
        if self._transport is not None:
            self._transport.abort()

    async def stop(self, patience: float) -> None:
        """Ask the process to end, kill it after ``patience`` seconds; returns when it is gone."""
        if self.gone.is_set() or self._process is None:
            return
        if self._transport is None:  # cancelled in the middle of the launch
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
            return
        self.send(Control("stop"))
        try:
            await asyncio.wait_for(self.gone.wait(), patience)
        except TimeoutError:
            self.kill()
            await self.gone.wait()

    @property
    def end(self) -> str:
        """How the process ended, in words."""
        code = self._process.returncode if self._process is not None else None
        if code is None:
            return "is still running"
        if code >= 0:
            return f"exited with code {code}"
        name = signal.Signals(-code).name
        hint = " (out of memory?)" if -code == signal.SIGKILL else ""
        return f"was killed by {name}{hint}"


def _environment() -> dict[str, str]:
    """Ours; where Turnstile runs from its source tree, with the way to it."""
    environment = dict(os.environ)
    root = Path(turnstile.__file__).parents[1]
    if "site-packages" not in root.parts:
        known = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{known}" if known else str(root)
    return environment
