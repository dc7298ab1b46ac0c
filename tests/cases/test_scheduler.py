"""Reported faults of kind a: who runs, who waits, and who starves."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cases.servers import LONG_POOL, occupied, preemptions, queued, teach_short_outputs, text, until
from e2e.harness import PATIENCE, ServerProcess, text_of
from e2e.pool import Srv

pytestmark = pytest.mark.e2e

BASE: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


class Timed(threading.Thread):
    """A stream that is read in a thread; ``times`` says when each of its tokens came."""

    def __init__(self, server: ServerProcess, prompt: list[int], **body: Any) -> None:
        super().__init__(daemon=True)
        self.times: list[float] = []
        self.events: list[dict[str, Any]] = []
        self._events = server.stream(
            "/v1/completions", prompt=prompt, return_token_ids=True, **BASE | body
        )
        self.start()

    def run(self) -> None:
        for event in self._events:
            self.times.append(time.monotonic())
            self.events.append(event)

    def tokens(self, count: int) -> None:
        """Wait until that many tokens are there."""
        end = time.monotonic() + PATIENCE
        while len(self.times) < count:
            assert time.monotonic() < end
            time.sleep(0.001)

    def whole(self) -> list[dict[str, Any]]:
        """Wait for its end; the events."""
        self.join(60)
        assert not self.is_alive()
        return self.events


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


def test_b03_others_stream_on_while_a_long_prompt_is_computed(cold: ServerProcess) -> None:
    server = cold
    victim = Timed(server, server.tokens(16, seed=1), max_tokens=400)
    victim.tokens(10)
    began = time.monotonic()
    big = Timed(server, server.tokens(1500, seed=2), max_tokens=1)
    newcomer = Timed(server, server.tokens(16, seed=3), max_tokens=4)
    big.whole()
    ended = big.times[0]
    newcomer.whole()
    victim.whole()
    # Every step that computes a chunk of the long prompt also draws for the victim.
    chunks = 1500 // 64
    assert sum(began <= t <= ended for t in victim.times) >= chunks - 1
    assert newcomer.times[0] < ended, "a short newcomer does not wait for a long prompt"


def test_b05_newcomers_start_while_somebody_decodes(cold: ServerProcess) -> None:
    server = cold
    long = Timed(server, server.tokens(8, seed=1), max_tokens=1500)
    long.tokens(5)
    late = [Timed(server, server.tokens(200, seed=k), max_tokens=4) for k in range(2, 5)]
    for each in late:
        each.whole()
    seen = len(long.times)
    assert seen < 1500, "they had to wait until the long one ended"
    # An unloaded prompt of 200 takes 4 steps of 64; three share them, so 12 and their outputs.
    assert sum(t <= late[-1].times[0] for t in long.times) < 10 * 16
    assert text_of(long.whole())


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
    assert tight.gather([lambda k=k: run(tight, k) for k in range(8)]) == expected
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
    ):
        urgent = Timed(server, server.tokens(8, seed=20), max_tokens=4, priority=-10_000)
        until(lambda: server.metric("turnstile_requests_waiting") == 4)
        assert not urgent.times, "nobody who runs is stopped for a more urgent one"
        running.reset()
        urgent.whole()
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
