"""What a request of our own server can do without ASGI: :class:`Direct`."""

from __future__ import annotations

from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

DIRECT = "turnstile.direct"
"""Where a request's scope holds its :class:`Direct`, if the server made one."""


class Direct:
    """The way around ASGI's ``receive`` and ``send`` where they would not wait.

    Both are coroutines that pass dictionaries. Through them, reading a body that has arrived,
    noticing that the client has left and writing to a client that reads each cost a task or a timer
    and a switch to it and back. Here each is a line or two. Whatever has to wait still goes through
    ASGI; the bytes on the wire are the same.

    Attributes
    ----------
    ready
        Whether :meth:`write` may be called: the body has begun, in chunks, the client is there and
        reads, and more may follow.
    """

    __slots__ = ("_cycle", "_on_lost", "_transport", "ready")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._on_lost: Callable[[], object] | None = None
        self.ready = False

    # -- the request --------------------------------------------------------------------------

    def take_body(self) -> bytes | None:
        """The whole body, if all of it has arrived; None if not, or if the client waits for a
        ``100 Continue`` before it sends any.
        """
        cycle = self._cycle
        if cycle.more_body or cycle.waiting_for_100_continue or cycle.disconnected:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        cycle.message_event.clear()
        return body

    def when_lost(self, call: Callable[[], object] | None) -> None:
        """Call ``call`` once when the client goes away before its answer is complete (at once, if
        it has gone already). None withdraws the wish.
        """
        self._on_lost = call
        if call is None:
            return
        # uvicorn pauses reading when a large body fills its buffer, and while reading is paused the
        # end of the connection is not noticed.
        self._cycle.flow.resume_reading()
        if self._cycle.disconnected:
            self.lost()

    def lost(self) -> None:
        """The connection is gone, and the answer not complete."""
        self.ready = False
        call, self._on_lost = self._on_lost, None
        if call is not None:
            call()

    # -- the answer ---------------------------------------------------------------------------

    def update(self) -> None:
        """Set :attr:`ready` anew: the answer has begun, or the client has stopped or resumed
        reading.
        """
        cycle = self._cycle
        self.ready = (
            cycle.chunked_encoding is True
            and cycle.response_started
            and not cycle.response_complete
            and not cycle.disconnected
            and not cycle.flow.write_paused
        )

    def write(self, data: bytes) -> None:
        """Send a piece, which must not be empty, as the bytes that ``send`` would write. Does
        nothing if the answer has ended or the client has gone since :attr:`ready` was read.
        """
        cycle = self._cycle
        if not (cycle.disconnected or cycle.response_complete):
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
