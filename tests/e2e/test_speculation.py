"""A server that guesses (``--spec-method ngram``) gives the answers of one that does not."""

from __future__ import annotations

import asyncio
import os
import signal
from itertools import chain
from typing import Any

import pytest

from e2e.following import Followed, Order, follow, until
from e2e.harness import ServerProcess
from turnstile.models.default_model import NAME

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SONG = "Row, row, row your boat, gently down the stream. " * 3
TOKENS = 120


def orders() -> list[Order]:
    """What repeats itself, on both routes, with everything that looks at single tokens."""
    common = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    song = {**common, "prompt": SONG}
    chat = {**common, "messages": [{"role": "user", "content": f"Sing it again: {SONG}"}]}
    bodies = [
        ("greedy", COMPLETIONS, song),
        ("drawn", COMPLETIONS, {**song, "temperature": 0.3, "seed": 5}),
        ("pair", COMPLETIONS, {**song, "temperature": 0.7, "seed": 6, "n": 2}),
        ("logprobs", COMPLETIONS, {**song, "logprobs": 2}),
        ("stop", COMPLETIONS, {**song, "prompt": f"{SONG}\n{SONG}", "stop": ["stream. Row, row"]}),
        ("penalty", COMPLETIONS, {**song, "repetition_penalty": 1.1}),
        ("chat", CHAT, chat),
        ("chat logprobs", CHAT, {**chat, "logprobs": True, "top_logprobs": 1}),
    ]
    streams = [Order(name, path, body) for name, path, body in bodies]
    return [*streams, Order("whole", COMPLETIONS, {**song, "prompt": f"1. {SONG}"}, stream=False)]


def test_answers_are_the_same_even_where_the_engine_is_killed_in_the_middle() -> None:
    with ServerProcess(NAME) as plain:
        expected = asyncio.run(follow(plain.url, orders()))
        before = plain.scrape()
    with ServerProcess(NAME, spec_method="ngram") as server:
        guessed = asyncio.run(follow(server.url, orders()))
        usage = server.post("/v1/completions", **orders()[0].body).json()["usage"]
        metrics = server.scrape()
        pid = server.engine_pid

        async def kill(followed: list[Followed]) -> None:
            await until(lambda: all(min(f.chunks) for f in followed[:4]), "it does not begin")
            os.kill(pid, signal.SIGKILL)

        survived = asyncio.run(follow(server.url, orders(), kill))
        server.check()
    for answers in (guessed, survived):
        for answer, other in zip(answers, expected, strict=True):
            assert _told(answer) == _told(other), answer.order.name
            assert not answer.errors
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0
    assert usage["completion_tokens"] == TOKENS
    for name in ("turnstile_accepted_draft_tokens_total", "vllm:spec_decode_num_drafts_total"):
        assert metrics.total(name) > 0
        assert before.total(name) == 0
    by_place = metrics.total("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    assert by_place == metrics.total("turnstile_accepted_draft_tokens_total")
    assert sum(guessed[0].chunks) < sum(expected[0].chunks), "several tokens came at once"


def _told(answer: Followed) -> tuple[Any, ...]:
    """All that was said, however it was cut into events."""
    assert answer.usage is not None
    logprobs: list[list[Any]] = []
    for events in answer.logprobs:  # chat has entries of tokens, completions have three lists
        columns = zip(*events, strict=True) if answer.order.path == COMPLETIONS else [events]
        logprobs.append([list(chain.from_iterable(column)) for column in columns])
    counts = [answer.usage[name] for name in ("prompt_tokens", "completion_tokens")]
    return answer.text, answer.finish, logprobs, counts
