"""The engine process: ``python -m turnstile.engine.worker``, started by the supervisor.

Its setup comes on standard input, its commands and its answers go over an inherited socket. It
ends when told, when the socket's other end is gone, and with its parent, whatever kills that.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec

from turnstile.engine.build import build_engine
from turnstile.engine.config import EngineConfig
from turnstile.engine.logs import ENGINE, Format, configure
from turnstile.engine.loop import StepLoop
from turnstile.engine.protocol import (
    PRELOAD,
    SUPERVISORS_SIGNALS,
    Control,
    EngineMessage,
    Failed,
    Loading,
    decode_commands,
    encode_message,
)
from turnstile.engine.wire import Channel
from turnstile.kernels import preload

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_OOM_SCORE, _MOST_OOM_SCORE = 500, 1000
_LOOK_AGAIN = 0.01
"""Seconds to wait for commands after a step in which nothing could run."""


class WorkerSetup(msgspec.Struct, kw_only=True):
    """What the supervisor tells a new engine on its standard input (JSON)."""

    config: dict[str, Any]
    epoch: int
    parent: int
    """The supervisor's process id."""
    socket: int
    """The inherited end of the socket pair, as a file descriptor."""
    log_level: int = logging.INFO
    log_format: Format = "auto"


def main() -> int:
    """Load the model, then step until told to stop; returns the exit code."""
    for number in SUPERVISORS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SUPERVISORS_SIGNALS)  # who came early is ignored too
    if PRELOAD in sys.argv:
        importlib.import_module("turnstile.engine.runner")
        preload()
    told = sys.stdin.buffer.read()
    if not told:
        return 0  # the server did not come up: a taken port, a missing model
    setup = msgspec.json.decode(told, type=WorkerSetup)
    _tie_to(setup.parent)
    _offer_to_oom_killer()
    configure(logging.getLevelName(setup.log_level), setup.log_format, process=ENGINE)
    end = socket.socket(fileno=setup.socket)
    end.set_inheritable(False)
    channel = Channel(end)

    def tell(message: EngineMessage) -> None:
        channel.send(encode_message(message))

    try:
        config = msgspec.convert(setup.config, EngineConfig)
        make_loop, info = build_engine(
            config,
            setup.epoch,
            lambda stage, fraction: tell(Loading(setup.epoch, stage, fraction)),
        )
    except Exception as error:
        tell(Failed(setup.epoch, _explain(error)))
        return 1
    loop = make_loop(tell)
    # Everything allocated so far lives as long as the process: keep the collector from scanning it.
    gc.collect()
    gc.freeze()
    tell(info)
    run(channel, loop)
    return 0


def run(channel: Channel, loop: StepLoop) -> None:
    """Apply what has come, step, and again; sleep while there is nothing to do. Returns when told
    to stop.
    """
    stuck = False
    while True:
        timeout = (_LOOK_AGAIN if stuck else 0) if loop.has_work else None
        for payload in channel.receive(timeout):
            for command in decode_commands(payload).commands:
                if isinstance(command, Control) and command.action == "stop":
                    return
                loop.apply(command)
        if loop.has_work:
            before = channel.num_sent
            loop.step()
            stuck = channel.num_sent == before


def _explain(error: Exception) -> str:
    """The error as a sentence for people; what nobody foresaw is logged with its traceback."""
    if isinstance(error, MemoryError):
        return "The memory is not enough to load the model. Free some, or serve a smaller one."
    foreseen = isinstance(error, ValueError | OSError)
    if foreseen or type(error).__module__.startswith("turnstile."):
        return str(error) or f"The engine could not start ({type(error).__name__})."
    logger.exception("The engine could not start")
    return f"The engine could not start ({type(error).__name__}: {error})."


def _tie_to(parent: int) -> None:
    """Die when the parent dies. Linux only; elsewhere the end of the socket tells, a step later."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we could say so
        os._exit(1)


def _offer_to_oom_killer(own: Path = Path("/proc/self/oom_score_adj")) -> None:
    """When memory runs out this process goes first: it can be replaced, the connections cannot.

    What is there is the API process's, inherited. A container may have set that high already: a
    fixed value could be lower.
    """
    try:
        inherited = int(own.read_text())
        own.write_text(str(min(_MOST_OOM_SCORE, inherited + _OOM_SCORE)))
    except (OSError, ValueError) as error:
        logger.debug("Cannot raise the OOM score: %s", error)


def _exit(code: int) -> None:
    # Not sys.exit: the teardown of compute libraries takes a while and has nothing to save.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        _exit(main())
    except EOFError:
        _exit(0)
    except BaseException:
        logging.getLogger(__name__).exception("The engine has failed")
        _exit(1)
