"""Telling systemd how we are (``Type=notify``); nothing happens where it does not ask."""

from __future__ import annotations

import contextlib
import os
import socket


def watched() -> bool:
    """Whether systemd wants to hear ``WATCHDOG=1`` from us (``WatchdogSec=`` in the unit)."""
    meant = os.environ.get("WATCHDOG_PID", str(os.getpid()))
    return "WATCHDOG_USEC" in os.environ and meant == str(os.getpid())


def notify(state: str) -> None:
    """Send a state such as ``READY=1`` or ``STOPPING=1``."""
    path = os.environ.get("NOTIFY_SOCKET")
    if not path:
        return
    if path.startswith("@"):
        path = "\0" + path[1:]
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as target,
    ):
        target.sendto(state.encode(), path)
