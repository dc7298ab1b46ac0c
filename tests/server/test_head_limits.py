"""What surrounds a body, byte by byte: heads, trailers, pipelining, upgrades."""

from __future__ import annotations

import asyncio
import re

import pytest

from server.served import PATIENCE, Serve, Served, listening, until
from turnstile.server.http import head_limits

GET = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
LAST = b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
JSON = b'{"prompt": "hello", "max_tokens": 1}'


def post(*lines: bytes, body: bytes = JSON) -> bytes:
    head = (b"POST /v1/completions HTTP/1.1", b"host: x", b"content-type: application/json", *lines)
    return b"\r\n".join((*head, b"content-length: %d" % len(body), b"", body))


async def answered(port: int, data: bytes, *more: bytes) -> list[int]:
    """The statuses of everything that comes until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in (data, *more):
        writer.write(piece)
        await asyncio.sleep(0.05 if more else 0)
    everything = await asyncio.wait_for(reader.read(), PATIENCE)
    writer.close()
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", everything)]


@pytest.mark.parametrize(
    ("start", "line"),
    [(b"0\r\n", b"a: " + b"b" * 8000 + b"\r\n"), (b"0\r\n", b"a" * 8000), (b"1;", b"a" * 8000)],
    ids=["trailers", "one trailer", "a chunk extension"],
)
@pytest.mark.parametrize("path", [b"/v1/completions", b"/livez"])
def test_trailers_and_chunk_extensions_without_end_are_cut_off(
    serve: Serve, path: bytes, start: bytes, line: bytes
) -> None:
    async def test() -> None:
        async with serve() as served, listening(served) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                b"%b %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
                % (b"GET" if path == b"/livez" else b"POST", path)
                + start
            )
            sent = 0
            while not writer.is_closing() and sent < 8 << 20:
                writer.write(line)
                sent += len(line)
                await asyncio.sleep(0.001)
            writer.transport.abort()
            assert sent < 4 << 20
            await until(lambda: not served.service.live)

    asyncio.run(test())


def test_trailers_are_no_headers_of_the_request(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[list[tuple[bytes, bytes]]] = []
    complete = head_limits.BoundedHttpProtocol.on_message_complete

    def spy(self: head_limits.BoundedHttpProtocol) -> None:
        kept.append(list(self.headers))
        complete(self)

    monkeypatch.setattr(head_limits.BoundedHttpProtocol, "on_message_complete", spy)

    async def test() -> None:
        async with serve() as served, listening(served) as port:
            chunked = (
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\nx-late: 1\r\n\r\n"
            )
            assert await answered(port, chunked % (len(JSON), JSON) + LAST) == [200, 200]
            assert [name for name, _ in kept[0]] == [
                b"host", b"content-type", b"transfer-encoding",
            ]  # fmt: skip

    asyncio.run(test())


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"foo"])
@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_a_wish_for_another_protocol_is_served_in_http_1(
    serve: Serve, protocol: bytes, pieces: int
) -> None:
    async def test() -> None:
        async with serve() as served, listening(served) as port:
            wish = (
                b"connection: Upgrade, HTTP2-Settings",
                b"upgrade: " + protocol,
                b"http2-settings: AA",
            )
            data = post(*wish) + GET[:-2] + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n" + LAST
            at = len(post(*wish)) - 10
            cut = [data, b"", b""] if pieces == 1 else [data[:90], data[90:at], data[at:]]
            if pieces == 2:
                cut = [data[:at], data[at:]]
            assert await answered(port, *cut) == [200, 200, 200]

    asyncio.run(test())


def test_what_follows_a_request_never_takes_the_place_of_its_answer(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served, listening(served) as port:
            large = post(body=JSON[:-1] + b" " * 70_000 + b"}")
            # The beginning of the next head comes with the body, and the rest of it later.
            assert await answered(port, large + LAST[:20], LAST[20:]) == [200, 200]
            # A next head that is broken, or far too large, while the first is being answered.
            for bad in (b"?\r\n\r\n", GET[:-2] + b"a: " + b"b" * 400_000):
                assert await held(served, port, post() + bad) == [200]
            # Alone they are told what is wrong.
            assert await answered(port, b"?\r\n\r\n") == [400]
            assert await answered(port, GET + b"?\r\n\r\n") == [200]
            whole = GET[:-2] + b"a: " + b"b" * 70_000 + b"\r\n\r\n"
            assert await answered(port, whole) == [431]
            lines = b"a: b\r\n" * (head_limits.MAX_HEADERS - 2)
            assert await answered(port, LAST[:-2] + lines + b"\r\n") == [200]
            assert await answered(port, LAST[:-2] + lines + b"a: b\r\n\r\n") == [431]

    async def held(served: Served, port: int, data: bytes) -> list[int]:
        served.engine.held, before = True, len(served.engine.streams)
        asking = asyncio.create_task(answered(port, data))
        await until(lambda: len(served.engine.streams) > before)
        await asyncio.sleep(0.05)
        served.engine.held = False
        return await asking

    asyncio.run(test())


def test_pipelining_without_end_is_answered_and_then_ended(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served, listening(served) as port:
            assert await answered(port, GET * 400 + LAST) == [200] * 401
            many = await answered(port, GET * 5000)
            assert set(many) == {200}
            assert len(many) >= head_limits.MAX_PIPELINED

    asyncio.run(test())
