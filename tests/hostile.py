"""A machine that gets in the way, for tests that must not notice: ``pytest --hostile=stop|lag``.

``stop``: one process under test after the other stands still for a moment, as on a machine that
has no CPU for it. ``lag``: the test itself is late, before and after each request, connection,
sleep and signal; that is what an engine many times as fast looks like. Neither is part of a usual
run: what fails under them has a race.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import psutil
import pytest

PAUSE, STOP = (0.02, 0.25), (0.03, 0.4)
"""Seconds between two stops, and of one: less than any watchdog under test allows."""
LAG, HOW_OFTEN = 0.3, 0.3

_sleep, _kill = time.sleep, os.kill


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--hostile", choices=("stop", "lag"), help="see tests/hostile.py")


def pytest_configure(config: pytest.Config) -> None:
    how = config.getoption("--hostile")
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        return  # the children of this process are those of xdist
    if how == "stop":
        _stop_somebody()
    elif how == "lag":
        _be_late()


def _stop_somebody() -> None:
    """Stop and continue children of this process at random, but none that a test has stopped."""
    held: set[int] = set()

    def kill(pid: int, number: int) -> None:
        if number == signal.SIGSTOP:
            held.add(pid)
        elif number == signal.SIGCONT:
            held.discard(pid)
        _kill(pid, number)

    def run() -> None:
        me = psutil.Process()
        while True:
            _sleep(random.uniform(*PAUSE))
            children = [each.pid for each in me.children(recursive=True) if each.pid not in held]
            if not children:
                continue
            pid = random.choice(children)
            try:
                _kill(pid, signal.SIGSTOP)
                _sleep(random.uniform(*STOP))
                if pid not in held:
                    _kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                continue

    setattr(os, "kill", kill)  # noqa: B010 - mypy forbids the assignment
    threading.Thread(target=run, daemon=True).start()


def _late() -> float:
    return random.uniform(0, LAG) if random.random() < HOW_OFTEN else 0.0


def _be_late() -> None:
    """Let what a test does to the outside begin and end later."""

    def late(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            _sleep(_late())
            try:
                return call(*arguments, **named)
            finally:
                _sleep(_late())

        return called

    def late_task(call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def called(*arguments: Any, **named: Any) -> Any:
            await asyncio.sleep(_late())
            return await call(*arguments, **named)

        return called

    for owner, name in ((httpx.Client, "send"), (socket, "create_connection"), (os, "kill")):
        setattr(owner, name, late(getattr(owner, name)))
    for owner, name in ((httpx.AsyncClient, "send"), (asyncio, "open_connection")):
        setattr(owner, name, late_task(getattr(owner, name)))
    setattr(time, "sleep", late(_sleep))  # noqa: B010
