"""Without a task: rows that are taken in the step that brings them, bodies, clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
from types import SimpleNamespace
from typing import Any

import pytest

from server.fake_engine import FakeStream
from server.served import PATIENCE, Raw, Serve, events, listening, until
from turnstile.engine.protocol import Row
from turnstile.server.http.direct import Direct
from turnstile.server.http.turns import Turns


def body(**fields: Any) -> dict[str, Any]:
    return {"prompt": "hello", "max_tokens": 200, "stream": True, "ignore_eos": True} | fields


def chunks_of(data: bytes) -> list[Any]:
    """The JSON of a stream, read through HTTP's chunks."""
    _, _, rest = data.partition(b"\r\n\r\n")
    text = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        text, rest = text + rest[:length], rest[length:].removeprefix(b"\r\n")
    frames = [frame for frame in text.split(b"\n\n") if frame and not frame.startswith(b":")]
    assert frames[-1] == b"data: [DONE]"
    return [json.loads(frame.removeprefix(b"data: ")) for frame in frames[:-1]]


def without_times(chunks: list[Any]) -> list[Any]:
    own = ("id", "created", "metrics", "timings")
    return [{key: value for key, value in chunk.items() if key not in own} for chunk in chunks]


def put(stream: FakeStream, token: int, **fields: Any) -> bool:
    """Give a stream its next token as a step does; whether it was taken on the spot."""
    sample = stream.samples[0]
    stream.put(Row(stream.request_id, 0, sample.produced, [token], **fields))
    sample.produced += 1
    return not stream.rows


def test_a_token_is_at_the_socket_before_any_task_has_run(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served, listening(served) as port:
            served.engine.held = True
            raw = await Raw.post(port, "/v1/completions", body())
            await raw.until(b"\r\n\r\n")
            await until(lambda: served.engine.streams[0].waiting)
            stream = served.engine.streams[0]
            for token in (70, 71, 72):  # nothing is awaited in between
                assert put(stream, token)
            assert served.service.metrics.generated_tokens == 3
            data = await raw.until(b"\n\n") + await raw.until(b"\n\n") + await raw.until(b"\n\n")
            said = [served.tokenizer.decode([token]) for token in (70, 71, 72)]
            assert all(b'"text":%b' % json.dumps(text).encode() in data for text in said)
            assert not put(stream, 73, finish="length")  # the last one is for the task
            stream.samples[0].done = True
            assert b'"finish_reason":"length"' in await raw.until(b"data: [DONE]\n\n")
            await raw.close()

    asyncio.run(test())


WISHES: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"stop": ["lo w"]},
    {"stop": ["d"], "include_stop_str_in_output": True, "n": 2},
    {"logprobs": 2, "echo": True},
    {"return_token_ids": True, "stream_options": {"continuous_usage_stats": True}},
    {"stream_interval": 3, "stream_options": {"include_usage": True}},
    {"prompt": ["hello", "world"]},
]


@pytest.mark.parametrize("wishes", WISHES, ids=lambda wishes: " ".join(wishes) or "plain")
def test_both_ways_send_the_same_chunks(serve: Serve, wishes: dict[str, Any]) -> None:
    async def test() -> None:
        # The client in this process speaks ASGI, where there is no transport to write to.
        async with serve("hello wörld 🙂 and more") as served, listening(served) as port:
            fields = body(max_tokens=30, seed=1) | wishes
            waiting = events(await served.client.post("/v1/completions", json=fields))
            raw = await Raw.post(port, "/v1/completions", fields)
            direct = chunks_of(await raw.until(b"\r\n0\r\n\r\n"))
            await raw.close()
            assert sorted(map(json.dumps, without_times(direct))) == sorted(
                map(json.dumps, without_times(waiting))
            )
            ended = [stream.cancelled for stream in served.engine.streams]
            assert ended[: len(ended) // 2] == ended[len(ended) // 2 :]

    asyncio.run(test())


def test_what_waits_for_a_stalled_reader_comes_in_order_once_it_reads(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served, listening(served) as port:
            served.engine.held = True
            fields = body(return_token_ids=True)
            raw = await Raw.post(port, "/v1/completions", fields)
            await until(lambda: bool(served.engine.streams and served.engine.streams[0].waiting))
            stream = served.engine.streams[0]
            (exchange,) = served.service.live
            connection: Any = exchange.direct._transport.get_protocol()  # type: ignore[union-attr]
            assert put(stream, 70)
            connection.pause_writing()  # as the transport does when its buffer is full
            assert not put(stream, 71)
            await until(lambda: exchange.write_began is not None)  # the task waits in the middle
            assert not put(stream, 72)
            assert not put(stream, 73)
            connection.resume_writing()
            await until(lambda: stream.waiting)
            assert put(stream, 74)
            put(stream, 75, finish="length")
            stream.samples[0].done = True
            chunks = chunks_of(await raw.until(b"\r\n0\r\n\r\n"))
            ids = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
            assert ids == [70, 71, 72, 73, 74, 75]
            await raw.close()

    asyncio.run(test())


def test_a_row_that_cannot_be_taken_ends_its_own_request_alone(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    from turnstile.text.detokenizer import Detokenizer

    push = Detokenizer.push

    def fail(self: Detokenizer, token_id: int) -> str:
        if token_id == 99:
            raise RuntimeError("out of order")
        return push(self, token_id)

    monkeypatch.setattr(Detokenizer, "push", fail)

    async def test() -> None:
        async with (
            serve(
                lambda generation, sample: [70, 71, 99 if generation.prompt[-1] == 90 else 72]
            ) as served,
            listening(served) as port,
        ):
            bad = await Raw.post(port, "/v1/completions", body(prompt=[90], max_tokens=20))
            good = await Raw.post(port, "/v1/completions", body(prompt=[91], max_tokens=20))
            assert b'"error":{' in await bad.until(b"data: [DONE]\n\n")
            data = await good.until(b"data: [DONE]\n\n")
            assert b'"finish_reason":"length"' in data
            assert b'"error"' not in data
            assert served.engine.streams[0].cancelled == [(None, "abort")]
            with contextlib.suppress(ConnectionError):
                await bad.close()
            await good.close()

    asyncio.run(test())


def test_nothing_is_written_to_a_client_that_has_gone(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served, listening(served) as port:
            served.engine.held = True
            raw = await Raw.post(port, "/v1/completions", body())
            await raw.until(b"\r\n\r\n")
            await until(lambda: served.engine.streams[0].waiting)
            (exchange,) = served.service.live
            assert exchange.direct.ready
            raw.reset()
            await until(lambda: not exchange.direct.ready)
            await until(lambda: not served.service.live)
            assert served.engine.streams[0].cancelled == [(None, "abort")]

    asyncio.run(test())


def test_a_stream_takes_one_task_and_nobody_waits_for_its_client_in_another(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served, listening(served) as port:
            served.engine.held = True
            before = asyncio.all_tasks()
            raw = await Raw.post(port, "/v1/completions", body())
            await raw.until(b"\r\n\r\n")
            await until(lambda: served.engine.streams[0].waiting)
            names = {task.get_coro().__qualname__ for task in asyncio.all_tasks() - before}
            shared = {"Service._tick", "FakeEngine._loop"}
            assert names - shared == {"RequestResponseCycle.run_asgi"}
            await raw.close()
            await until(lambda: not served.service.live)
            assert served.engine.streams[0].cancelled == [(None, "abort")]

    asyncio.run(test())


@pytest.mark.parametrize("cut", [0, 1, 40], ids="the rest {} bytes later".format)
def test_a_body_is_the_same_whether_it_comes_with_its_head_or_after(serve: Serve, cut: int) -> None:
    async def test() -> None:
        async with serve() as served, listening(served) as port:
            content = json.dumps(body(stream=False, max_tokens=3, echo=True)).encode()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            end = len(content) - cut
            writer.write(head + b"content-length: %d\r\n\r\n%b" % (len(content), content[:end]))
            if cut:
                await until(lambda: served.service.bodies.held == end)
                writer.write(content[end:])
            answer = await Raw(reader, writer).until(b'"usage"')
            assert b'"text":"hello' in answer
            assert not served.service.bodies.held
            writer.close()

    asyncio.run(test())


@pytest.mark.parametrize("cut", [0, 1], ids="the rest {} bytes later".format)
def test_a_refused_body_that_is_there_to_its_end_is_not_waited_for(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    monkeypatch.setattr("turnstile.server.http.exchange._DISCARD_SECONDS", 10 * PATIENCE)

    async def test() -> None:
        async with serve() as served, listening(served) as port:
            content = json.dumps(body()).encode()
            end = len(content) - cut
            served.service.bodies.together = len(content) - 1
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"connection: close\r\n"
                b"content-length: %d\r\n\r\n%b" % (len(content), content[:end])
            )
            if cut:
                await until(lambda: served.service.bodies.held == end)
                writer.write(content[end:])
            answer = await asyncio.wait_for(reader.read(), PATIENCE)
            assert answer.startswith(b"HTTP/1.1 503")
            assert not served.service.bodies.held
            writer.close()

    asyncio.run(test())


def test_who_asks_late_hears_at_once_that_the_client_has_left() -> None:
    flow = SimpleNamespace(resume_reading=lambda: None)
    cycle: Any = SimpleNamespace(transport=None, disconnected=False, flow=flow)
    heard: list[str] = []
    direct = Direct(cycle)
    direct.when_lost(lambda: heard.append("first"))
    direct.when_lost(None)  # the answer is complete
    direct.lost()
    assert heard == []
    cycle.disconnected = True
    direct.when_lost(lambda: heard.append("late"))
    direct.lost()
    assert heard == ["late"]


def test_who_leaves_after_a_large_body_is_missed(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served, listening(served) as port:
            served.engine.held = True
            # More than uvicorn keeps before it stops reading, in one piece or in several.
            raw = await Raw.post(port, "/v1/completions", body(user="x" * 300_000))
            await raw.until(b"\r\n\r\n")
            raw.reset()
            await until(lambda: not served.service.live)
            assert served.engine.streams[0].cancelled == [(None, "abort")]

    asyncio.run(test())


def test_of_requests_that_come_together_one_is_parsed_in_each_turn_of_the_loop() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        turns, seen, turn = Turns(), [], 0

        async def request(name: int) -> None:
            await turns.wait()
            seen.append((name, turn))

        def count() -> None:
            nonlocal turn
            turn += 1
            loop.call_soon(count)

        count()
        tasks = [asyncio.create_task(request(name)) for name in range(5)]
        await asyncio.sleep(0)
        tasks[2].cancel()  # a client that has left takes nobody's turn
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [name for name, _ in seen] == [0, 1, 3, 4]
        assert len({at for _, at in seen}) == 4
        await asyncio.sleep(0)
        late = turn
        await request(5)  # and nobody waits where there is nobody else
        assert seen[-1] == (5, late)

    asyncio.run(test())
