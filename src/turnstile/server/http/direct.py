"""What a request of our own server can do without ASGI: :class:`Direct`."""

from __future__ import annotations

from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

DIRECT = "turnstile.direct"
"""Where a request's scope holds its :class:`Direct`, if the server made one."""


class Direct:
    """The way around ASGI's ``receive`` and ``send`` where they would not wait.

    Both are coroutines that take or make a dictionary. To read a body that is there already, to
    hear that the client has left, and to write a piece to one that reads takes a task or a timer,
    a switch to it and back, and all their objects; without them each is a line or two. Whatever
    would wait goes through ASGI, which does the same.

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
        """The whole body, where it has come; None where some of it, or a word to the client that
        waits for one, is still missing.
        """
        cycle = self._cycle
        if cycle.more_body or cycle.waiting_for_100_continue or cycle.disconnected:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        cycle.message_event.clear()
        return body

    def when_lost(self, call: Callable[[], object] | None) -> None:
        """Call this once when the client goes away before its answer is complete; at once where it
        has. None: nobody wants to know any more.
        """
        self._on_lost = call
        if call is None:
            return
        # The last piece of a large body stops the reading, and who is not read is not missed.
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
        """See whether it is :attr:`ready`: the answer began, or the client reads or does not."""
        cycle = self._cycle
        self.ready = (
            cycle.chunked_encoding is True
            and cycle.response_started
            and not cycle.response_complete
            and not cycle.disconnected
            and not cycle.flow.write_paused
        )

    def write(self, data: bytes) -> None:
        """Send a piece, not an empty one: byte for byte what ``send`` would write. It does nothing
        where the answer has ended, or the client gone, since :attr:`ready` was looked at.
        """
        cycle = self._cycle
        if not (cycle.disconnected or cycle.response_complete):
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
