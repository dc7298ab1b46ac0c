"""The load generator against a server that follows a script."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from bench import virtual_time
from bench.fake_server import FakeServer, Script, Stream, in_a_thread, respond, serving
from turnstile.bench.arrivals import Arrivals, ClosedLoop, OpenLoop
from turnstile.bench.client import ServerError, wait_until_ready
from turnstile.bench.drive import Driver
from turnstile.bench.metrics import Figures, measure
from turnstile.bench.plan import Planned
from turnstile.cli.main import EXIT_USAGE, main


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


def test_in_an_open_loop_the_wait_counts_from_the_scheduled_arrival(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def script(body: dict[str, Any], stream: Stream) -> None:
        await asyncio.sleep(0.1)
        await answer_at_once(body, stream)

    async def go() -> Figures:
        async with serving(script) as (_, server):
            arrivals = OpenLoop((0.0, 0.0, 0.0), max_concurrency=1)
            plan = [Planned([1], 2)] * 3
            return measure(await Driver(server, "fake", plan, arrivals).run())

    figures = virtual_time.run(monkeypatch, go())
    assert [figures["ttft_ms"][n] for n in ("min", "p50", "max")] == pytest.approx([100, 200, 300])
    assert figures["lag_ms"]["max"] == pytest.approx(200)


def test_users_keep_their_connections_and_never_exceed_their_number() -> None:
    running = most = 0

    async def script(body: dict[str, Any], stream: Stream) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
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
    (wrong := tmp_path / "wrong.json").write_text("{}")
    assert main(["bench", "compare", str(file), str(wrong)]) == EXIT_USAGE
    assert capsys.readouterr().err == (
        f"turnstile: {wrong} is not a result of turnstile bench serve.\n"
    )


def test_requests_to_warm_up_are_sent_and_not_counted(tmp_path: Path) -> None:
    lengths: list[int] = []

    async def script(body: dict[str, Any], stream: Stream) -> None:
        lengths.append(body["max_tokens"])
        await answer_at_once(body, stream)

    file = tmp_path / "result.json"
    words = ["bench", "serve", "--workload", "W4", "--num-warmups", "3", "--output", str(file)]
    with in_a_thread(script) as url:
        assert main([*words, "--url", url]) == 0
    assert lengths == [8] * 3 + [128] * 5
    assert json.loads(file.read_text())["completed"] == 5


def test_a_server_that_still_loads_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    async def loading(fake: FakeServer, path: str, writer: asyncio.StreamWriter) -> bool:
        nonlocal looks
        looks += 1
        if path == "/v1/models" and looks < 3:
            respond(writer, 200, {"data": []})
            return True
        return False

    monkeypatch.setattr(FakeServer, "tell", loading)

    async def go(seconds: float) -> str:
        async with serving(answer_at_once) as (_, server):
            return await wait_until_ready(server, seconds)

    with pytest.raises(ServerError, match="lists no model"):
        virtual_time.run(monkeypatch, go(0.0))
    assert virtual_time.run(monkeypatch, go(60.0)) == "fake"
