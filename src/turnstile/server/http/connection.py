"""One connection of a client: :class:`Connection`, uvicorn's protocol where HTTP asks for more.

- A client that ends its side after its request (netcat does) has not left: it waits for the answer.
- HTTP/1.0 knows neither chunks nor interim answers: the end of the connection ends a stream.
- A request of HTTP/1.1 has one ``Host``.
- Where files run out, the last to come is told 503; the event loop alone would just close.
"""

from __future__ import annotations

import asyncio
import select
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from turnstile.server.errors import ApiError
from turnstile.server.http.direct import DIRECT, Direct
from turnstile.server.http.head_limits import BoundedHttpProtocol, RefusedError, closing_answer
from turnstile.server.http.open_files import OpenFiles
from turnstile.server.http.sse import COMMENT

_FIRST_LOOK = 0.02
_LAST_LOOK = 5.0
"""Seconds between two looks after a client that has ended its side; each is twice the last."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_LEAVING_SECONDS = 1.0
"""Seconds in which a client that is turned away may send its request and read why."""


class Connection(BoundedHttpProtocol):
    """One per connection. See the module."""

    def __init__(self, *arguments: Any, files: OpenFiles | None = None, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._files = files or OpenFiles()
        self._turned_away = False
        self._answering: RequestResponseCycle | None = None
        """The request that is being answered; ``cycle`` is the newest, which may wait behind it."""
        self._look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the client in, unless its connection is one of the last files there are."""
        super().connection_made(transport)
        number = transport.get_extra_info("socket").fileno()
        if not self._files.has_room_at(number):
            self._files.turn_away()
            self._turned_away = True
            self._stop_timer()
            self.loop.call_later(_LEAVING_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Parse; or, of who is turned away, wait for the beginning and read no more."""
        if not self._turned_away:
            super().data_received(data)
        elif not self._ending:
            # Not closed at once: with something unread it would be reset, and the answer be lost.
            self._ending = True
            self.transport.write(closing_answer(_no_file_left()))

    def on_headers_complete(self) -> None:
        """Look at what differs between the versions."""
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False
        elif sum(name == b"host" for name, _ in self.headers) != 1:
            self._refuse(400, "A request of HTTP/1.1 must have one Host header.")
            raise RefusedError
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        if cycle.scope["http_version"] == "1.0":
            app = _without_chunks(app, cycle)
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request that is being answered; uvicorn tells the newest one."""
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)
        cycle = self._answering
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            _direct(cycle).lost()

    def pause_writing(self) -> None:
        """The client does not read: what comes next has to wait."""
        super().pause_writing()
        if self._answering is not None:
            _direct(self._answering).update()

    def resume_writing(self) -> None:
        """It reads again."""
        super().resume_writing()
        if self._answering is not None:
            _direct(self._answering).update()

    # -- clients that have ended their side -----------------------------------------------------

    def eof_received(self) -> bool:  # type: ignore[override]
        """Nothing more will come. Stay while something that was asked in full has no answer."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and cycle.more_body and self.pipeline:
            self.pipeline.popleft()  # the newest, which will never be complete
            cycle = self.pipeline[0][0] if self.pipeline else self._answering
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        cycle.keep_alive = False
        self._look = self.loop.call_later(_FIRST_LOOK, self._look_after, _FIRST_LOOK)
        return True

    def _look_after(self, interval: float) -> None:
        """Find out whether the client is still there, and look again later.

        Reading cannot tell any more. But who has closed the connection altogether, and not just
        one side of it, answers whatever is sent with a reset.
        """
        if self.transport.is_closing():
            return
        if not self._is_gone():
            self._say_something()
        if self._is_gone():
            self.transport.abort()
            return
        interval = min(2 * interval, _LAST_LOOK)
        self._look = self.loop.call_later(interval, self._look_after, interval)

    def _is_gone(self) -> bool:
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), 0)
        return bool(poll.poll(0))  # a hang-up or an error: both sides are closed

    def _say_something(self) -> None:
        """Send what means nothing, where the answer has a place for it."""
        cycle = self._answering
        if cycle is None or cycle.response_complete or self.transport.get_write_buffer_size():
            return
        if not cycle.response_started:
            if cycle.scope["http_version"] != "1.0":
                self.transport.write(_CONTINUE)
            return
        comment: bytes = cycle.scope.get(COMMENT, b"")  # type: ignore[assignment]
        if comment:
            chunk = b"%x\r\n%b\r\n" % (len(comment), comment)
            self.transport.write(chunk if cycle.chunked_encoding else comment)


def _no_file_left() -> ApiError:
    return ApiError(
        503, "The server has too many connections. Try again in a moment.",
        code="engine_overloaded", kind="overloaded", retry_after=1.0,
    )  # fmt: skip


def _direct(cycle: RequestResponseCycle) -> Direct:
    direct: Direct = cycle.scope[DIRECT]  # type: ignore[literal-required]
    return direct


def _without_chunks(app: Any, cycle: RequestResponseCycle) -> Any:
    """``app`` for a client of HTTP/1.0: what has no length of its own ends with the connection."""

    async def plain(scope: Any, receive: Any, send: Any) -> None:
        sized = True

        async def send_plain(message: Any) -> None:
            nonlocal sized
            if message["type"] == "http.response.start":
                sized = any(name.lower() == b"content-length" for name, _ in message["headers"])
                if not sized:
                    cycle.chunked_encoding = False
            elif not sized:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return plain
