"""Writing to a stream without awaiting anything: :class:`DirectWriter`."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

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
        """Send a piece, not an empty one; only while :attr:`ready`."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
