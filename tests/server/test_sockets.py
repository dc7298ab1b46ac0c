"""Through a real socket: bytes as they come, clients that leave, clients that do not read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from server.served import PATIENCE, Raw, Serve, listening, until
from turnstile.server.run import EXIT_ABORTED, EXIT_OK, Life


def body(**fields: Any) -> dict[str, Any]:
    return {"prompt": "hello", "max_tokens": 200, "stream": True, "ignore_eos": True} | fields


# B87: the head goes out when the gate accepts, before any token.
def test_the_head_is_sent_when_the_request_is_accepted(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served, listening(served) as port:
            served.engine.held = True
            raw = await Raw.post(port, "/v1/completions", body())
            head = (await raw.until(b"\r\n\r\n")).lower()
            assert head.startswith(b"http/1.1 200")
            assert b"text/event-stream" in head
            assert b"content-encoding" not in head
            served.engine.held = False
            assert (await raw.until(b"\n\n")).partition(b"\r\n")[2].startswith(b"data: {")
            await raw.close()

    asyncio.run(test())


def test_a_silent_stream_gets_keep_alive_comments(serve: Serve) -> None:
    async def test() -> None:
        config = {"sse_keep_alive_interval": 0.2}
        async with serve(config=config) as served, listening(served) as port:
            served.engine.held = True
            raw = await Raw.post(port, "/v1/completions", body(max_tokens=3))
            await raw.until(b"\r\n\r\n")
            for _ in range(2):
                assert b": keep-alive\n\n" in await raw.until(b"\n\n")
                await raw.until(b"\r\n")
            served.engine.held = False
            assert b"data: {" in await raw.until(b"data: [DONE]\n\n")
            await raw.close()

    asyncio.run(test())


# B25, B79: gone is gone, in every state.
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("state", ["queued", "decoding"])
@pytest.mark.parametrize("goodbye", ["close", "reset"])
def test_a_client_that_leaves_frees_its_request(
    serve: Serve, stream: bool, state: str, goodbye: str
) -> None:
    async def test() -> None:
        async with serve(max_num_seqs=1, delay=0.002) as served, listening(served) as port:
            engine, service = served.engine, served.service
            if state == "queued":
                first = await Raw.post(port, "/v1/completions", body())
                await until(lambda: engine.snapshot.running == 1)
            raw = await Raw.post(port, "/v1/completions", body(stream=stream, n=1))
            expected = 2 if state == "queued" else 1
            await until(lambda: len(engine.streams) == expected)
            if state == "decoding":
                await until(lambda: engine.snapshot.running == 1)
            if goodbye == "close":
                await raw.close()
            else:
                raw.reset()
            await until(lambda: engine.streams[-1].done)
            assert engine.streams[-1].cancelled == [(None, "abort")]
            assert engine.streams[-1].samples[0].produced < 200
            if state == "queued":
                assert not engine.streams[0].done
                await first.close()
            await until(lambda: service.metrics.in_flight == 0 and not service.live)
            assert service.metrics.outcomes["abort"] == expected
            gate: Any = service.gate
            assert gate.load == 0

    asyncio.run(test())


def test_a_client_that_leaves_during_upload_leaves_nothing_behind(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served, listening(served) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b'content-length: 1000\r\n\r\n{"prompt"'
            )
            await writer.drain()
            await until(lambda: len(served.service.live) == 1)
            Raw(reader, writer).reset()
            await until(lambda: not served.service.live)
            assert not served.engine.streams

    asyncio.run(test())


def test_a_slow_upload_is_a_408(serve: Serve) -> None:
    async def test() -> None:
        async with serve(config={"body_timeout": 0.1}) as served, listening(served) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b'content-length: 1000\r\n\r\n{"prompt"'
            )
            raw = Raw(reader, writer)
            assert (await raw.until(b"\r\n")).startswith(b"HTTP/1.1 408")
            await raw.close()

    asyncio.run(test())


def test_a_reader_that_stalls_is_cancelled_and_holds_up_nobody(serve: Serve) -> None:
    big = list(range(3, 273))

    async def test() -> None:
        config = {"stalled_reader_timeout": 0.5}
        async with (
            serve(lambda generation, sample: big, config=config, max_model_len=10**6,
                  num_pages=10**6) as served,
            listening(served, send_buffer=16 << 10) as port,
        ):  # fmt: skip
            fields = body(max_tokens=900_000, logprobs=20)  # kilobytes a token
            stalled = await Raw.post(port, "/v1/completions", fields, window=16 << 10)
            await until(lambda: len(served.engine.streams) == 1)
            quick = await Raw.post(port, "/v1/completions", body(max_tokens=5))
            await quick.until(b"data: [DONE]\n\n")
            await until(lambda: served.engine.streams[0].done)
            assert served.engine.streams[0].cancelled == [(None, "abort")]
            await until(lambda: not served.service.live)
            stalled.reset()
            await quick.close()

    asyncio.run(test())


# B13: one channel a request, one end each, on one connection after the other.
def test_streams_do_not_mix_and_connections_are_reusable(serve: Serve) -> None:
    async def one(port: int, served: Any, token: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        raw = Raw(reader, writer)
        for _ in range(2):
            again = await Raw.post(port, "/v1/completions", body(prompt=[token], max_tokens=20))
            data = await again.until(b"data: [DONE]\n\n")
            ids = {part.partition(b'"')[0] for part in data.split(b'"id":"')[1:]}
            assert len(ids) == 1
            assert data.count(b'"finish_reason":"length"') == 1
            text = served.tokenizer.decode([token]).encode()
            assert data.count(b'"text":"%b"' % text) == 20
            assert await again.until(b"0\r\n\r\n")
            await again.close()
        await raw.close()

    async def test() -> None:
        async with (
            serve(lambda generation, sample: [generation.prompt[0]]) as served,
            listening(served) as port,
        ):
            await asyncio.gather(*(one(port, served, 70 + k) for k in range(16)))

    asyncio.run(test())


# B83: probes and streams go on while huge prompts are tokenized, and the hopeless are not.
def test_health_stays_quick_while_huge_prompts_are_looked_at(serve: Serve) -> None:
    async def test() -> None:
        async with (
            serve(delay=0.01, max_model_len=10**6, num_pages=10**6) as served,
            listening(served) as port,
        ):
            answered = 0

            async def probe() -> None:
                nonlocal answered
                while True:
                    assert (await served.client.get("/health")).status_code == 200
                    answered += 1
                    await asyncio.sleep(0.001)

            probing = asyncio.create_task(probe())
            await asyncio.sleep(0)
            text = "word " * 500_000
            raw = await Raw.post(port, "/v1/completions", body(prompt=text, max_tokens=1))
            await raw.until(b"\r\n")
            messages = [{"role": "user", "content": "word " * 10}] * 20_000
            chat = await Raw.post(port, "/v1/chat/completions", {"messages": messages})
            await chat.until(b"\r\n")
            probing.cancel()
            assert answered > 20  # with the loop blocked it would be a handful
            await raw.close()
            await chat.close()

    asyncio.run(test())


@pytest.mark.parametrize("signals", [1, 2])
def test_the_first_signal_drains_and_the_second_aborts(serve: Serve, signals: int) -> None:
    async def test() -> None:
        import socket

        async with serve() as served:
            model, _ = served.service.require_model()

            async def load() -> Any:
                return model

            listener = socket.socket()
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            life = Life(served.service, listener, load)
            running = asyncio.create_task(life.run())
            port = listener.getsockname()[1]
            raw = await Raw.post(port, "/v1/completions", body(max_tokens=200))
            await raw.until(b"data: {")
            served.engine.held = True
            life._on_signal()
            await until(lambda: served.service.phase == "draining")
            late = await Raw.post(port, "/v1/completions", body())
            answer = await late.until(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"connection: close" in answer
            await late.close()
            if signals == 2:
                life._on_signal()
            else:
                served.engine.held = False
            rest = await raw.until(b"data: [DONE]\n\n")
            reason = b"length" if signals == 1 else b"abort"
            assert b'"finish_reason":"%b"' % reason in rest
            await raw.close()
            assert await running == (EXIT_OK if signals == 1 else EXIT_ABORTED)

    asyncio.run(test())


def test_uploads_together_take_a_bounded_amount_of_memory(serve: Serve) -> None:
    async def test() -> None:
        config = {"max_body_size": 10_000}
        async with serve(config=config) as served, listening(served) as port:
            held = []
            for _ in range(16):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(
                    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
                    b"content-type: application/json\r\ncontent-length: 10000\r\n\r\n"
                    + b" "
                    * 9_990
                )
                held.append(Raw(reader, writer))
            await until(lambda: served.service.bodies.held == 16 * 9_990)
            refused = await Raw.post(port, "/v1/completions", {"prompt": "x" * 9_000})
            head = await refused.until(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503")
            assert b"retry-after: 1" in head
            for raw in [*held, refused]:
                raw.reset()
            await until(lambda: served.service.bodies.held == 0)
            assert (await served.complete(max_tokens=1)).status_code == 200

    asyncio.run(test())


def test_uploads_of_one_tenant_leave_room_for_another(serve: Serve) -> None:
    async def test() -> None:
        config = {"max_body_size": 10_000, "api_key": ["key-a", "key-b"]}
        async with serve(config=config) as served, listening(served) as port:
            head = (
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer key-%b\r\n"
                b"content-type: application/json\r\ncontent-length: 10000\r\n\r\n"
            )
            held = []
            for _ in range(8):
                raw = Raw(*await asyncio.open_connection("127.0.0.1", port))
                raw.writer.write(head % b"a" + b" " * 9_990)
                held.append(raw)
            await until(lambda: served.service.bodies.held == 8 * 9_990)
            body = b'{"prompt": "hi", "max_tokens": 1}'
            for key, status in ((b"a", b"429"), (b"b", b"200")):
                raw = Raw(*await asyncio.open_connection("127.0.0.1", port))
                raw.writer.write(head % key + body + b" " * (10_000 - len(body)))
                answer = await raw.until(b"\r\n\r\n")
                assert answer.startswith(b"HTTP/1.1 " + status)
                assert (b"retry-after: 1" in answer) == (status == b"429")
                held.append(raw)
            for raw in held:
                raw.reset()
            await until(lambda: served.service.bodies.held == 0)
            assert not served.service.bodies.by_tenant

    asyncio.run(test())


@pytest.mark.parametrize("head", [b"x: " + b"a" * 1000 + b"\r\n", b"a" * 1000])
def test_a_head_without_end_is_refused(serve: Serve, head: bytes) -> None:
    async def test() -> None:
        async with serve() as served, listening(served) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            raw = Raw(reader, writer)
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n" if head[:1] == b"x" else b"GET /")
            sending = asyncio.create_task(keep_sending(writer, head))
            answer = await raw.until(b"\r\n")
            sending.cancel()
            assert answer.startswith(b"HTTP/1.1 431")
            raw.reset()
            assert not served.service.live
            assert (await served.client.get("/health")).status_code == 200

    async def keep_sending(writer: asyncio.StreamWriter, piece: bytes) -> None:
        for _ in range(200):
            writer.write(piece)
            await asyncio.sleep(0.001)

    asyncio.run(test())


def test_a_head_that_does_not_come_is_cut_off(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    from turnstile.server.http import head_limits

    monkeypatch.setattr(head_limits, "HEAD_SECONDS", 0.3)

    async def test() -> None:
        async with serve() as served, listening(served) as port:
            for start in (b"", b"GET /health HTTP/1.1\r\nho"):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(start)
                answer = await asyncio.wait_for(reader.read(), PATIENCE)
                assert answer.startswith(b"HTTP/1.1 408") if start else answer == b""
                writer.close()
            # A stream that lasts longer than that is none of the timer's business.
            served.engine.delay = 0.01
            raw = await Raw.post(port, "/v1/completions", body(max_tokens=30))
            assert b"[DONE]" in await raw.until(b"data: [DONE]\n\n")
            await raw.close()

    asyncio.run(test())
