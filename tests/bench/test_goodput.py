"""Goodput, refusals, stutter, and what the server's usage event tells beyond tokens."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.fake_server import Stream, respond, serving
from turnstile.bench.arrivals import ClosedLoop
from turnstile.bench.drive import Driver
from turnstile.bench.metrics import Figures, goodput, measure, parse_limits
from turnstile.bench.plan import Planned
from turnstile.bench.records import Record
from turnstile.bench.report import table
from turnstile.bench.workloads import choose


def record(
    outcome: Literal["completed", "failed", "incomplete"] = "completed",
    times: tuple[float, ...] = (0.1, 0.2, 0.3),
    ended: float = 0.3,
    status: int = 200,
) -> Record:
    tokens = len(times)
    return Record(outcome, 0.0, 0.0, ended, list(times), 4, tokens, tokens, "usage", status=status)


def test_goodput_counts_refusals_and_failures_as_misses() -> None:
    records = [
        record(),
        record(times=(0.6, 0.7)),  # first token late
        record("failed", times=(), status=503),
        record("failed", times=()),
    ]
    figures = goodput(records, 2.0, {"ttft": 500.0})
    assert (figures["good"], figures["judged"]) == (1, 4)
    assert figures["attainment"] == 0.25
    assert figures["requests_per_s"] == 0.5


def test_a_request_cut_off_is_judged_only_where_it_had_already_missed() -> None:
    waiting = record("incomplete", times=(), ended=0.4)
    assert goodput([waiting], 1.0, {"ttft": 500.0})["judged"] == 0
    assert goodput([waiting], 1.0, {"ttft": 300.0})["judged"] == 1
    started = record("incomplete", times=(0.1,), ended=9.0)
    assert goodput([started], 1.0, {"ttft": 500.0})["judged"] == 0
    assert goodput([started], 1.0, {"e2el": 5000.0}) == {
        "limits_ms": {"e2el": 5000.0},
        "good": 0,
        "judged": 1,
        "attainment": 0.0,
        "requests_per_s": 0.0,
    }


def test_limits_are_read_as_vllm_writes_them_and_wrong_ones_are_refused() -> None:
    assert parse_limits(["ttft:500", "e2el:2e3"]) == {"ttft": 500.0, "e2el": 2000.0}
    for wrong in ("tfft:500", "ttft", "ttft:fast", "ttft:0", "ttft:nan"):
        with pytest.raises(ValueError, match="--goodput"):
            parse_limits([wrong])


@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=60))
def test_the_longest_tenth_lies_between_the_mean_gap_and_the_longest(gaps: list[float]) -> None:
    times = [0.0]
    for gap in gaps:
        times.append(times[-1] + gap)
    stutter = record(times=tuple(times)).worst_gap
    actual = record(times=tuple(times)).gaps
    assert stutter is not None
    assert sum(actual) / len(actual) - 1e-9 <= stutter <= max(actual) + 1e-9


def test_one_stall_in_twenty_gaps_is_half_of_the_longest_tenth() -> None:
    times = [0.01 * i for i in range(20)]
    stalled = record(times=(*times, times[-1] + 1.0))
    assert stalled.worst_gap == pytest.approx((1.0 + 0.01) / 2)
    assert record(times=(0.1,)).worst_gap is None


def test_refusals_queue_time_and_cached_tokens_reach_the_report() -> None:
    asked = 0

    async def script(body: dict[str, Any], stream: Stream) -> None:
        nonlocal asked
        asked += 1
        if asked % 2 == 0:
            respond(stream.writer, 503, {"error": {"code": "engine_overloaded"}})
            return
        await stream.head()
        await stream.text("a")
        usage = {
            "prompt_tokens": 20,
            "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": 16},
        }
        metrics = {"queue_time_ms": 12.5}
        await stream.data(json.dumps({"choices": [], "usage": usage, "metrics": metrics}))
        await stream.data("[DONE]")
        stream.writer.write(b"0\r\n\r\n")

    figures = asyncio.run(_figures(script, 4))
    assert (figures["completed"], figures["failed"], figures["rejected"]) == (2, 2, 2)
    assert figures["cached_tokens"] == 32
    assert figures["queue_ms"]["p50"] == 12.5
    assert figures["goodput"]["attainment"] == 0.5
    workload = {"name": "W4", "summary": "one user"}
    printed = table({"workload": workload, "median": figures, "repetitions": [figures]})
    assert "Queue Time" in printed
    assert "Request goodput (req/s):" in printed
    assert "engine_overloaded" in printed


def test_a_kept_connection_that_the_server_closes_is_no_failed_request() -> None:
    async def script(body: dict[str, Any], stream: Stream) -> None:
        await stream.head()
        await stream.text("a")
        await stream.end(1, 1)
        stream.writer.close()  # as a server whose keep-alive time is over

    figures = asyncio.run(_figures(script, 5))
    assert figures["completed"] == 5


def test_a_server_that_always_resets_fails_every_request_and_is_not_asked_for_ever() -> None:
    asked = 0

    async def script(body: dict[str, Any], stream: Stream) -> None:
        nonlocal asked
        asked += 1
        stream.reset()

    figures = asyncio.run(_figures(script, 3))
    assert (figures["completed"], figures["failed"], asked) == (0, 3, 3)


def test_burstiness_is_for_open_loops_and_marks_the_workload_as_changed() -> None:
    with pytest.raises(ValueError, match="open loop"):
        choose("W1", burstiness=0.5)
    assert choose("W5", burstiness=0.5).name == "W5*"


async def _figures(script: Any, requests: int) -> Figures:
    plan = [Planned([1], 1)] * requests
    async with serving(script) as (_, server):
        run = await Driver(server, "fake", plan, ClosedLoop(1)).run()
        return measure(run, {"e2el": 60_000.0})
