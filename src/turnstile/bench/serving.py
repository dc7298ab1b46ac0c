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
from collections.abc import Iterator, Sequence

from turnstile.bench.client import ServerError, wait_until_ready
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
            try:
                asyncio.run(_ready(process, server))
            except ServerError:
                log.seek(0)
                said = log.read().decode("utf-8", "replace").strip().splitlines()[-3:]
                raise ServerError("the server does not come up: " + " / ".join(said)) from None
            yield server, process.pid
        finally:
            _stop(process)


async def _ready(process: subprocess.Popen[bytes], server: Server) -> None:
    """Wait for it. Raises ServerError if it does not come up in time, or ends."""
    coming = asyncio.create_task(wait_until_ready(server, START_S))
    while process.poll() is None and not coming.done():
        await asyncio.sleep(0.1)
    if not coming.done():
        coming.cancel()
        raise ServerError(f"the server ended with {process.returncode}")
    await coming


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
