"""What a server's processes take while they are measured: CPU seconds and memory.

Memory is the proportional set size (PSS): pages that processes share are counted once in their
sum, where the resident sizes would count them in each.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import psutil

INTERVAL_S = 1.0  # reading the PSS of a gigabyte costs milliseconds of the CPU being measured


class NoProcessError(ValueError):
    """The process to watch is not there."""


_GONE = (psutil.NoSuchProcess, psutil.AccessDenied)


class ProcessTree:
    """Watches a process and its descendants.

    Parameters
    ----------
    pid
        The server's first process. Its own CPU time counts as that of the HTTP side (where the
        engine is a process of its own).

    Raises
    ------
    NoProcessError
        If there is no such process.
    """

    def __init__(self, pid: int) -> None:
        try:
            self._root = psutil.Process(pid)
        except psutil.NoSuchProcess:
            raise NoProcessError(f"there is no process {pid} to watch (--server-pid)") from None
        self._before: dict[int, float] = {}
        self._after: dict[int, float] = {}
        self._peak = 0

    async def watch(self) -> None:
        """Sample until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.sample()

    def start(self) -> None:
        """Begin a repetition: CPU time counts from here."""
        self._peak = 0
        self._after = {}
        self._before = dict(self._cpu())
        self.sample()

    def sample(self) -> None:
        """Note CPU time and memory as they are now."""
        self._after.update(self._cpu())
        total = 0
        for process in self._all():
            with contextlib.suppress(*_GONE):
                total += process.memory_full_info().pss
        self._peak = max(self._peak, total)

    def figures(self, output_tokens: int) -> dict[str, Any]:
        """CPU seconds since :meth:`start` and the peak of memory, after a last sample."""
        self.sample()
        spent = {p: t - self._before.get(p, 0.0) for p, t in self._after.items()}
        api = spent.get(self._root.pid, 0.0)
        return {
            "cpu_s": sum(spent.values()),
            "api_cpu_s": api,
            "api_us_per_token": 1e6 * api / output_tokens if output_tokens else None,
            "pss_peak_mb": self._peak / 1e6,
        }

    def _cpu(self) -> Iterator[tuple[int, float]]:
        for process in self._all():
            with contextlib.suppress(*_GONE):
                times = process.cpu_times()
                yield process.pid, times.user + times.system

    def _all(self) -> list[psutil.Process]:
        try:
            return [self._root, *self._root.children(recursive=True)]
        except _GONE:
            return []
