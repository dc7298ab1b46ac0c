"""Faults of other load generators (kind e), against servers whose answers are known."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import virtual_time
from bench.fake_server import Script, Stream, in_a_thread, respond, serving
from turnstile.bench.arrivals import Arrivals, ClosedLoop
from turnstile.bench.drive import Driver
from turnstile.bench.metrics import Figures, distribution, measure, median_of, summarize
from turnstile.bench.plan import Planned
from turnstile.bench.records import Record
from turnstile.bench.report import table
from turnstile.cli.main import main


def figures_of(
    patch: pytest.MonkeyPatch,
    script: Script,
    plan: list[Planned],
    arrivals: Arrivals,
    limit: float | None = None,
) -> Figures:
    """What the generator reports of a script, on virtual time."""

    async def go() -> Figures:
        async with serving(script) as (_, server):
            return measure(await Driver(server, "fake", plan, arrivals, limit).run())

    return virtual_time.run(patch, go())


def test_b95_the_wait_for_the_first_token_is_no_gap_between_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def script(body: dict[str, Any], stream: Stream) -> None:
        await stream.head()
        await asyncio.sleep(1.0)
        for number in range(10):
            await asyncio.sleep(0.01 if number else 0.0)
            await stream.text("x")
        await stream.end(3, 10)

    figures = figures_of(monkeypatch, script, [Planned([1, 2, 3], 10)], ClosedLoop(1))
    assert figures["ttft_ms"]["p50"] == pytest.approx(1000)
    assert figures["itl_ms"]["count"] == 9
    assert figures["itl_ms"]["max"] == pytest.approx(10)
    assert figures["tpot_ms"]["mean"] == pytest.approx(10)
    assert figures["e2el_ms"]["mean"] == pytest.approx(1090)


def test_b97_tokens_are_those_of_usage_and_merged_events_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def script(body: dict[str, Any], stream: Stream) -> None:
        await stream.head()
        for number in range(15):  # three tokens an event, and a text that tokenizes to one
            await asyncio.sleep(0.03 if number else 0.5)
            await stream.text("   ")
        await stream.end(7, 45)

    figures = figures_of(monkeypatch, script, [Planned([1] * 7, 45)], ClosedLoop(1))
    assert (figures["output_tokens"], figures["prompt_tokens"]) == (45, 7)
    assert figures["output_throughput"] == pytest.approx(45 / 0.92)
    assert figures["tpot_ms"]["mean"] == pytest.approx(420 / 44)
    assert figures["itl_ms"]["mean"] == pytest.approx(30)
    assert "45 tokens in 15 events" in figures["warnings"][0]


def test_b97_without_usage_events_are_counted_and_that_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def script(body: dict[str, Any], stream: Stream) -> None:
        await stream.head()
        for _ in range(4):
            await stream.text("word ")
        await stream.done()

    figures = figures_of(monkeypatch, script, [Planned([1], 4)], ClosedLoop(1))
    assert (figures["completed"], figures["output_tokens"]) == (1, 4)
    assert "without usage" in figures["warnings"][0]


def test_b99_percentiles_are_linear_and_over_the_samples_of_the_mean() -> None:
    samples = [ms / 1000 for ms in range(1, 101)]
    figures = distribution(samples)
    found = [figures[n] for n in ("mean", "p50", "p90", "p99")]
    assert found == pytest.approx([50.5, 50.5, 90.1, 99.01])
    assert found[1:] == pytest.approx(list(np.percentile(np.array(samples) * 1000, [50, 90, 99])))
    assert (figures["count"], figures["std"]) == (100, pytest.approx(np.arange(1, 101).std()))


def test_b99_mean_and_percentiles_of_gaps_weigh_every_gap_alike() -> None:
    quick = _stream([0.0, *(1.0 + 0.01 * i for i in range(90))])
    slow = _stream([0.0, 1.0])
    figures = summarize([quick, slow], 2.0)
    gaps = [*quick.gaps, *slow.gaps]
    assert figures["itl_ms"]["count"] == len(gaps) == 91
    assert figures["itl_ms"]["mean"] == pytest.approx(1000 * np.mean(gaps))
    assert figures["itl_ms"]["p50"] == pytest.approx(1000 * np.median(gaps))
    assert figures["tpot_ms"]["count"] == 2  # one a request, and called by another name


@pytest.mark.parametrize("samples", [[], [0.25]])
def test_b99_one_sample_and_none_are_no_error_and_few_are_marked(samples: list[float]) -> None:
    figures = summarize([], 1.0) | {"ttft_ms": distribution(samples)}
    assert figures["ttft_ms"]["p99"] == (250 if samples else None)
    printed = table(_result(figures))
    assert ("P99 TTFT (ms)*:" in printed) == bool(samples)
    assert "linear" in printed  # how percentiles are taken is said under the figures


def test_b101_a_time_limit_keeps_the_tokens_seen_but_no_request_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def script(body: dict[str, Any], stream: Stream) -> None:
        await stream.head()
        for _ in range(1000):
            await asyncio.sleep(0.01)
            await stream.text("x")
        await stream.end(1, 1000)

    figures = figures_of(monkeypatch, script, [Planned([1], 1000)] * 4, ClosedLoop(4), limit=5.0)
    assert (figures["completed"], figures["incomplete"], figures["failed"]) == (0, 4, 0)
    assert figures["duration_s"] == pytest.approx(5)
    assert figures["output_throughput"] == pytest.approx(400, rel=0.01)
    assert figures["ttft_ms"]["count"] == figures["e2el_ms"]["count"] == 0


def test_b101_prompt_tokens_are_counted_once_and_apart_from_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def script(body: dict[str, Any], stream: Stream) -> None:
        await stream.head()
        await asyncio.sleep(2.0)
        await stream.text("x")
        await stream.end(len(body["prompt"]), 1)

    figures = figures_of(monkeypatch, script, [Planned([1] * 50, 1)] * 4, ClosedLoop(2))
    assert (figures["prompt_tokens"], figures["output_tokens"]) == (200, 4)
    assert figures["output_throughput"] == pytest.approx(1)
    assert figures["total_token_throughput"] == pytest.approx(51)


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
def test_b103_failures_are_told_with_reasons_and_the_file_is_written(
    script: Script, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    with in_a_thread(script) as url:
        code = main(["bench", "serve", "--workload", "W4", "--url", url, "--output", str(file)])
    assert code == 1
    printed = capsys.readouterr().out
    assert "Failed requests:" in printed
    assert "failed 5 ×: " in printed
    assert reason in printed
    assert json.loads(file.read_text())["median"]["failed"] == 5


def test_b103_without_a_server_there_is_a_sentence_and_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    code = main(["bench", "serve", "--url", "http://127.0.0.1:9", "--output", str(file)])
    assert code == 1
    assert "Nobody answers at 127.0.0.1:9" in capsys.readouterr().err
    assert "Nobody answers" in json.loads(file.read_text())["error"]


def _stream(times: list[float]) -> Record:
    tokens = len(times)
    return Record("completed", 0.0, 0.0, times[-1], times, 4, tokens, tokens, "usage", status=200)


def _result(figures: Figures) -> dict[str, Any]:
    workload = {"name": "W4", "summary": "one user"}
    return {"workload": workload, "median": median_of([figures]), "repetitions": [figures]}
