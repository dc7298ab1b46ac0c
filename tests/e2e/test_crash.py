"""``kill -9`` of the engine under the default model: nobody's answer changes.

A crowd as mixed as clients are runs twice on one server: undisturbed, and with the engine killed
in the middle. Both times every client must see the same text, log-probabilities and usage.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from e2e.following import Followed, Order, follow, until
from e2e.harness import ServerProcess
from turnstile.models.default_model import NAME

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(600)]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENS = 100
"""Outputs of each stream of the crowd."""
OUT, TO_COME = 5, 20
"""Tokens a stream has out, and has still to come, when the engine is killed."""
LONG = 2
"""Long prompts among the late ones; with the crowd they fill the slots."""
SLOTS = 57
BUDGET = 128
"""Tokens of a step: so few that a long prompt is in its prefill whenever one looks."""


def crowd() -> list[Order]:
    """Fifty streams, 54 sequences: greedy and seeded, on both routes, with everything that has a
    state of its own: penalties, biases, grammars, log-probabilities, several samples.
    """
    bodies: list[tuple[str, str, dict[str, Any]]] = []

    def add(count: int, kind: str, path: str, **body: Any) -> None:
        for _ in range(count):
            number = len(bodies)
            text = f"Fact number {number} about rivers and towns:"
            prompt: Any = {"prompt": text}
            if path == CHAT:
                prompt = {"messages": [{"role": "user", "content": text}]}
            common = {"max_tokens": TOKENS, "ignore_eos": True, "seed": number}
            bodies.append((f"{kind} {number}", path, {**prompt, **common, **body}))

    add(12, "greedy", COMPLETIONS, temperature=0)
    add(12, "seeded", COMPLETIONS, temperature=0.9, top_p=0.95)
    add(3, "greedy", CHAT, temperature=0)
    add(4, "seeded", CHAT, temperature=1, top_k=50)
    add(3, "penalties", COMPLETIONS, temperature=0, repetition_penalty=1.3)
    add(
        3, "penalties", CHAT, temperature=0.8, presence_penalty=0.7, frequency_penalty=0.9,
        logit_bias={"260": 3.0},
    )  # fmt: skip
    add(3, "logprobs", COMPLETIONS, temperature=0, logprobs=3)
    add(2, "logprobs", CHAT, temperature=1, logprobs=True, top_logprobs=2)
    add(2, "pair", COMPLETIONS, temperature=0.8, n=2)
    add(2, "pair", CHAT, temperature=0.8, n=2, logprobs=True)
    regex = {"regex": r"( [a-z]+,){120}"}
    add(2, "grammar", COMPLETIONS, temperature=0.7, structured_outputs=regex)
    add(2, "min_tokens", COMPLETIONS, temperature=0, min_tokens=TOKENS, ignore_eos=False)
    return [Order(name, path, body) for name, path, body in bodies]


def late() -> list[Order]:
    """What comes just before the kill: two long prompts that will be in their prefill (one of
    them two samples that have not forked), and four that find no slot, one of them not a stream.
    The first :data:`LONG` are the long ones.
    """
    long = " ".join(f"line {number} of the long report;" for number in range(400))
    body = {"max_tokens": 8, "ignore_eos": True, "seed": 7}
    return [
        Order("mid-prefill", COMPLETIONS, {**body, "prompt": "A: " + long, "temperature": 0}),
        Order("mid-prefill pair", COMPLETIONS, {**body, "prompt": "B: " + long, "n": 2}),
        *(
            Order(f"queued {k}", COMPLETIONS, {**body, "prompt": f"Queue {k}:"}, stream=k > 0)
            for k in range(4)
        ),
    ]


def stopped(orders: list[Order], undisturbed: list[Followed]) -> dict[int, Order]:
    """Some of the crowd again, by their place, with a stop string from late in their text."""
    again = {}
    for place, (order, known) in enumerate(zip(orders, undisturbed, strict=True)):
        if order.path == COMPLETIONS and place % 4 == 0 and order.n == 1:
            text = known.text[0]
            start = len(text) * 7 // 8
            body = {**order.body, "stop": [text[start : start + 9]]}
            again[place] = replace(order, name=f"stop, {order.name}", body=body)
    return again


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(
        NAME, max_num_seqs=SLOTS, max_num_batched_tokens=BUDGET, log_stats_interval=0
    ) as running:
        yield running


class Kill:
    """Joins the late ones to a running crowd and kills the engine when all is as wanted."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.pid = engine_of(server)["pid"]
        self.late: list[asyncio.Task[list[Followed]]] = []
        self.at_kill: list[list[int]] = []
        self.seconds_down = self.seconds_silent = 0.0

    async def __call__(self, followed: list[Followed]) -> None:
        await until(
            lambda: all(min(each.chunks) >= OUT for each in followed), "the crowd does not run"
        )
        # One kind after the other: a short prompt would overtake a long one and take its slot.
        await self._join(late()[:LONG], prefill=LONG, queued=0)
        await self._join(late()[LONG:], prefill=LONG, queued=len(late()) - LONG)
        self.at_kill = [list(each.chunks) for each in followed]
        assert not any(task.done() for task in self.late)
        os.kill(self.pid, signal.SIGKILL)
        began = time.monotonic()
        await until(self._replaced, "the engine does not come back")
        self.seconds_down = time.monotonic() - began
        await until(
            lambda: all(
                None not in each.finish or sum(each.chunks) > sum(before)
                for each, before in zip(followed, self.at_kill, strict=True)
            ),
            "the streams do not go on",
        )
        self.seconds_silent = time.monotonic() - began

    def _replaced(self) -> bool:
        """Whether another engine serves: that none did may be over before one looks."""
        ready = self.server.http.get("/readyz").status_code == 200
        return ready and engine_of(self.server)["pid"] != self.pid

    async def _join(self, orders: list[Order], **wanted: int) -> None:
        """Send these, and wait until so many requests are in each state."""
        self.late.append(asyncio.create_task(follow(self.server.url, orders)))
        states: Counter[str] = Counter()

        def all_in() -> bool:
            nonlocal states
            alive = self.server.http.get("/v1/requests?state=alive").json()["data"]
            states = Counter(request["state"] for request in alive)
            return all(states[state] == count for state, count in wanted.items())

        await until(all_in, lambda: f"wanted {wanted}, last seen {dict(states)}")


def engine_of(server: ServerProcess) -> dict[str, Any]:
    engine: dict[str, Any] = server.http.get("/server_info").json()["engine"]
    return engine


def test_fifty_streams_go_on_through_kill_9_with_the_answers_of_an_undisturbed_run(
    server: ServerProcess,
) -> None:
    orders = crowd()
    prefill = 0.0

    async def watch(followed: list[Followed]) -> None:
        nonlocal prefill
        began = time.monotonic()
        await until(lambda: all(min(each.chunks) for each in followed), "it does not begin")
        prefill = time.monotonic() - began

    undisturbed = asyncio.run(follow(server.url, orders, watch))
    stops = stopped(orders, undisturbed)
    others = asyncio.run(follow(server.url, [*stops.values(), *late()]))
    for place, answer in zip(stops, others, strict=False):
        orders[place], undisturbed[place] = answer.order, answer
    undisturbed_late = others[len(stops) :]
    server.post("/reset_prefix_cache")
    kill = Kill(server)

    async def disturbed() -> tuple[list[Followed], list[Followed]]:
        followed = await follow(server.url, orders, kill)
        return followed, [each for task in kill.late for each in await task]

    survived, survived_late = asyncio.run(disturbed())
    engine = engine_of(server)
    assert engine["epoch"] == 2
    assert engine["pid"] != kill.pid
    print(
        f"\nThe engine was back {kill.seconds_down:.1f} s after the kill, the last stream went on "
        f"{kill.seconds_silent:.1f} s after it; at first their prefill had taken {prefill:.1f} s."
    )
    # The kill came where it was meant to.
    met = 0
    for each, before in zip(survived, kill.at_kill, strict=True):
        assert min(before) >= OUT
        met += all(after - out >= TO_COME for after, out in zip(each.chunks, before, strict=True))
    assert met >= 40, f"only {met} streams had {TO_COME} tokens to come"
    # And nobody noticed.
    for each, other in zip(survived + survived_late, undisturbed + undisturbed_late, strict=True):
        assert each.answer == other.answer, each.order.name
        assert each.status == 200
        assert not each.errors
        assert each.done == each.order.stream
    server.check()
