"""Connections as real clients use them, byte by byte: who half-closes, who speaks HTTP/1.0, who
waits to be asked for the body.
"""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from server.served import PATIENCE, Serve, listening, until
from turnstile.server.http import connection

BODY = b'{"prompt": "hello", "max_tokens": 3, "stream": false}'
STREAM = BODY.replace(b"false", b"true")
LONG = b'{"prompt": "hello", "max_tokens": 200, "ignore_eos": true, "stream": %b}'


def request(
    line: bytes, *headers: bytes, body: bytes = b"", kind: bytes = b"application/json"
) -> bytes:
    head = [line, *headers]
    if line.endswith(b"1.1"):
        head.append(b"host: localhost")
    if body:
        head += [b"content-type: " + kind, b"content-length: %d" % len(body)]
    return b"\r\n".join([*head, b"", b""]) + body


def completion(body: bytes = BODY, *headers: bytes, version: bytes = b"1.1") -> bytes:
    return request(b"POST /v1/completions HTTP/" + version, *headers, body=body)


async def exchange(port: int, data: bytes, *, half_close: bool = False) -> bytes:
    """Everything that comes until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    if half_close:
        writer.write_eof()
    everything = await asyncio.wait_for(reader.read(), PATIENCE)
    writer.close()
    return everything


def split(answer: bytes) -> tuple[bytes, bytes]:
    """Head (in lower case) and body."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.lower(), body


# -- HTTP/1.0 -----------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [(), (b"connection: keep-alive",)])
def test_a_stream_to_http_1_0_has_no_chunks_and_ends_with_the_connection(
    serve: Serve, keep: tuple[bytes, ...]
) -> None:
    async def test() -> None:
        async with serve() as served, listening(served) as port:
            head, body = split(await exchange(port, completion(STREAM, *keep, version=b"1.0")))
            assert head.startswith(b"http/1.1 200")
            assert b"connection: close" in head
            assert b"transfer-encoding" not in head
            assert body.startswith(b"data: {")
            assert body.endswith(b"data: [DONE]\n\n")
            frames = body.removesuffix(b"\n\n").split(b"\n\n")
            assert all(frame.startswith(b"data: ") for frame in frames)

    asyncio.run(test())


def test_an_answer_in_one_piece_to_http_1_0_has_a_length_and_closes(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served, listening(served) as port:
            # No 100 Continue either: HTTP/1.0 does not know it.
            expecting = completion(BODY, b"expect: 100-continue", version=b"1.0")
            for data in (expecting, request(b"GET /version HTTP/1.0")):
                head, body = split(await exchange(port, data))
                assert head.startswith(b"http/1.1 200")
                assert b"connection: close" in head
                assert b"content-length: %d" % len(body) in head

    asyncio.run(test())


# -- clients that end their side -----------------------------------------------------------------


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
def test_a_client_that_ends_its_side_is_answered(serve: Serve, version: bytes, body: bytes) -> None:
    async def test() -> None:
        # A step takes longer than the first look after the client.
        async with serve(delay=0.05) as served, listening(served) as port:
            data = completion(body, version=version)
            answer = await exchange(port, data, half_close=True)
            while answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\n"):
                assert version == b"1.1"
                assert body == BODY
                answer = answer.partition(b"\r\n\r\n")[2]
            head, content = split(answer)
            assert head.startswith(b"http/1.1 200")
            if body == STREAM:
                assert b"data: [DONE]\n\n" in content
            else:
                assert b"content-length: %d" % len(content) in head
            await until(lambda: not served.service.live)
            assert served.service.metrics.outcomes["length"] == 1

    asyncio.run(test())


def test_quick_answers_to_half_closed_connections_have_nothing_before_them(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served, listening(served) as port:
            get = request(b"GET /version HTTP/1.1")
            for data in (get, request(b"GET /version HTTP/1.0")):
                answer = await exchange(port, data, half_close=True)
                assert answer.startswith(b"HTTP/1.1 200 OK")
            three = await exchange(port, get * 3, half_close=True)
            assert three.count(b"HTTP/1.1 200 OK") == 3
            # What is not complete is dropped, what is complete is answered.
            cut = await exchange(port, get * 2 + completion()[:-5], half_close=True)
            assert cut.count(b"HTTP/1.1 ") == 2
            assert await exchange(port, completion()[:-5], half_close=True) == b""
            assert await exchange(port, get[:-5], half_close=True) == b""
            assert await exchange(port, b"", half_close=True) == b""
            await until(lambda: not served.service.live)

    asyncio.run(test())


@pytest.mark.parametrize("stream", [b"true", b"false"])
@pytest.mark.parametrize("state", ["queued", "decoding", "held"])
def test_a_client_that_ends_its_side_and_then_leaves_is_noticed(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, stream: bytes, state: str
) -> None:
    monkeypatch.setattr(connection, "_LAST_LOOK", 0.1)

    async def test() -> None:
        async with serve(max_num_seqs=1, delay=0.01) as served, listening(served) as port:
            engine = served.engine
            others = []
            if state == "queued":
                others.append(await asyncio.open_connection("127.0.0.1", port))
                others[0][1].write(completion(LONG % b"true"))
                await until(lambda: engine.snapshot.running == 1)
            engine.held = state == "held"
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(completion(LONG % stream))
            writer.write_eof()
            await until(lambda: len(engine.streams) == len(others) + 1)
            await asyncio.sleep(0.1)
            assert not engine.streams[-1].done
            writer.close()
            await until(lambda: engine.streams[-1].done)
            assert engine.streams[-1].cancelled == [(None, "abort")]
            assert engine.streams[-1].samples[0].produced < 200
            for _, other in others:
                other.transport.abort()
            await until(lambda: not served.service.live)

    asyncio.run(test())


def test_a_client_that_leaves_is_noticed_though_another_request_waits_behind(serve: Serve) -> None:
    async def test() -> None:
        async with serve(delay=0.005) as served, listening(served) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(completion(LONG % b"true") + completion(LONG % b"false"))
            await reader.readuntil(b"data: ")
            raw: socket.socket = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            await until(lambda: not served.service.live)
            assert len(served.engine.streams) == 1
            assert served.engine.streams[0].cancelled == [(None, "abort")]

    asyncio.run(test())


# -- Expect: 100-continue -----------------------------------------------------------------------


def test_a_client_that_waits_to_be_asked_is_asked(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served, listening(served) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head, _, body = completion(BODY, b"expect: 100-Continue").partition(b"\r\n\r\n")
            writer.write(head + b"\r\n\r\n")
            asked = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)
            assert asked == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(body + request(b"GET /version HTTP/1.1", b"connection: close"))
            rest = await asyncio.wait_for(reader.read(), PATIENCE)
            assert rest.count(b"HTTP/1.1 200 OK") == 2
            assert b"100 Continue" not in rest
            writer.close()

    asyncio.run(test())


@pytest.mark.parametrize("headers", [(), (b"connection: close",)])
def test_a_client_that_waits_is_refused_without_being_asked(
    serve: Serve, headers: tuple[bytes, ...]
) -> None:
    async def test() -> None:
        config = {"api_key": ["k"], "max_body_size": 2048}
        async with serve(config=config) as served, listening(served) as port:
            key = b"authorization: Bearer k"
            expect = b"expect: 100-continue"
            line = b"POST /v1/completions HTTP/1.1"
            large = (b"content-length: 999999", b"content-type: application/json")
            for status, lines in (
                (401, [expect, *large]),
                (413, [expect, key, *large]),
                (415, [expect, key, large[0], b"content-type: text/plain"]),
                (405, [expect, key, *large]),
            ):
                first = line if status != 405 else b"PUT /v1/completions HTTP/1.1"
                answer = await exchange(port, request(first, *lines, *headers))
                head, _ = split(answer)
                assert head.startswith(b"http/1.1 %d" % status), head
                assert head.count(b"connection: close") == 1
            await until(lambda: not served.service.live)

    asyncio.run(test())


# -- methods ------------------------------------------------------------------------------------


def test_head_is_get_without_its_body_on_every_get_route(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served, listening(served) as port:
            paths = ["/v1/models", "/v1/models/tiny", "/v1/requests", "/health", "/livez",
                     "/readyz", "/ping", "/version", "/metrics", "/load", "/server_info",
                     "/tokenizer_info", "/openapi.json", "/docs", "/nowhere"]  # fmt: skip
            for path in map(str.encode, paths):
                close = b"connection: close"
                got = await exchange(port, request(b"GET %b HTTP/1.1" % path, close))
                said = await exchange(port, request(b"HEAD %b HTTP/1.1" % path, close))
                head, body = split(said)
                assert body == b""
                assert head.partition(b"\r\n")[0] == split(got)[0].partition(b"\r\n")[0]
                assert b"content-length: " in head
            wrong = await exchange(
                port, request(b"HEAD /v1/completions HTTP/1.1", b"connection: close")
            )
            assert wrong.startswith(b"HTTP/1.1 405")
            # The connection can be used again: no body is taken for the next head.
            both = request(b"HEAD /version HTTP/1.1") + request(b"GET /version HTTP/1.1", close)
            assert (await exchange(port, both)).count(b"HTTP/1.1 200 OK") == 2

    asyncio.run(test())


@pytest.mark.parametrize(
    ("target", "status", "allow"),
    [
        (b"/v1/completions", 204, b"OPTIONS, POST"),
        (b"/v1/requests/x", 204, b"DELETE, GET, HEAD, OPTIONS"),
        (b"*", 204, b"DELETE, GET, HEAD, OPTIONS, POST"),
        (b"/nowhere", 404, None),
    ],
)
def test_options_tell_what_a_path_takes(
    serve: Serve, target: bytes, status: int, allow: bytes | None
) -> None:
    async def test() -> None:
        async with serve(config={"api_key": ["k"]}) as served, listening(served) as port:
            line = b"OPTIONS %b HTTP/1.1" % target
            head, body = split(await exchange(port, request(line, b"connection: close")))
            assert head.startswith(b"http/1.1 %d" % status)
            if allow is not None:
                assert b"allow: " + allow.lower() in head.split(b"\r\n")
                assert body == b""
                assert b"content-length" not in head  # RFC 9110, section 8.6
            assert b"access-control" not in head

    asyncio.run(test())


@pytest.mark.parametrize("lines", [[], [b"host: a", b"host: b"]], ids=["no host", "two hosts"])
def test_a_request_of_http_1_1_has_one_host(serve: Serve, lines: list[bytes]) -> None:
    async def test() -> None:
        async with serve() as served, listening(served) as port:
            data = b"\r\n".join([b"GET /version HTTP/1.1", *lines, b"", b""])
            answer = await exchange(port, data)
            assert answer.startswith(b"HTTP/1.1 400")
            assert b"one Host header" in answer

    asyncio.run(test())


def test_both_lengths_at_once_are_refused(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served, listening(served) as port:
            for lines in (
                [b"content-length: 3", b"transfer-encoding: chunked"],
                [b"content-length: 3", b"content-length: 4"],
                [b"content-length: +3"],
                [b"transfer-encoding: gzip"],
            ):
                data = (
                    request(b"POST /v1/completions HTTP/1.1", *lines)
                    + b"0\r\n\r\nGET / HTTP/1.1\r\n"
                )
                answer = await exchange(port, data)
                assert answer.startswith(b"HTTP/1.1 400"), (lines, answer)
                assert answer.count(b"HTTP/1.1") == 1
            assert not served.engine.streams

    asyncio.run(test())
