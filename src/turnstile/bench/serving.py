"""A server of our own, started for a measurement and stopped after it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

from turnstile.bench.client import ServerError, first_model
from turnstile.bench.http import Server

START_S = 300.0
STOP_S = 20.0


@contextlib.contextmanager
def started(arguments: Sequence[str]) -> Iterator[tuple[Server, int]]:
    """Run ``turnstile serve`` with these arguments on a free port; yields address and process id.

    Raises
    ------
    ServerError
        If it does not come up; the message ends with what it said last.
    """
    port = _free_port()
    command = [sys.executable, "-m", "turnstile", "serve", *arguments, "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            server = Server("127.0.0.1", port)
            if not _comes_up(process, server):
                log.seek(0)
                said = log.read().decode("utf-8", "replace").strip().splitlines()[-3:]
                raise ServerError("the server does not come up: " + " / ".join(said))
            yield server, process.pid
        finally:
            _stop(process)


def _comes_up(process: subprocess.Popen[bytes], server: Server) -> bool:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(ServerError, TimeoutError):
            asyncio.run(asyncio.wait_for(first_model(server), 10.0))
            return True
        time.sleep(0.1)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
            return


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
