"""A server whose streams follow a script, for tests of the load generator."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from turnstile.bench.http import Server

Script = Callable[[dict[str, Any], "Stream"], Awaitable[None]]


class Stream:
    """What a script writes to: server-sent events in chunks, as servers send them."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer

    async def head(self) -> None:
        self.writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        await self.writer.drain()

    async def data(self, payload: str) -> None:
        event = f"data: {payload}\n\n".encode()
        self.writer.write(b"%x\r\n%b\r\n" % (len(event), event))
        await self.writer.drain()

    async def text(self, text: str) -> None:
        await self.data(json.dumps({"choices": [{"index": 0, "text": text}]}))

    async def end(self, prompt_tokens: int, output_tokens: int) -> None:
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens}
        await self.data(json.dumps({"choices": [], "usage": usage}))
        await self.done()

    async def done(self) -> None:
        await self.data("[DONE]")
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    def reset(self) -> None:
        self.writer.transport.abort()


class FakeServer:
    """Tokenizes by words; completions follow the script. Counts what it was asked."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.requests: list[dict[str, Any]] = []
        self.connections = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split(b" ", 2)[1].decode()
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                body = await reader.readexactly(length)
                await self._answer(path, json.loads(body) if body else {}, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def tell(self, path: str, writer: asyncio.StreamWriter) -> bool:
        """Answer something else about the server; whether it did. Replaced by tests."""
        if path not in ("/server_info", "/metrics"):
            return False
        respond(writer, 404, {})
        return True

    async def _answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if await self.tell(path, writer):
            return
        if path == "/v1/models":
            respond(writer, 200, {"data": [{"id": "fake"}]})
        elif path == "/tokenize":
            respond(writer, 200, {"tokens": [len(word) for word in body["prompt"].split()]})
        elif path == "/detokenize":
            respond(writer, 200, {"prompt": " ".join("x" * i for i in body["tokens"])})
        else:
            self.requests.append(body)
            await self._script(body, Stream(writer))


def respond(writer: asyncio.StreamWriter, status: int, content: Any) -> None:
    body = (content if isinstance(content, str) else json.dumps(content)).encode()
    writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[tuple[FakeServer, Server]]:
    """The fake on a free port, and where it is."""
    fake = FakeServer(script)
    listener = await asyncio.start_server(fake.handle, "127.0.0.1", 0)
    async with listener:
        yield fake, Server("127.0.0.1", listener.sockets[0].getsockname()[1])


@contextmanager
def in_a_thread(script: Script) -> Iterator[str]:
    """The fake in a thread of its own, for the command line; yields its address."""
    loop = asyncio.new_event_loop()
    ready: list[str] = []
    started = threading.Event()
    stop = asyncio.Event()

    async def go() -> None:
        async with serving(script) as (_, server):
            ready.append(f"http://{server.host}:{server.port}")
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(go()))
    thread.start()
    started.wait(60)
    try:
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()
