"""Requests one after another, with the sockets looked at between them: :class:`Turns`."""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """Lets one request into each turn of the event loop.

    To parse a request, check it and hand it to the engine takes a large part of a millisecond, or
    several where its body is large, and nothing of it is awaited. A hundred that arrive together
    would all run before anything else is heard: a step's tokens would wait for all of them, and so
    would a probe, and a client that has left meanwhile would be served to the end. One a turn,
    each of these waits for one request.
    """

    __slots__ = ("_taken", "_waiting")

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False
        """Somebody runs in this turn, and :meth:`_next` in the next."""

    async def wait(self) -> None:
        """Wait for a turn of one's own: not at all where nobody has taken this one. In order."""
        loop = asyncio.get_running_loop()
        if not self._taken:
            self._taken = True
            loop.call_soon(self._next)
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self) -> None:
        """Let in the next one that still waits. It runs in the turn after this callback's."""
        waiting = self._waiting
        while waiting and waiting[0].done():  # cancelled
            waiting.popleft()
        self._taken = bool(waiting)
        if waiting:
            waiting.popleft().set_result(None)
            asyncio.get_running_loop().call_soon(self._next)
