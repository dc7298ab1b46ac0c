"""What the tests of the server share: a server with a scripted engine, and readers of streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import uvicorn

from e2e.following import until as until
from e2e.harness import PATIENCE as PATIENCE
from server.fake_engine import FakeEngine
from turnstile.server.app import App
from turnstile.server.http.connection import Connection
from turnstile.server.run import _Server
from turnstile.server.service import Service
from turnstile.text.tokenizer import Tokenizer

Serve = Callable[..., Any]


@dataclass
class Served:
    """A server with a scripted engine, and a client that speaks to it in this process."""

    service: Service
    engine: FakeEngine
    app: App
    client: httpx.AsyncClient
    tokenizer: Tokenizer

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.client.post(path, json=body)

    async def complete(self, prompt: Any = "hello", **body: Any) -> httpx.Response:
        return await self.post("/v1/completions", prompt=prompt, **body)

    async def chat(self, content: Any = "hello", **body: Any) -> httpx.Response:
        messages = body.pop("messages", [{"role": "user", "content": content}])
        return await self.post("/v1/chat/completions", messages=messages, **body)


def events(answer: httpx.Response) -> list[Any]:
    """The events of a stream, checking its framing byte by byte on the way."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.text.endswith("\n\n")
    frames = answer.text.removesuffix("\n\n").split("\n\n")
    assert frames[-1] == "data: [DONE]"
    parsed = []
    for frame in frames[:-1]:
        if frame.startswith(":"):
            continue
        assert frame.startswith("data: ")
        assert "\n" not in frame
        parsed.append(json.loads(frame.removeprefix("data: ")))
    return parsed


def joined(chunks: list[Any], index: int = 0) -> str:
    """The text of one choice of a stream."""
    text = ""
    for chunk in chunks:
        for choice in chunk.get("choices", []):
            if choice["index"] == index:
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return text


@asynccontextmanager
async def listening(served: Served, *, send_buffer: int | None = None) -> AsyncIterator[int]:
    """The same application behind a real socket; yields the port. With a small ``send_buffer``
    (bytes the kernel holds for a client) who does not read is noticed soon.
    """
    connection: Any = partial(Connection, files=served.service.files)
    config = uvicorn.Config(
        served.app, port=0, http=connection, log_config=None, access_log=False,
        lifespan="off", ws="none", timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = _Server(config)
    listener = socket.socket()
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    listener.bind(("127.0.0.1", 0))
    task = asyncio.create_task(server.serve([listener]))
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task


class Raw:
    """A client that sees every byte as it comes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def post(
        cls, port: int, path: str, body: dict[str, Any], *, window: int | None = None
    ) -> Raw:
        """Send a request; ``window`` is the room for its answer, in bytes."""
        content = json.dumps(body).encode()
        return await cls.send(
            port,
            b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (path.encode(), len(content), content),
            window,
        )

    @classmethod
    async def get(cls, port: int, path: str, *, window: int | None = None) -> Raw:
        """The same for what has no body."""
        head = b"GET %b HTTP/1.1\r\nhost: localhost\r\n\r\n" % path.encode()
        return await cls.send(port, head, window)

    @classmethod
    async def send(cls, port: int, request: bytes, window: int | None) -> Raw:
        """Send what is a request, byte by byte."""
        client = socket.socket()
        if window is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
        raw = cls(*await asyncio.open_connection(sock=client, limit=window or 1 << 16))
        raw.writer.write(request)
        await raw.writer.drain()
        return raw

    async def until(self, what: bytes, timeout: float = PATIENCE) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(what), timeout)

    def reset(self) -> None:
        """Leave without a goodbye: RST, not FIN."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()
