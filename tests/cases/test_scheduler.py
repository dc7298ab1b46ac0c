"""Reported faults of kind a: who runs, who waits, and who starves."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cases.servers import LONG_POOL, occupied, preemptions, queued, teach_short_outputs, text
from e2e.harness import PATIENCE, ServerProcess, text_of, until
from e2e.pool import Srv, flags

pytestmark = pytest.mark.e2e

BASE: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


class Traced:
    """A server with room for requests that run for a minute, and the trace of its steps."""

    def __init__(self, server: ServerProcess, path: Path) -> None:
        self.server, self._path = server, path

    def steps(self, since: float = 0.0) -> list[dict[str, Any]]:
        """What was in each step that began then or later (microseconds)."""
        told = [event for event in self._told() if event["ph"] == "X" and event["ts"] >= since]
        return [event["args"] | {"ts": event["ts"]} for event in told]

    def began(self, answer: list[dict[str, Any]], part: str) -> float:
        """When an answer entered a part of its way, on the clock of the steps."""

        def seen() -> list[float]:
            return [
                event["ts"]
                for event in self._told()
                if event["ph"] == "b"
                and event["name"] == part
                and event["id"].startswith(answer[0]["id"])
            ]

        until(seen, "it is not in the trace")  # what happened is written a little later
        return seen()[0]

    def _told(self) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = json.loads(self._path.read_text())
        return told


@pytest.fixture(scope="module")
def traced(long: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    settings = flags(pages=LONG_POOL, chunk=64, seqs=8, prefix=False, trace=path)
    with ServerProcess(long, **settings) as server:
        yield Traced(server, path)
        server.check()


def stream(server: ServerProcess, length: int, seed: int, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream after a prompt of ``length`` tokens."""
    prompt = server.tokens(length, seed=seed)
    return list(server.stream("/v1/completions", prompt=prompt, **BASE | body))


# B01 -------------------------------------------------------------------------------------------


def test_b01_what_exceeds_the_pool_is_refused_and_nobody_waits_behind_it(srv: Srv) -> None:
    server = srv(pages=20, ctx=2048, seqs=4)
    hopeless: list[dict[str, Any]] = [
        {"prompt": server.tokens(600, seed=1), "max_tokens": 4},
        {"prompt": server.tokens(10, seed=1), "max_tokens": 600},
        {"prompt": server.tokens(100, seed=1), "max_tokens": 100, "n": 4},
        {"prompt": server.tokens(100, seed=1), "max_tokens": 100, "best_of": 4},
        {"prompt": [server.tokens(9, seed=1), server.tokens(600, seed=1)], "max_tokens": 4},
    ]
    for body in hopeless:
        answer = server.post("/v1/completions", **body)
        assert answer.status_code == 400, body
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "20 pages" in error["message"], "the limit is named"
        assert server.complete(server.tokens(20, seed=2), max_tokens=4)[0] == 200
    assert server.chat("x" * 500, max_tokens=4)[0] == 400
    assert server.metric("turnstile_requests_waiting") == 0


def test_b01_what_fills_the_pool_to_the_last_token_runs(srv: Srv) -> None:
    server = srv(pages=20, ctx=2048, seqs=4)
    for prompt, output in ((316, 4), (319, 1), (300, 21)):
        status, answer = server.complete(server.tokens(prompt, seed=3), **BASE, max_tokens=output)
        assert status == 200, answer
        assert answer["usage"]["completion_tokens"] == output
    # The last output is never written to a page: 321 tokens fit, 322 do not.
    assert server.complete(server.tokens(300, seed=3), **BASE, max_tokens=22)[0] == 400


def test_b01_a_context_larger_than_the_pool_is_said_at_the_start(
    srv: Srv, server: ServerProcess
) -> None:
    log = srv(pages=20, ctx=2048, seqs=4).log
    assert "The KV pool holds 320 tokens, less than --max-model-len (2,048)" in log
    assert "The KV pool holds" not in server.log


# B03, B05 ----------------------------------------------------------------------------------------


def test_b03_others_stream_on_while_a_long_prompt_is_computed(traced: Traced) -> None:
    server = traced.server
    with occupied(server, 1):
        big, newcomer = server.together(
            [
                lambda: stream(server, 1500, 2, max_tokens=1),
                lambda: stream(server, 16, 3, max_tokens=4),
            ]
        )
        began, ended = traced.began(big, "prefill"), traced.began(big, "decode")
        assert traced.began(newcomer, "decode") < ended, "it waits for a long prompt"
    computing = [
        step for step in traced.steps(began) if step["ts"] < ended and step["prefill_tokens"]
    ]
    assert len(computing) >= 1500 // 64
    # Every step that computes a chunk of the long prompt also draws for the one that decodes.
    assert all(step["draws"] for step in computing)


def test_b05_newcomers_start_while_somebody_decodes(traced: Traced) -> None:
    server = traced.server
    with occupied(server, 1) as (long,):
        late = server.together(
            [lambda k=k: stream(server, 200, k, max_tokens=4) for k in (2, 3, 4)]
        )
        assert not long.has_answer, "they had to wait until the long one ended"
    began = min(traced.began(each, "prefill") for each in late)
    started = max(traced.began(each, "decode") for each in late)
    # An unloaded prompt of 200 takes 4 steps of 64; three share them, so 10 and their outputs.
    assert sum(step["ts"] < started for step in traced.steps(began)) <= 16


# B07 ---------------------------------------------------------------------------------------------

PREEMPTED = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 1.0, "presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"temperature": 0.7, "repetition_penalty": 1.3, "logprobs": 2},
    {"temperature": 1.0, "n": 2},
    {"temperature": 1.0, "min_tokens": 40, "ignore_eos": False},
    {"temperature": 1.0, "structured_outputs": {"regex": "[a-z ]{60}"}},
    {"temperature": 1.0, "stop": ["e", "\ufffd"], "min_tokens": 50},
]


@pytest.mark.parametrize("how", PREEMPTED, ids=lambda how: "-".join(sorted(how)))
def test_b07_a_preempted_request_ends_as_if_it_had_not_been(
    srv: Srv, server: ServerProcess, how: dict[str, Any]
) -> None:
    roomy, tight = server, srv(pages=12, chunk=64)
    width = how.get("n", 1)

    def run(server: ServerProcess, k: int) -> tuple[list[str], dict[str, Any], list[Any]]:
        body = {"max_tokens": 60 // width, "seed": k, **({"ignore_eos": True} | how)}
        prompt = roomy.tokens(60, seed=k)
        options = {"include_usage": True}
        events = list(
            server.stream("/v1/completions", prompt=prompt, **body, stream_options=options)
        )
        assert not any("error" in event for event in events)
        probabilities = [
            p
            for event in events
            for choice in event["choices"]
            for p in (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]
        ]
        usage = events[-1]["usage"]
        usage["prompt_tokens_details"] = None
        return [text_of(events, i) for i in range(width)], usage, probabilities

    expected = roomy.gather([lambda k=k: run(roomy, k) for k in range(8)])
    assert not preemptions(roomy)
    before = preemptions(tight)
    teach_short_outputs(tight)
    assert tight.together([lambda k=k: run(tight, k) for k in range(8)]) == expected
    assert preemptions(tight) > before, "nobody was preempted: the case proves nothing"


# B09 ---------------------------------------------------------------------------------------------


def test_b09_the_context_limit_is_exact_and_leaves_no_trace(srv: Srv) -> None:
    server = srv(pages=64, ctx=256)
    table: list[tuple[int, dict[str, Any], int]] = [
        (254, {"max_tokens": 1}, 200),
        (255, {"max_tokens": 1}, 200),
        (256, {"max_tokens": 1}, 400),
        (257, {"max_tokens": 1}, 400),
        (256, {"max_tokens": 0}, 400),  # without echo there is nothing to answer
        (256, {"max_tokens": 0, "echo": True}, 200),
        (257, {"max_tokens": 0, "echo": True}, 400),
        (256, {}, 400),
        (255, {}, 200),
        (255, {"max_tokens": 2}, 400),
        (2, {"max_tokens": 255}, 400),
        (1, {"max_tokens": 255}, 200),
    ]

    def one(length: int, fields: dict[str, Any], expected: int) -> None:
        answer = server.post(
            "/v1/completions", prompt=server.tokens(length, seed=length), **BASE | fields
        )
        assert answer.status_code == expected, (length, fields, answer.text)
        if expected == 400 and fields.get("max_tokens") != 0:
            message = answer.json()["error"]["message"]
            assert "256" in message
            assert str(length) in message

    for row in table:
        one(*row)
        assert server.metric("turnstile_requests_waiting") == 0
    server.gather([lambda row=row: one(*row) for row in table * 2])


# B11 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fair", "priority"])
def test_b11_priority_orders_those_who_wait_and_stops_nobody(
    srv: Srv, single: ServerProcess, long: Path, policy: str
) -> None:
    server = single
    if policy == "priority":
        server = srv(
            long, pages=LONG_POOL, seqs=1, queue=4, scheduling_policy=policy, max_queue_wait=0
        )
    with (
        occupied(server, 1, priority=10) as (running,),
        queued(server, 3, priority=10) as others,
        ThreadPoolExecutor(1) as client,
    ):
        urgent = client.submit(stream, server, 8, 20, max_tokens=4, priority=-10_000)
        until(lambda: server.metric("turnstile_requests_waiting") == 4)
        assert not urgent.done(), "nobody who runs is stopped for a more urgent one"
        running.reset()
        assert text_of(urgent.result())
        # The freed slot was the urgent one's: had one of the others had it, that one would run on.
        until(lambda: server.metric("turnstile_requests_waiting") == 2)
        assert server.metric("turnstile_requests_running") == 1
        assert not any(other.has_answer for other in others)
    assert preemptions(server) == 0


# B13 ---------------------------------------------------------------------------------------------


def test_b13_every_stream_has_its_own_channel_and_a_slow_reader_slows_nobody(
    server: ServerProcess,
) -> None:
    body = {**BASE, "max_tokens": 40}
    expected = [text(server.complete(server.tokens(8, seed=k), **body)) for k in range(16)]
    slow_began, release = threading.Event(), threading.Event()

    def slow() -> list[dict[str, Any]]:
        stream: Iterator[dict[str, Any]] = server.stream(
            "/v1/completions", prompt=server.tokens(8, seed=0), **body
        )
        events = [next(stream)]
        slow_began.set()
        assert release.wait(PATIENCE)  # it does not read until all the others have ended
        return events + list(stream)

    def quick(k: int) -> list[dict[str, Any]]:
        assert slow_began.wait(PATIENCE)
        return list(server.stream("/v1/completions", prompt=server.tokens(8, seed=k), **body))

    def quicks() -> list[list[dict[str, Any]]]:
        try:
            return server.gather([lambda k=k: quick(k) for k in range(1, 16)])
        finally:
            release.set()

    first, others = server.gather([slow, quicks])
    streams = [first, *others]
    ids = set()
    for k, events in enumerate(streams):
        assert text_of(events) == expected[k]
        mine = {event["id"] for event in events}
        assert len(mine) == 1
        ids |= mine
        reasons = [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]]
        assert reasons == ["length"]
    assert len(ids) == 16
