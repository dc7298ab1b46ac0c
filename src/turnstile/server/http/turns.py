"""Requests one after another, with the sockets looked at between them: :class:`Turns`."""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """Lets one request into each turn of the event loop.

    Parsing a request, checking it and handing it to the engine takes a large part of a millisecond
    (several, for a large body), and awaits nothing. A hundred requests that arrive together would
    all run before the event loop reads another socket: the tokens of a step, or a probe, would wait
    for all of them, and a client that has left meanwhile would be served to the end. With one
    request a turn, each of these waits for one.
    """

    __slots__ = ("_taken", "_waiting")

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False
        """This turn has its request; :meth:`_next` is scheduled for the next turn."""

    async def wait(self) -> None:
        """Wait for a turn of one's own, first come first served. Returns at once where this turn
        is not taken yet.
        """
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
