"""Virtual time for scripted servers: seconds pass at once, and every figure is exact.

The loop's clock moves on only where nothing is left to do, and then straight to the next timer.
Client and script share it, so a script that sleeps 10 ms between tokens gives gaps of exactly 10.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

import turnstile.bench.drive
import turnstile.bench.http

T = TypeVar("T")

SETTLE_S = 0.002  # real seconds in which bytes written to a socket must have come at the other end


class _Selector(selectors.DefaultSelector):
    now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        ready = super().select(SETTLE_S)
        if not ready:
            self.now += timeout
        return ready


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._own = _Selector()
        super().__init__(self._own)

    def time(self) -> float:
        return self._own.now


def run(monkeypatch: pytest.MonkeyPatch, work: Coroutine[Any, Any, T]) -> T:
    """Run it on virtual time, the load generator included."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        clock = SimpleNamespace(perf_counter=runner.get_loop().time)
        monkeypatch.setattr(turnstile.bench.drive, "time", clock)
        monkeypatch.setattr(turnstile.bench.http, "time", clock)
        return runner.run(work)
