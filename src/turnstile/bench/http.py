"""The least HTTP/1.1 client that can time a stream.

The generator shares the machine with the server it measures, so while a request runs it only
notes when bytes came: the framing is followed just far enough to know where an answer ends (the
connection is then used again), and everything else is read after the run.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from enum import Enum, auto
from typing import cast
from urllib.parse import urlsplit

MAX_HEAD = 65536
_HEX_DIGITS = re.compile(rb"[0-9A-Fa-f]{1,16}")


class UrlError(ValueError):
    """This URL cannot be measured; the message says why."""


class BrokenResponseError(Exception):
    """The bytes are not an HTTP/1.1 answer, or the connection ended inside one."""


class _Part(Enum):
    HEAD = auto()
    SIZED = auto()
    CHUNK_SIZE = auto()
    CHUNK = auto()
    TRAILER = auto()
    UNTIL_CLOSE = auto()
    DONE = auto()


class Response:
    """One answer as it comes in.

    Attributes
    ----------
    status
        HTTP status; 0 until the head is complete.
    keep_alive
        Whether the connection may be used again.
    pieces
        Body bytes without framing, each with the moment (``time.perf_counter``) of the read that
        brought them.
    """

    __slots__ = ("_buffer", "_left", "_part", "keep_alive", "pieces", "status")

    def __init__(self) -> None:
        self.status = 0
        self.keep_alive = True
        self.pieces: list[tuple[float, bytes]] = []
        self._buffer = b""
        self._part = _Part.HEAD
        self._left = 0  # bytes still to come: of a sized body, or of a chunk and its line end

    @property
    def begun(self) -> bool:
        """Whether any byte of it has come."""
        return bool(self.status or self._buffer)

    @property
    def body(self) -> bytes:
        """All body bytes so far."""
        return b"".join(piece for _, piece in self.pieces)

    def feed(self, now: float, data: bytes) -> bool:
        """Take what one read brought; returns whether the answer is complete.

        Raises
        ------
        BrokenResponseError
            If it cannot be an HTTP/1.1 answer.
        """
        if self._part is _Part.CHUNK_SIZE and not self._buffer and (piece := _one_chunk(data)):
            self.pieces.append((now, piece))
            return False
        self._buffer = self._buffer + data if self._buffer else data
        body: list[bytes] = []
        while self._part is not _Part.DONE and self._step(body):
            pass
        if body:
            self.pieces.append((now, body[0] if len(body) == 1 else b"".join(body)))
        return self._part is _Part.DONE

    def end(self) -> bool:
        """The server closed; returns whether that ends the answer properly."""
        return self._part is _Part.UNTIL_CLOSE

    def _step(self, body: list[bytes]) -> bool:
        """Read one part of the buffer; False if it needs more bytes."""
        if self._part is _Part.CHUNK_SIZE:
            return self._read_chunk_size()
        if self._part is _Part.HEAD:
            return self._read_head()
        if self._part is _Part.TRAILER:
            return self._read_trailer()
        if not self._buffer:
            return False
        if self._part is _Part.UNTIL_CLOSE:
            body.append(self._buffer)
            self._buffer = b""
            return False
        self._read_sized(body)
        return True

    def _read_sized(self, body: list[bytes]) -> None:
        data, self._buffer = self._buffer[: self._left], self._buffer[self._left :]
        chunked = self._part is _Part.CHUNK
        keep = min(len(data), max(self._left - 2, 0)) if chunked else len(data)
        if keep:
            body.append(data[:keep])
        self._left -= len(data)
        if self._left == 0:
            self._part = _Part.CHUNK_SIZE if chunked else _Part.DONE

    def _read_chunk_size(self) -> bool:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            return False
        digits = self._buffer[:end].split(b";", 1)[0].strip()
        if not _HEX_DIGITS.fullmatch(digits):  # int() would take -1, and the answer never end
            raise BrokenResponseError("a chunk of the answer has no size")
        size = int(digits, 16)
        self._buffer = self._buffer[end + 2 :]
        self._part = _Part.CHUNK if size else _Part.TRAILER
        self._left = size + 2
        return True

    def _read_trailer(self) -> bool:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            return False
        if end == 0:
            self._part = _Part.DONE
        self._buffer = self._buffer[end + 2 :]
        return True

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD:
                raise BrokenResponseError("the head of the answer does not end")
            return False
        lines = self._buffer[:end].split(b"\r\n")
        self._buffer = self._buffer[end + 4 :]
        fields = {}
        for line in lines[1:]:
            name, _, value = line.partition(b":")
            fields[name.lower()] = value.strip().lower()
        try:
            version, status = lines[0].split(b" ")[:2]
            self.status = int(status)
            length = int(fields.get(b"content-length", b"-1"))
        except ValueError:
            raise BrokenResponseError("not an HTTP answer") from None
        self.keep_alive = version == b"HTTP/1.1" and fields.get(b"connection") != b"close"
        if fields.get(b"transfer-encoding") == b"chunked":
            self._part = _Part.CHUNK_SIZE
        elif length >= 0:
            self._part, self._left = (_Part.SIZED, length) if length else (_Part.DONE, 0)
        else:
            self._part, self.keep_alive = _Part.UNTIL_CLOSE, False
        return True


def _one_chunk(data: bytes) -> bytes | None:
    """What is in ``data`` where that is one whole chunk and nothing else, as nearly every read of
    a stream is; None where it is anything else, the last chunk (which is empty) included.
    """
    end = data.find(b"\r\n")
    digits = data[:end]
    if end < 1 or len(data) < end + 5 or not _HEX_DIGITS.fullmatch(digits):
        return None
    return data[end + 2 : -2] if int(digits, 16) == len(data) - end - 4 else None


@dataclass(frozen=True, slots=True)
class Server:
    """Where the server is, and what goes into every request's head."""

    host: str
    port: int
    path: str = ""
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> Server:
        """Read a base URL such as ``http://127.0.0.1:8000``; a final ``/v1`` is dropped.

        Raises
        ------
        UrlError
            If it is not a plain http URL: TLS would cost the generator CPU time it must not take.
        """
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port or 80
        except ValueError as error:  # a port that is none, half of an IPv6 address
            raise UrlError(f"{url!r} is no URL: {error}") from None
        if parts.scheme != "http" or not parts.hostname:
            raise UrlError(f"{url!r} is not an http:// URL; the load generator speaks no TLS")
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port, path, api_key)

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of one request."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"{method} {self.path}{path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


class Connection(asyncio.Protocol):
    """One connection, which carries one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._response: Response | None = None
        self._done: asyncio.Future[None] | None = None
        self.open = False
        self.used = False  # whether it has carried a whole answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.open = True

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._response is None or self._done is None or self._done.done():
            self.close()  # bytes nobody asked for
            return
        try:
            complete = self._response.feed(now, data)
        except BrokenResponseError as error:
            self.close()
            self._done.set_exception(error)
            return
        if complete:
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        if self._done is None or self._done.done() or self._response is None:
            return
        if exc is None and self._response.end():
            self._done.set_result(None)
        else:
            inside = "inside" if self._response.status else "before"
            why = "" if exc is None else f" ({exc})"
            self._done.set_exception(
                BrokenResponseError(f"connection closed {inside} the answer{why}")
            )

    def close(self) -> None:
        """Drop the connection, and with it what the server still does for us."""
        self.open = False
        if self._transport is not None:
            self._transport.abort()

    async def send(self, request: bytes, response: Response) -> None:
        """Send a request and wait until `response` is complete.

        Raises
        ------
        BrokenResponseError
            If the connection ends before, or what comes is no answer.
        """
        if self._transport is None or not self.open:
            raise BrokenResponseError("connection closed before the request")
        self._response = response
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        except asyncio.CancelledError:
            self.close()
            raise
        if not response.keep_alive:
            self.close()


class Pool:
    """Connections to one server, used again as long as both sides keep them open."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._idle: list[Connection] = []

    async def send(self, request: bytes, response: Response) -> None:
        """Send a request on an idle connection, or on a new one.

        Raises
        ------
        OSError
            If the server cannot be reached.
        BrokenResponseError
            As :meth:`Connection.send`.
        """
        connection = await self._take()
        kept = connection.used
        try:
            await connection.send(request, response)
        except BrokenResponseError:
            if not kept or response.begun:
                raise
            # The server closed an idle connection just now: not a fault of the request.
            connection = await self._connect()
            await connection.send(request, response)
        connection.used = True
        if connection.open:
            self._idle.append(connection)

    async def _take(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        return await self._connect()

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(Connection, self.server.host, self.server.port)
        return made

    def close(self) -> None:
        """Close all idle connections."""
        while self._idle:
            self._idle.pop().close()
