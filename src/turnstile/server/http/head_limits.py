"""Bounds on what surrounds a body: uvicorn collects headers and trailers without end.

A head larger than :data:`MAX_HEAD_BYTES`, or of more lines than :data:`MAX_HEADERS`, is answered
431, one that does not arrive within :data:`HEAD_SECONDS` 408, trailers are dropped, and no
connection has more than :data:`MAX_PIPELINED` requests waiting. None of that reaches the
application. An upgrade to another protocol (``h2c``, ``websocket``) is not taken: RFC 9110,
section 7.8, lets a server answer in HTTP/1.1 as if the header were not there.

A refusal never stands where the answer to another request belongs: what was asked in full before
is answered first, and then the connection is closed.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from turnstile.server.errors import ApiError
from turnstile.server.http.direct import DIRECT, Direct

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 256
HEAD_SECONDS = 30.0
MAX_PIPELINED = 1000
"""Requests of a connection that may wait for the answers before theirs."""

_REASONS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


class RefusedError(Exception):
    """Raised in a callback, to stop the parser where it is."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Uvicorn's protocol with bounds. One per connection."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._in_head = True
        self._fruitless_bytes = 0
        """Bytes of the reads since anything but a line of a head or trailer was complete."""
        self._fruitful = False
        self._upgrading = False
        self._ending = False
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first head."""
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer with the connection."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, and count the reads that lie wholly in a head, a trailer or a chunk's size."""
        if self._ending:
            return
        self._unset_keepalive_if_required()
        self._fruitful = False
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            if not isinstance(error.__context__, RefusedError):
                self._refuse(400, "This is no valid HTTP request.")
            return
        if self._fruitful:
            self._fruitless_bytes = 0
            return
        self._fruitless_bytes += len(data)
        if self._fruitless_bytes > MAX_HEAD_BYTES:
            self._refuse_size()

    def _feed(self, data: bytes) -> None:
        rest = memoryview(data)
        while True:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
                if not self._upgrading:
                    return  # CONNECT, which is refused: nothing that follows is for this server
                self._upgrading = False
                self._replay_head()

    def _replay_head(self) -> None:
        """Have the head parsed again without its wish: the parser would take no body after it."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(b"\r\n".join(lines) + b"\r\n\r\n")

    # -- callbacks of the parser --------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Begin to count a head."""
        super().on_message_begin()
        self._in_head = self._fruitful = True
        self._start_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. After the head it is a trailer, which nobody here reads."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Take the head as complete; the body has bounds of its own."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            self._refuse_size()
            raise RefusedError
        if len(self.headers) > MAX_HEADERS:
            self._refuse(431, f"The request has more than {MAX_HEADERS} headers.")
            raise RefusedError
        if len(self.pipeline) >= MAX_PIPELINED:
            self._end()
            raise RefusedError
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._upgrading = True
            return
        super().on_headers_complete()
        # The application runs in a task that has not begun: it will find this in its scope.
        self.scope[DIRECT] = Direct(self.cycle)  # type: ignore[literal-required]
        self._in_head, self._fruitful = False, True
        self._stop_timer()

    def on_body(self, body: bytes) -> None:
        """Hand on a piece of the body."""
        self._fruitful = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request, unless its head is about to be parsed again."""
        self._fruitful = True
        if not self._upgrading:
            super().on_message_complete()

    # -- the ends of a connection -------------------------------------------------------------

    def _start_timer(self) -> None:
        if self._head_timer is None:
            loop = asyncio.get_running_loop()
            self._head_timer = loop.call_later(HEAD_SECONDS, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_timeout(self) -> None:
        self._head_timer = None
        if not self._in_head or self.transport.is_closing():
            return
        if self.headers is None:  # not a byte has come: a client that connected ahead of its needs
            self._end()
        else:
            self._refuse(408, f"The request's headers did not arrive within {HEAD_SECONDS:g} s.")

    def _refuse_size(self) -> None:
        self._refuse(431, f"The request's headers are larger than {MAX_HEAD_BYTES} bytes.")

    def _refuse(self, status: int, message: str) -> None:
        """Answer and close; only close where an answer of ours would be taken for another's."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        # Trailers too large belong to a request that may have been answered long ago.
        begun = cycle is not None and cycle.response_started
        answered = cycle is None or cycle.response_complete
        if answered if self._in_head else not (begun or self.pipeline):
            self.transport.write(closing_answer(ApiError(status, message)))
            self.transport.close()
        else:
            self._end()

    def _end(self) -> None:
        """Read no more, and close: at once, or after the answers to what was asked in full."""
        self._ending = True
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            self.transport.close()
        else:
            cycle.keep_alive = False


def closing_answer(error: ApiError) -> bytes:
    """An error as the last answer of a connection, byte by byte: no request has come to be one."""
    body = error.body()
    lines = [
        b"HTTP/1.1 %d %b" % (error.status, _REASONS[error.status]),
        b"content-type: application/json",
        b"content-length: %d" % len(body),
        b"connection: close",
        *(b"%b: %b" % header for header in error.headers()),
    ]
    return b"\r\n".join((*lines, b"", body))
