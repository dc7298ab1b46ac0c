"""One request over a socket of its own, with the manners of its user: :func:`ask`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass, field
from typing import Any

import msgspec

from turnstile.bench.http import BrokenResponseError, Response, Server

PATIENCE = 240.0
"""Seconds after which an answer counts as not given."""


class NoAnswerError(Exception):
    """What should have been answered was not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manners:
    """How a user reads.

    Attributes
    ----------
    leave_after
        Reads after which the user is gone; None stays to the end.
    pause
        Seconds between two reads of at most a kilobyte; 0 reads as fast as it comes.
    """

    leave_after: int | None = None
    pause: float = 0.0


PATIENT = Manners()


@dataclass(slots=True)
class Answer:
    """What came back: a status, and the JSON of the body or of each event."""

    status: int
    retry_after: bool = False
    body: Any = None
    events: list[dict[str, Any]] = field(default_factory=list)
    done: int = 0
    trailing: bool = False
    """Something came after the end of the stream."""


async def ask(server: Server, request: bytes, manners: Manners = PATIENT) -> Answer | None:
    """Send raw bytes and read the answer; None for a user who left.

    Raises
    ------
    NoAnswerError
        The connection ended before the answer did, or nothing came for too long.
    """
    reader, writer = await _connect(server, manners)
    try:
        writer.write(request)
        async with asyncio.timeout(PATIENCE):
            raw = await _read(reader, manners)
        return None if raw is None else _understand(raw)
    except (TimeoutError, OSError, BrokenResponseError) as error:
        raise NoAnswerError(f"{type(error).__name__}: {error}") from None
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _connect(
    server: Server, manners: Manners
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if not manners.pause:
        return await asyncio.open_connection(server.host, server.port)
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.setblocking(False)
    await asyncio.get_running_loop().sock_connect(slow, (server.host, server.port))
    return await asyncio.open_connection(sock=slow, limit=1024)


async def _read(reader: asyncio.StreamReader, manners: Manners) -> bytes | None:
    response, raw, reads = Response(), b"", 0
    while True:
        if manners.leave_after is not None and reads >= manners.leave_after:
            return None
        data = await reader.read(1024 if manners.pause else 65536)
        if not data:
            if response.end():
                return raw
            raise BrokenResponseError(f"the connection ended after {len(raw)} bytes")
        raw += data
        reads += 1
        if response.feed(0.0, data):
            return raw
        if manners.pause:
            await asyncio.sleep(manners.pause)


def _understand(raw: bytes) -> Answer:
    response = Response()
    response.feed(0.0, raw)
    head = raw.partition(b"\r\n\r\n")[0].lower()
    answer = Answer(response.status, retry_after=b"\r\nretry-after:" in head)
    if b"text/event-stream" not in head:
        with contextlib.suppress(msgspec.DecodeError):
            answer.body = msgspec.json.decode(response.body)
        return answer
    for event in response.body.split(b"\n\n"):
        if not event or event.startswith(b":"):
            continue
        answer.trailing |= bool(answer.done)
        if event == b"data: [DONE]":
            answer.done += 1
        else:
            answer.events.append(msgspec.json.decode(event.removeprefix(b"data: ")))
    return answer
