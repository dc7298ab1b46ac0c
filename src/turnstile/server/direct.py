"""Writing to streams without awaiting anything: :class:`DirectWriter`, :class:`Outbox`."""

from __future__ import annotations

import asyncio
import logging

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

logger = logging.getLogger("turnstile.server")

WRITER = "turnstile.writer"
"""Where a request's scope holds its :class:`DirectWriter`, if the server made one."""


class DirectWriter:
    """The way around ASGI's ``send`` for pieces of a body that has begun.

    ``send`` is a coroutine that takes a dictionary, so a piece costs a task, a switch to it and
    back, and both objects. Nearly always it returns at once, and then all it has done is write one
    chunk to the transport. That chunk, byte for byte, is what :meth:`write` writes. Wherever
    ``send`` would wait or do something else, :attr:`ready` is False and the caller awaits it.
    """

    __slots__ = ("_cycle", "_flow", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport

    @property
    def ready(self) -> bool:
        """The body has begun, in chunks, the client is there and reads, and more may follow."""
        cycle = self._cycle
        return (
            not self._flow.write_paused
            and not cycle.disconnected
            and cycle.response_started
            and not cycle.response_complete
            and cycle.chunked_encoding is True
        )

    def write(self, data: bytes) -> None:
        """Send a piece, not an empty one, for which it was :attr:`ready`."""
        cycle = self._cycle
        if not (cycle.disconnected or cycle.response_complete):
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class Outbox:
    """What one step has for all streams, written when the last of it is made.

    A write costs more than all that comes before it, most of it in the kernel: the processor does
    a hundred of them in a row faster than each between two stretches of Python, and a client that
    reads many streams is woken once instead of a hundred times.

    It empties itself in the same turn of the event loop. Whoever writes to one of these streams
    another way empties it first, so that the order stays right.
    """

    __slots__ = ("_pieces",)

    def __init__(self) -> None:
        self._pieces: list[tuple[DirectWriter, bytes]] = []

    def add(self, writer: DirectWriter, data: bytes) -> None:
        """Write ``data`` soon; ``writer`` is ready."""
        if not self._pieces:
            asyncio.get_running_loop().call_soon(self.flush)
        self._pieces.append((writer, data))

    def flush(self) -> None:
        """Write what there is."""
        pieces, self._pieces = self._pieces, []
        for writer, data in pieces:
            try:
                writer.write(data)
            except Exception:
                # Whatever is wrong with this connection, the others' pieces must get out.
                logger.exception("A piece of a stream could not be written")
