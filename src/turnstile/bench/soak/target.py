"""The server under soak, as a process: started, watched, its engine killed. :class:`Target`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any, Self

import psutil

from turnstile.bench.http import Server
from turnstile.bench.soak.asking import ask

START_SECONDS = 180.0
FLAGS = {
    "num-pages": 64,
    "max-num-seqs": 16,
    "max-num-batched-tokens": 128,
    "max-model-len": 1024,
    "max-num-queued-reqs": 24,
    "stalled-reader-timeout": 10,
}
"""A pool for little more than one of the largest requests."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Bytes resident at a moment, in seconds from the beginning."""

    time: float
    api_bytes: int
    engine_bytes: int


@dataclass(slots=True)
class Kill:
    """One ``kill -9`` of the engine: when, and how long until the next was ready."""

    at: float
    seconds_down: float


@dataclass
class Target:
    """A server process. Use as a context manager."""

    model: str
    process: subprocess.Popen[bytes] = field(init=False)
    server: Server = field(init=False)
    readings: list[Reading] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile("w+b")
        flags = [part for name, value in FLAGS.items() for part in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "turnstile", "serve", self.model, "--port", "0", *flags]
        self.process = subprocess.Popen(
            [*command, "--disable-access-log"],
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            # Its requests may ask for faults: see turnstile.engine.faults.
            env={**os.environ, "TURNSTILE_FAULTS": "1"},
        )
        try:
            self.server = Server.parse(self._address())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.kill()  # the engine dies with it
        self.process.wait()
        self._log.close()

    def _address(self) -> str:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            found = re.search(r"Ready in .* at (\S+)", self.log)
            if found:
                return found.group(1)
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        raise RuntimeError(f"The server does not start.\n{self.log}")

    @property
    def log(self) -> str:
        """What the server has written so far."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode("utf-8", "replace")

    @property
    def alive(self) -> bool:
        """Whether the API process runs."""
        return self.process.poll() is None

    async def get(self, path: str) -> Any:
        """The JSON at a path."""
        answer = await ask(self.server, self.server.request("GET", path))
        assert answer is not None
        return answer.body

    async def metrics(self) -> dict[str, float]:
        """All samples of ``/metrics``, by name and labels as they stand there."""
        import urllib.request

        def read() -> str:
            url = f"http://{self.server.host}:{self.server.port}/metrics"
            with urllib.request.urlopen(url, timeout=30) as answer:
                text: str = answer.read().decode()
            return text

        lines = (await asyncio.to_thread(read)).splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and line[0] != "#")
        return {name: float(value) for name, value in pairs}

    # -- while it runs ----------------------------------------------------------------------------

    async def watch(self, began: float, interval: float) -> None:
        """Take readings until cancelled."""
        api = psutil.Process(self.process.pid)
        while self.alive:
            engine = self._engine(api)
            with contextlib.suppress(psutil.NoSuchProcess):  # killed just now
                self.readings.append(
                    Reading(
                        time.monotonic() - began,
                        api.memory_info().rss,
                        engine.memory_info().rss if engine is not None else 0,
                    )
                )
            await asyncio.sleep(interval)

    def _engine(self, api: psutil.Process) -> psutil.Process | None:
        for child in api.children():
            try:
                if "turnstile.engine.worker" in child.cmdline():
                    return child
            except psutil.NoSuchProcess:
                continue
        return None

    async def kill_engine(self, began: float) -> None:
        """``kill -9``, and wait until there is another."""
        engine = self._engine(psutil.Process(self.process.pid))
        if engine is None:
            raise RuntimeError("There is no engine to kill.")
        at = time.monotonic()
        engine.send_signal(signal.SIGKILL)
        while self.alive:
            told = await self.get("/server_info")
            if told["engine_state"] == "ready" and told["engine"]["pid"] != engine.pid:
                break
            await asyncio.sleep(0.05)
        self.kills.append(Kill(at - began, time.monotonic() - at))

    async def settle(self, seconds: float) -> dict[str, float]:
        """Wait until nobody is inside; the metrics then, or those at the end of patience."""
        end = time.monotonic() + seconds
        names = ("requests_running", "requests_waiting", "requests_in_flight")
        while True:
            metrics = await self.metrics()
            idle = not any(metrics[f"turnstile_{name}"] for name in names)
            if idle or time.monotonic() > end:
                return metrics
            await asyncio.sleep(0.2)
