"""The load generator against a server that follows a script."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.fake_server import FakeServer, Script, Stream, respond, serving
from turnstile.bench.arrivals import Arrivals, ClosedLoop, OpenLoop
from turnstile.bench.drive import Driver
from turnstile.bench.metrics import Figures, measure
from turnstile.bench.workloads import Planned
from turnstile.cli.main import main


async def answer_at_once(body: dict[str, Any], stream: Stream) -> None:
    await stream.head()
    for _ in range(body["max_tokens"]):
        await stream.text("word ")
    await stream.end(len(body["prompt"]), body["max_tokens"])


def figures_of(
    script: Script, plan: list[Planned], arrivals: Arrivals, limit: float | None = None
) -> tuple[Figures, FakeServer]:
    async def go() -> tuple[Figures, FakeServer]:
        async with serving(script) as (fake, server):
            run = await Driver(server, "fake", plan, arrivals, limit).run()
            return measure(run), fake

    return asyncio.run(go())


def test_the_first_token_is_no_gap_between_tokens() -> None:  # B95
    async def script(body: dict[str, Any], stream: Stream) -> None:
        await stream.head()
        await asyncio.sleep(0.5)
        for _ in range(10):
            await stream.text("x")
            await asyncio.sleep(0.01)
        await stream.end(3, 10)

    figures, _ = figures_of(script, [Planned([1, 2, 3], 10)], ClosedLoop(1))
    assert figures["itl_ms"]["count"] == 9
    assert figures["ttft_ms"]["p50"] >= 500
    assert figures["itl_ms"]["max"] < 400
    assert figures["tpot_ms"]["mean"] == pytest.approx(figures["itl_ms"]["mean"])


def test_usage_is_believed_before_events_and_a_difference_is_told() -> None:  # B97
    async def script(body: dict[str, Any], stream: Stream) -> None:
        await stream.head()
        for _ in range(15):
            await stream.text("   ")
        await stream.end(7, 45)

    figures, _ = figures_of(script, [Planned([1] * 7, 45)], ClosedLoop(1))
    assert (figures["output_tokens"], figures["prompt_tokens"]) == (45, 7)
    assert figures["itl_ms"]["count"] == 14
    assert "45 tokens in 15 events" in figures["warnings"][0]


def test_a_time_limit_keeps_the_tokens_seen_but_no_request_figures() -> None:  # B101
    sent = 0

    async def script(body: dict[str, Any], stream: Stream) -> None:
        nonlocal sent
        await stream.head()
        for _ in range(1000):
            await stream.text("x")
            sent += 1
            await asyncio.sleep(0.01)

    plan = [Planned([1], 1000)] * 4
    figures, _ = figures_of(script, plan, ClosedLoop(4), limit=0.5)
    assert (figures["completed"], figures["incomplete"], figures["failed"]) == (0, 4, 0)
    assert figures["output_tokens"] == pytest.approx(sent, abs=8)
    rate = figures["output_tokens"] / figures["duration_s"]
    assert figures["output_throughput"] == pytest.approx(rate)
    assert figures["ttft_ms"]["count"] == 0


def test_in_an_open_loop_the_wait_counts_from_the_scheduled_arrival() -> None:
    async def script(body: dict[str, Any], stream: Stream) -> None:
        await asyncio.sleep(0.1)
        await answer_at_once(body, stream)

    arrivals = OpenLoop((0.0, 0.0, 0.0), max_concurrency=1)
    figures, _ = figures_of(script, [Planned([1], 2)] * 3, arrivals)
    assert figures["ttft_ms"]["max"] >= 300
    assert figures["lag_ms"]["max"] >= 200


def test_users_keep_their_connections_and_never_exceed_their_number() -> None:
    running = most = 0

    async def script(body: dict[str, Any], stream: Stream) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002)
        running -= 1
        await answer_at_once(body, stream)

    figures, fake = figures_of(script, [Planned([1], 3)] * 30, ClosedLoop(5))
    assert figures["completed"] == 30
    assert most == fake.connections == 5


def test_every_request_asks_for_exactly_its_work() -> None:
    plan = [Planned([5, 6], 3), Planned([7], 4)]
    _, fake = figures_of(answer_at_once, plan, ClosedLoop(1))
    assert [(r["prompt"], r["max_tokens"]) for r in fake.requests] == [([5, 6], 3), ([7], 4)]
    assert all(r["ignore_eos"] and r["temperature"] == 0 for r in fake.requests)


async def refuse(body: dict[str, Any], stream: Stream) -> None:
    respond(stream.writer, 503, {"error": {"message": "full"}})


async def reset(body: dict[str, Any], stream: Stream) -> None:
    await stream.head()
    await stream.text("x")
    stream.reset()


async def say_nothing(body: dict[str, Any], stream: Stream) -> None:
    await stream.head()
    await stream.end(1, 0)


async def stop_early(body: dict[str, Any], stream: Stream) -> None:
    await stream.head()
    await stream.text("x")
    await stream.end(1, 1)


async def fail_midway(body: dict[str, Any], stream: Stream) -> None:
    await stream.head()
    await stream.data('{"error": {"message": "engine died"}}')
    await stream.end(1, 1)


@contextlib.contextmanager
def in_a_thread(script: Script) -> Iterator[str]:
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
    started.wait(10)
    try:
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (refuse, "HTTP 503"),
        (reset, "connection closed inside the answer"),
        (say_nothing, "empty answer"),
        (stop_early, "another number of tokens"),
        (fail_midway, "engine died"),
    ],
)
def test_failures_are_told_with_reasons_and_the_file_is_written(
    script: Script, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # B103
    file = tmp_path / "result.json"
    with in_a_thread(script) as url:
        code = main(["bench", "serve", "--workload", "W4", "--url", url, "--output", str(file)])
    assert code == 1
    printed = capsys.readouterr().out
    assert "Failed requests:" in printed
    assert "failed 5 ×: " in printed
    assert reason in printed
    assert json.loads(file.read_text())["median"]["failed"] == 5


def test_without_a_server_there_is_a_sentence_and_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # B103
    file = tmp_path / "result.json"
    code = main(["bench", "serve", "--url", "http://127.0.0.1:9", "--output", str(file)])
    assert code == 1
    assert "Nobody answers at 127.0.0.1:9" in capsys.readouterr().err
    assert "Nobody answers" in json.loads(file.read_text())["error"]


def test_repetitions_have_the_same_lengths_and_fresh_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts: list[tuple[int, ...]] = []

    async def script(body: dict[str, Any], stream: Stream) -> None:
        prompts.append(tuple(body["prompt"]))
        await answer_at_once(body, stream)

    file = tmp_path / "result.json"
    arguments = ["bench", "serve", "--workload", "W4", "--repeat", "2", "--warmup", "0"]
    with in_a_thread(script) as url:
        assert main([*arguments, "--url", url, "--output", str(file)]) == 0
    assert [len(p) for p in prompts] == [64] * 10
    assert len(set(prompts)) == 10
    result = json.loads(file.read_text())
    assert [r["output_tokens"] for r in result["repetitions"]] == [640, 640]
    assert main(["bench", "compare", str(file), str(file)]) == 0
    assert "1.000" in capsys.readouterr().out
