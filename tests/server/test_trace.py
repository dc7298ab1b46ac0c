"""The trace can be opened at any moment, tells what happened, and has bounds."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from server.served import PATIENCE, Serve
from server.test_requests import step, trail
from turnstile.core import events
from turnstile.engine.protocol import Snapshot, StepResult
from turnstile.server.config import ConfigError, ServerConfig
from turnstile.server.watch.trace import BEGAN, Trace
from turnstile.server.watch.trails import RequestLog

WANTED: dict[str, set[str]] = {
    "M": {"name", "pid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "C": {"name", "pid", "ts", "args"},
    "b": {"name", "cat", "id", "pid", "tid", "ts", "args"},
    "e": {"name", "cat", "id", "pid", "tid", "ts", "args"},
    "i": {"name", "s", "pid", "tid", "ts"},
}
"""What the trace event format asks of each phase that is written here, and nothing else."""


def check(event: dict[str, Any]) -> None:
    """One event, by the format's rules: fields and types, whole microseconds from the start on."""
    phase = event["ph"]
    assert set(event) - {"ph"} - ({"tid"} if phase == "M" else set()) == WANTED[phase], event
    assert isinstance(event["name"], str) and event["name"]  # noqa: PT018
    for field in ("pid", "tid", "ts", "dur"):
        assert type(event.get(field, 0)) is int, event
        assert event.get(field, 0) >= 0, event
    assert isinstance(event.get("args", {}), dict), event
    if phase == "M":
        wanted = {"process_name": "name", "thread_name": "name", "process_labels": "labels"}
        assert list(event["args"]) == [wanted[event["name"]]]
    elif phase == "C":
        assert event["args"]
        assert all(type(value) in (int, float) for value in event["args"].values()), event
    elif phase == "i":
        assert event["s"] in ("g", "p", "t")
    elif phase in "be":
        assert isinstance(event["id"], str)


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a trace, checked for what Perfetto needs to show them."""
    told: list[dict[str, Any]] = json.loads(path.read_text())
    for event in told:
        check(event)
    opened: Counter[tuple[str, str]] = Counter()
    for event in told:
        if event["ph"] in "be":
            opened[event["id"], event["name"]] += 1 if event["ph"] == "b" else -1
            assert opened[event["id"], event["name"]] in (0, 1), event
    return told


def spans(told: list[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    began = {e["name"]: e["ts"] for e in told if e["ph"] == "b"}
    return {e["name"]: (began[e["name"]], e["ts"]) for e in told if e["ph"] == "e"}


def test_steps_requests_and_counters_are_in_the_trace(serve: Serve, tmp_path: Path) -> None:
    async def test() -> None:
        async with serve(delay=0.001) as served:
            served.service.trace = served.service.requests.observer = trace
            answers = await asyncio.gather(
                *(served.complete("a secret", max_tokens=5) for _ in range(3))
            )
            assert {answer.status_code for answer in answers} == {200}
            trace.close()

    path = tmp_path / "trace.json"
    opened = time.monotonic()
    trace = Trace(str(path), 2**20)
    asyncio.run(test())
    told = read(path)
    steps = [event for event in told if event["ph"] == "X"]
    assert sum(event["args"]["draws"] for event in steps) == 15
    assert {event["name"] for event in told if event["ph"] == "C"} == {"pages", "sequences"}
    began = [event for event in told if event["ph"] == "b" and "tenant" in event["args"]]
    ended = [event for event in told if event["ph"] == "e" and "finish_reason" in event["args"]]
    assert len(began) == len(ended) == 3
    assert {event["args"]["output_tokens"] for event in ended} == {5}
    assert {event["args"]["max_tokens"] for event in began} == {5}
    assert {"queue", "decode"} <= {event["name"] for event in told}
    [labels] = [event["args"]["labels"] for event in told if event["name"] == "process_labels"]
    assert opened - 1e-3 < float(labels.removeprefix(BEGAN)) <= time.monotonic()
    assert "secret" not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_parts_of_a_request_lie_within_it_and_do_not_overlap(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    log = RequestLog()
    log.observer = trace = Trace(str(path), 2**20, began=0.0)
    log.accepted(trail("a"))
    step(log, events.Queued(0.0, "a", 0, "t", 10))
    step(log, events.Admitted(1.0, "a", 0, "t", 0, 1, 1.0))
    step(log, events.Decoding(2.0, "a", 0, 10))
    step(log, events.Preempted(3.0, "a", 0, 12, 1))
    step(log, events.Admitted(4.0, "a", 0, "t", 0, 1, 1.0))
    step(log, events.Queued(6.0, "a", 0, "t", 12), epoch=2)
    step(log, events.Finished(7.0, "a", 0, "t", "abort", 10, 2, 0, 1), epoch=2)
    log.closed("cmpl-a", "abort", 7.5)
    trace.close()
    marks = [event for event in read(path) if event["ph"] == "i"]
    assert [(mark["name"], mark["ts"]) for mark in marks] == [("engine lost", 4_000_000)]
    told = spans(read(path))
    assert told == {
        "queue": (0, 1_000_000),
        "prefill": (1_000_000, 2_000_000),
        "decode": (2_000_000, 3_000_000),
        "preempted": (3_000_000, 4_000_000),
        "recompute": (4_000_000, 4_000_000),
        "recovery": (4_000_000, 7_000_000),
        "x-a": (0, 7_500_000),
    }


def test_what_had_not_ended_shows_as_begun(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    log = RequestLog()
    log.observer = trace = Trace(str(path), 2**20, began=0.0)
    log.accepted(trail("a"))
    step(log, events.Queued(0.0, "a", 0, "t", 10))
    step(log, events.Admitted(1.0, "a", 0, "t", 0, 1, 1.0))
    trace.close()
    told = read(path)
    assert [e["name"] for e in told if e["ph"] == "b"] == ["x-a", "queue", "prefill"]
    assert [e["name"] for e in told if e["ph"] == "e"] == ["queue"]


def stepped(trace: Trace, number: int) -> None:
    event = events.Stepped(float(number), number, 4, 0, 4, 4, 0.01)
    trace.on_step(StepResult(1, number, [], [], Snapshot(time=float(number))), [event])


def test_the_file_is_whole_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = Trace(str(path), 2**20, began=0.0)
    assert len(read(path)) == 3, "it names its tracks and its clock from the start"
    stepped(trace, 1)
    end = time.monotonic() + PATIENCE
    while not any(event["ph"] == "X" for event in read(path)):
        assert time.monotonic() < end
        time.sleep(0.01)
    trace.close()


def test_a_full_file_is_turned_over_and_the_disk_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnstile.server.watch.trace._GATHER", 0.01)
    path, most = tmp_path / "trace.json", 2**16
    trace = Trace(str(path), most, began=0.0)
    last = 0
    for number in range(4000):
        stepped(trace, number)
        if number % 200 == 0:
            end = time.monotonic() + PATIENCE
            while trace._pending and time.monotonic() < end:
                time.sleep(0.005)
        last = number
    trace.close()
    older = tmp_path / "trace.json.1"
    assert path.stat().st_size <= most + 2**15
    assert older.stat().st_size <= most + 2**15
    assert sorted(p.name for p in tmp_path.iterdir()) == ["trace.json", "trace.json.1"]
    steps = [e["args"]["step"] for p in (older, path) for e in read(p) if e["ph"] == "X"]
    assert steps == list(range(steps[0], last + 1))


def test_a_disk_that_stands_still_costs_a_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnstile.server.watch.trace.MAX_PENDING", 50)
    monkeypatch.setattr("turnstile.server.watch.trace._GATHER", 60.0)
    trace = Trace(str(tmp_path / "trace.json"), 2**20, began=0.0)
    for number in range(200):
        stepped(trace, number)
    assert len(trace._pending) <= 50
    assert trace.dropped > 100
    trace.close()


def test_a_full_disk_ends_the_trace_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = Trace(str(tmp_path / "trace.json"), 2**20, began=0.0)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("turnstile.server.watch.trace.os.pwrite", full)
    stepped(trace, 1)
    end = time.monotonic() + PATIENCE
    while "The trace ends here" not in caplog.text:
        assert time.monotonic() < end
        time.sleep(0.01)
    stepped(trace, 2)
    trace.close()
    assert trace.dropped == 1


def test_a_trace_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Cannot write the trace"):
        Trace(str(tmp_path / "no" / "such" / "folder"), 2**20)
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path / "pipe", tmp_path, "/dev/null"):
        with pytest.raises(ConfigError, match="no regular file"):
            Trace(str(other), 2**20)
    with pytest.raises(ConfigError, match="trace-max-bytes"):
        ServerConfig(trace_max_bytes=10).check()
