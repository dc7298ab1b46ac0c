"""One HTTP request and its answer: :class:`Exchange`.

A thin layer over ASGI for the routes where time counts. A streaming answer writes straight to
the transport while the client keeps up, and to the server's ``send`` where it must wait: no
response object, no middleware and no task sits between a token and the socket. When the client goes
away the handler is cancelled, whatever it is doing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import Any

import msgspec

from turnstile.server.errors import ApiError, Headers
from turnstile.server.http.body import BodyLimits, too_large
from turnstile.server.http.direct import DIRECT, Direct
from turnstile.server.http.sse import COMMENT, KEEP_ALIVE
from turnstile.server.tenants import Tenant

JSON = b"application/json"
EVENT_STREAM = b"text/event-stream; charset=utf-8"
_MAX_REQUEST_ID = 128
_MOST_DISCARDED = 64 * 2**20
_DISCARD_SECONDS = 5.0


class Exchange:
    """An HTTP request on its way.

    Attributes
    ----------
    id
        The request id: the client's ``x-request-id``, or ours.
    started
        ``time.monotonic()`` at arrival.
    tenant
        Who is calling, once known.
    status
        Of the answer; 0 before its start, 499 where the client left before it.
    notes
        What the access log should say beside the usual: token counts, the finish reason.
    complete
        The last piece of the answer is on its way; nothing may follow.
    write_began
        When the write in progress began, None between writes: a reader that stalls shows here.
    last_write
        When bytes last went out.
    direct
        The way around ASGI for what need not wait; None where the server has none.
    """

    __slots__ = (
        "_body_comes",
        "_body_wanted",
        "_headers",
        "_held",
        "_limits",
        "_receive",
        "_send",
        "_watcher",
        "common_headers",
        "complete",
        "direct",
        "disconnected",
        "id",
        "last_write",
        "notes",
        "scope",
        "started",
        "status",
        "tenant",
        "write_began",
    )

    def __init__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.scope = scope
        # In ASGI their names are lower case. Of equal ones the first counts.
        self._headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        self._receive = receive
        self._body_comes = True
        self._body_wanted = False
        self._limits: BodyLimits | None = None
        self._held = 0
        self._send = send
        self._watcher: asyncio.Task[None] | None = None
        self.direct: Direct | None = scope.get(DIRECT)
        self.id = _request_id(self.header(b"x-request-id"))
        self.started = time.monotonic()
        self.common_headers: Headers = [(b"x-request-id", self.id.encode())]
        self.tenant = Tenant("default")
        self.status = 0
        self.notes: dict[str, object] = {}
        self.disconnected = False
        self.complete = False
        self.write_began: float | None = None
        self.last_write = self.started

    @property
    def method(self) -> str:
        """The verb, in capitals."""
        return str(self.scope["method"])

    @property
    def path(self) -> str:
        """The path, without the query."""
        return str(self.scope["path"])

    def header(self, name: bytes) -> bytes | None:
        """The first value of a request header (lower-case name)."""
        return self._headers.get(name)

    # -- the request ------------------------------------------------------------------------

    async def json_body(self, limits: BodyLimits) -> bytes:
        """The whole body, for a route that takes JSON and nothing else, when it is its turn to be
        parsed. From now on the calling task is cancelled when the client goes away.

        Raises
        ------
        ApiError
            415 for another type, 413 for a body that is too large (known from Content-Length
            before a byte is read, or counted), 408 for a client that is too slow, 503 where
            other uploads have taken the memory.

        Its bytes count as held until :meth:`release_body`, which the end of the exchange calls at
        the latest. A body that has been read waits for a thread next; if it stopped counting
        already, more bodies could be read into memory meanwhile.
        """
        coding = self.header(b"content-encoding")
        if coding not in (None, b"", b"identity"):
            raise ApiError(415, "Compressed request bodies are not taken; send it as it is.")
        kind = (self.header(b"content-type") or b"").partition(b";")[0].strip().lower()
        if kind != JSON and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
            raise ApiError(415, "Send the body as JSON, with 'Content-Type: application/json'.")
        declared = self.header(b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > limits.one:
            raise too_large(limits.one)
        self._limits, self._body_wanted = limits, True
        body = None if self.direct is None else self.direct.take_body()
        if body is not None:
            self._body_comes = False
            self._hold(body, limits)
        else:
            body = await self._read_in_time(limits)
        self.watch()
        await limits.turns.wait()
        return body

    async def _read_in_time(self, limits: BodyLimits) -> bytes:
        try:
            async with asyncio.timeout(limits.seconds):
                return await self._read(limits)
        except TimeoutError:
            raise ApiError(
                408,
                f"The request body did not arrive within {limits.seconds:g} seconds.",
                headers=[(b"connection", b"close")],
            ) from None

    async def _read(self, limits: BodyLimits) -> bytes:
        pieces: list[bytes] = []
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.disconnected = True
                raise asyncio.CancelledError
            piece = message.get("body", b"")
            self._body_comes = message.get("more_body", False)
            self._hold(piece, limits)
            pieces.append(piece)
            if not self._body_comes:
                return b"".join(pieces)

    def _hold(self, piece: bytes, limits: BodyLimits) -> None:
        limits.take(len(piece), self._held + len(piece), self.tenant.name)
        self._held += len(piece)

    def release_body(self) -> None:
        """The request's body, and what was made of it, is no longer in memory."""
        if self._limits is not None:
            self._limits.give_back(self._held, self.tenant.name)
            self._held = 0

    def watch(self) -> None:
        """Cancel the calling task when the client goes away. The body must have been read."""
        task = asyncio.current_task()
        assert task is not None

        def leave() -> None:
            self.disconnected = True
            task.cancel()

        async def wait() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            leave()

        if self.direct is not None:
            self.direct.when_lost(leave)
        else:
            self._watcher = asyncio.get_running_loop().create_task(wait())

    def unwatch(self) -> None:
        """Stop watching: the answer is complete."""
        if self.direct is not None:
            self.direct.when_lost(None)
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None

    # -- the answer -------------------------------------------------------------------------

    async def respond(
        self,
        body: bytes,
        status: int = 200,
        content_type: bytes = JSON,
        headers: Headers | None = None,
    ) -> None:
        """Answer in one piece."""
        self.unwatch()
        head: Headers = []
        if status != 204:
            head = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
        head += headers or []
        if self._waits_to_send:
            # The client may send its body or not: what follows could be the body or a new request.
            head.append((b"connection", b"close"))
        elif status >= 400 and self._closes:
            await self._discard_body()
        await self._start(status, head)
        await self._send({"type": "http.response.body", "body": body})

    @property
    def _waits_to_send(self) -> bool:
        """Whether the client holds its body back until it is asked for, and it never was."""
        expects = (self.header(b"expect") or b"").lower() == b"100-continue"
        return expects and not self._body_wanted and self.scope.get("http_version") != "1.0"

    @property
    def _closes(self) -> bool:
        """Whether the connection ends with this answer, because the client said so."""
        wish = (self.header(b"connection") or b"").lower()
        return wish == b"close" or (self.scope.get("http_version") == "1.0" and not wish)

    async def _discard_body(self) -> None:
        """Read what is still coming: a connection that is closed with data unread is reset, and
        the client would see the reset instead of the refusal. Bounded in bytes and in time.
        """
        left = _MOST_DISCARDED
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DISCARD_SECONDS):
                while self._body_comes and left > 0:
                    message = await self._receive()
                    self._body_comes = message.get("more_body", False)
                    left -= len(message.get("body", b""))

    async def respond_json(self, value: object, status: int = 200) -> None:
        """Answer with ``value`` as JSON."""
        await self.respond(msgspec.json.encode(value), status)

    async def start_stream(self) -> None:
        """Send the head of an event stream."""
        self.scope[COMMENT] = KEEP_ALIVE
        await self._start(
            200,
            [
                (b"content-type", EVENT_STREAM),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
            ],
        )
        if self.direct is not None:
            self.direct.update()

    async def write(self, data: bytes, now: float) -> None:
        """Send a piece of a stream. Returns at once unless the client has stopped reading."""
        self.write_began = now
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self.write_began = None
        self.last_write = now

    async def keep_alive(self, comment: bytes, now: float) -> None:
        """Send a comment, unless the stream has ended meanwhile."""
        if not self.complete:
            await self.write(comment, now)

    async def end_stream(self, data: bytes = b"") -> None:
        """Send the last piece."""
        self.unwatch()
        self.complete = True
        if self.direct is not None:
            self.direct.ready = False
        await self._send({"type": "http.response.body", "body": data})

    async def _start(self, status: int, headers: Headers) -> None:
        self.status = status
        milliseconds = (time.monotonic() - self.started) * 1000
        headers += [(b"openai-processing-ms", b"%d" % milliseconds), *self.common_headers]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


def _request_id(given: bytes | None) -> str:
    """The client's id where it is short and printable, else one of ours."""
    if given and len(given) <= _MAX_REQUEST_ID and all(33 <= byte < 127 for byte in given):
        return given.decode("ascii")
    return f"req-{os.urandom(16).hex()}"
