"""Conversations with growing histories, and chats."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from bench import virtual_time
from bench.fake_server import FakeServer, Script, Stream, respond, serving
from turnstile.bench.arrivals import ClosedLoop, OpenLoop
from turnstile.bench.drive import Driver
from turnstile.bench.lengths import Fixed, Uniform
from turnstile.bench.metrics import Figures, measure
from turnstile.bench.plan import Planned
from turnstile.bench.session import Settings, bench
from turnstile.bench.workloads import Workload

TALK = Planned([1, 2], 2, (Planned([3], 1), Planned([4, 5], 2)))


async def answer_with_ids(body: dict[str, Any], stream: Stream) -> None:
    """Answers take a second, and consist of the ids 90, 91, …"""
    await asyncio.sleep(1.0)
    await stream.head()
    for number in range(body["max_tokens"]):
        choice = {"index": 0, "text": "word ", "token_ids": [90 + number]}
        await stream.data(json.dumps({"choices": [choice]}))
    await stream.end(len(body["prompt"]), body["max_tokens"])


async def answer_without_ids(body: dict[str, Any], stream: Stream) -> None:
    await stream.head()
    for _ in range(body["max_tokens"]):
        await stream.text("seven77 ")
    await stream.end(len(body["prompt"]), body["max_tokens"])


def test_every_question_carries_all_that_was_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    figures, asked = _converse(monkeypatch, answer_with_ids)
    assert [r["prompt"] for r in asked] == [
        [1, 2],
        [1, 2, 90, 91, 3],
        [1, 2, 90, 91, 3, 90, 4, 5],
    ]
    assert [r["max_tokens"] for r in asked] == [2, 1, 2]
    assert all(r["return_token_ids"] for r in asked)
    assert (figures["completed"], figures["prompt_tokens"]) == (3, 15)
    assert figures["ttft_ms"]["max"] == pytest.approx(1000)  # the user's own delay is none of it
    assert figures["duration_s"] == pytest.approx(3 + 2 * 5)


def test_where_the_server_tells_no_ids_its_text_is_tokenized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, asked = _converse(monkeypatch, answer_without_ids)
    assert [r["prompt"] for r in asked][1] == [1, 2, 7, 7, 3]  # the fake's ids are word lengths


def test_a_conversation_ends_with_the_answer_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(body: dict[str, Any], stream: Stream) -> None:
        respond(stream.writer, 503, {"error": {}})

    figures, asked = _converse(monkeypatch, refuse)
    assert (len(asked), figures["rejected"], figures["failed"]) == (1, 1, 1)


def test_conversations_begin_when_they_are_due_and_turns_when_they_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[tuple[float, int]] = []

    async def script(body: dict[str, Any], stream: Stream) -> None:
        begun.append((asyncio.get_running_loop().time() - 1000.0, len(body["prompt"])))
        await answer_with_ids(body, stream)

    async def go() -> None:
        async with serving(script) as (_, server):
            plan = [Planned([1], 1, (Planned([2], 1),))] * 2
            await Driver(server, "fake", plan, OpenLoop((0.5, 0.75))).run()

    virtual_time.run(monkeypatch, go())
    assert begun == [
        (pytest.approx(0.5), 1),
        (pytest.approx(0.75), 1),
        (pytest.approx(1.5), 3),
        (pytest.approx(1.75), 3),
    ]


def test_a_workload_with_turns_draws_them_and_the_report_counts_requests() -> None:
    workload = Workload("talk", "", 3, Fixed(4), Fixed(2), prefix=8, turns=Uniform(2, 4), users=2)

    async def go() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        async with serving(answer_without_ids) as (fake, server):
            return await bench(server, None, workload, Settings(warmup=0)), fake.requests

    result, asked = asyncio.run(go())
    firsts = [r["prompt"] for r in asked if len(r["prompt"]) == 12]
    assert len(firsts) == 3
    assert len({tuple(p[:8]) for p in firsts}) == 1
    assert result["median"]["completed"] == len(asked)
    assert 6 <= len(asked) <= 12


def test_chats_are_sent_as_messages_with_text() -> None:
    async def script(body: dict[str, Any], stream: Stream) -> None:
        await stream.head()
        for _ in range(body["max_completion_tokens"]):
            choice = {"index": 0, "delta": {"content": "yes "}}
            await stream.data(json.dumps({"choices": [choice]}))
        await stream.end(30, body["max_completion_tokens"])

    workload = Workload("talk", "", 1, Fixed(3), Fixed(2), turns=Fixed(2), users=1)
    settings = Settings(warmup=1, endpoint="/v1/chat/completions")

    async def go() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        async with serving(script) as (fake, server):
            return await bench(server, None, workload, settings), fake.requests

    result, asked = asyncio.run(go())
    assert [len(r["messages"]) for r in asked] == [1, 1, 3]
    first, answer, second = asked[2]["messages"]
    assert (first["role"], answer["role"], second["role"]) == ("user", "assistant", "user")
    assert len(first["content"].split()) == 3
    assert answer["content"] == "yes yes "
    assert result["median"]["output_tokens"] == 4
    assert result["backend"] == "openai-chat"


def _converse(patch: pytest.MonkeyPatch, script: Script) -> tuple[Figures, list[dict[str, Any]]]:
    async def by_words(text: str) -> list[int]:
        return [len(word) for word in text.split()]

    async def go() -> tuple[Figures, FakeServer]:
        async with serving(script) as (fake, server):
            driver = Driver(
                server,
                "fake",
                [TALK],
                ClosedLoop(1),
                tokenizer=by_words,  # type: ignore[arg-type]
                turn_delay=5.0,
            )
            return measure(await driver.run()), fake

    figures, fake = virtual_time.run(patch, go())
    return figures, fake.requests
