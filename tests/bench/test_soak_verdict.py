"""The soak's judge: what passes as an answer, and what does not."""

from __future__ import annotations

import random
from typing import Any

import pytest

from turnstile.bench.http import Server
from turnstile.bench.soak.__main__ import FLAT, JUDGED_FROM, _memory
from turnstile.bench.soak.asking import Answer
from turnstile.bench.soak.orders import Order, content, nonsense, outcome, random_order, samples
from turnstile.bench.soak.target import Reading

STREAM = Order("/v1/completions", {"stream": True, "n": 2})
BODY = Order("/v1/completions", {})


def chunk(index: int, text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": index, "text": text, "finish_reason": finish}]}


def stream(*events: dict[str, Any], done: int = 1, trailing: bool = False) -> Answer:
    return Answer(200, events=list(events), done=done, trailing=trailing)


WHOLE = (chunk(0, "a"), chunk(1, "b", "stop"), chunk(0, "c", "length"))


def test_a_whole_stream_is_an_answer_with_a_content() -> None:
    assert outcome(STREAM, stream(*WHOLE)) == "answered"
    assert content(STREAM, stream(*WHOLE))[:2] == [["ac", "length", []], ["b", "stop", []]]
    assert outcome(BODY, Answer(200, body=chunk(0, "x", "stop"))) == "answered"


@pytest.mark.parametrize(
    "wrong",
    [
        stream(*WHOLE, done=0),
        stream(*WHOLE, done=2),
        stream(*WHOLE, trailing=True),
        stream(*WHOLE[:2]),
        stream(*WHOLE, chunk(1, "", "stop")),
        stream(*WHOLE[:2], chunk(0, "c", "error")),
        stream(*WHOLE, chunk(2, "d", "stop")),
        Answer(503),
        Answer(404),
        Answer(429),
    ],
)
def test_what_is_not_exactly_one_answer_is_wrong(wrong: Answer) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        outcome(STREAM, wrong)


def test_refusals_time_outs_and_failures_are_told_apart() -> None:
    assert outcome(STREAM, Answer(503, retry_after=True)) == "refused"
    assert outcome(STREAM, Answer(504)) == "timeout"
    assert outcome(STREAM, Answer(500)) == "failed"
    assert outcome(STREAM, stream({"error": {"code": "internal_error"}})) == "failed"
    assert outcome(STREAM, stream({"error": {"code": "deadline_exceeded"}})) == "timeout"


@pytest.mark.parametrize(("growth", "holds"), [(1.0, True), (FLAT - 0.01, True), (1.1, False)])
def test_memory_that_grows_is_found(growth: float, holds: bool) -> None:
    seconds = JUDGED_FROM
    readings = [
        Reading(float(t), int(10**8 * (1 + (growth - 1) * t / seconds * 2)), 10**9)
        for t in range(int(seconds))
    ]
    api, engine = _memory(readings, seconds)
    assert api.holds == holds
    assert engine.holds


def test_the_sample_is_the_same_every_time_and_the_rest_depends_on_the_seed() -> None:
    assert samples(5) == samples(5)
    assert random_order(random.Random(1)) == random_order(random.Random(1))
    assert random_order(random.Random(1)) != random_order(random.Random(2))
    server = Server("127.0.0.1", 80)
    kinds = {nonsense(random.Random(seed), server).request[:60] for seed in range(50)}
    assert len(kinds) > 5
