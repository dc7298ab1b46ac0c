"""``/v1/messages``: a chat in Anthropic's form."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from server.fake_engine import Failure
from server.served import Serve, Served
from server.test_reasoning import SAYS, THINKING
from server.test_tools import CALL, ROOM, WEATHER

TOOL = {
    "name": "weather",
    "description": "Weather of a city.",
    "input_schema": WEATHER["function"]["parameters"],  # type: ignore[index]
}
RAIN = [{"type": "text", "text": "rain"}]


async def send(served: Served, **body: Any) -> httpx.Response:
    asked = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 200}
    return await served.post("/v1/messages", **(asked | body))


def named_events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, whose names are checked on the way."""
    assert answer.status_code == 200, answer.text
    found = []
    for text in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = text.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def assembled(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that a stream's events add up to; each begins, grows and ends in its turn."""
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"]})
            is_open = True
        elif event["type"] == "content_block_delta":
            assert is_open
            delta, block = event["delta"], blocks[event["index"]]
            if delta["type"] == "input_json_delta":
                block["input"] = (block["input"] or "") + delta["partial_json"]
            elif delta["type"] != "signature_delta":
                block[block["type"]] += delta[block["type"]]
        elif event["type"] == "content_block_stop":
            is_open = False
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads(blocks[-1]["input"])
    assert not is_open
    return blocks


def without_ids(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in block.items() if k != "id"} for block in blocks]


@pytest.mark.parametrize(
    ("says", "kinds", "more", "reason"),
    [
        ("hello world", ["text"], {}, "end_turn"),
        (SAYS, ["thinking", "text"], {"thinking": {"type": "enabled"}}, "end_turn"),
        (SAYS, ["text"], {}, "end_turn"),
        (f"Wait.\n{CALL}\n{CALL}", ["text", "tool_use", "tool_use"], {"tools": [TOOL]}, "tool_use"),
    ],
)
def test_an_answer_is_blocks_streamed_or_not(
    serve: Serve, tokenizer: Any, says: str, kinds: list[str], more: dict[str, Any], reason: str
) -> None:
    ids = [*tokenizer.encode(says, add_special_tokens=False), min(tokenizer.stop_ids)]

    async def test() -> None:
        async with serve(lambda generation, sample: ids, config=THINKING, **ROOM) as served:
            whole = (await send(served, **more)).json()
            assert (whole["type"], whole["role"]) == ("message", "assistant")
            assert [block["type"] for block in whole["content"]] == kinds
            assert whole["stop_reason"] == reason
            events = named_events(await send(served, stream=True, **more))
            assert events[0]["type"] == "message_start"
            assert events[0]["message"]["content"] == []
            assert [e["type"] for e in events[-2:]] == ["message_delta", "message_stop"]
            assert events[-2]["delta"] == {"stop_reason": reason, "stop_sequence": None}
            assert events[-2]["usage"] == whole["usage"]
            assert without_ids(assembled(events)) == without_ids(whole["content"])

    asyncio.run(test())


def test_a_message_says_why_it_ended(serve: Serve) -> None:
    async def test() -> None:
        async with serve("hello world") as served:
            cut = (await send(served, max_tokens=2)).json()
            assert (cut["stop_reason"], cut["usage"]["output_tokens"]) == ("max_tokens", 2)
            stopped = (await send(served, stop_sequences=["wor"])).json()
            assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "wor")
            assert stopped["content"] == [{"type": "text", "text": "hello "}]

    asyncio.run(test())


def test_a_conversation_goes_on_with_tools(serve: Serve) -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Is it wet?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "secret", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Bern"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": RAIN},
                {"type": "text", "text": "And now?"},
            ],
        },
    ]  # fmt: skip

    async def test() -> None:
        async with serve("hello", **ROOM) as served:
            asked: dict[str, Any] = {"messages": turns, "tools": [TOOL], "system": "Be brief."}
            await send(served, max_tokens=3, **asked)
            generation = served.engine.streams[-1].generation
            prompt = served.tokenizer.decode(generation.prompt)
            for text in (
                "Be brief.",
                "Is it wet?",
                "I look.",
                '"city": "Bern"',
                "rain",
                "And now?",
            ):
                assert text in prompt
            assert "secret" not in prompt
            assert prompt.index("Bern") < prompt.index("rain") < prompt.index("And now?")
            counted = (await served.post("/v1/messages/count_tokens", **asked)).json()
            assert counted == {"input_tokens": len(generation.prompt)}

    asyncio.run(test())


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ({"type": "tool", "name": "weather"}, '{"city": "Bern"}'),
        ({"type": "any"}, '[{"name": "weather", "parameters": {"city": "Bern"}}]'),
    ],
)
def test_a_call_may_be_demanded(serve: Serve, choice: dict[str, Any], says: str) -> None:
    async def test() -> None:
        async with serve(says, **ROOM) as served:
            length = len(served.tokenizer.encode(says, add_special_tokens=False))
            answer = await send(served, tools=[TOOL], tool_choice=choice, max_tokens=length)
            (block,) = answer.json()["content"]
            assert (block["name"], block["input"]) == ("weather", {"city": "Bern"})
            assert served.engine.streams[-1].generation.params.grammar is not None

    asyncio.run(test())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages.0.role"),
        ({"system": "x", "messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages.0.content.0.type",
        ),
        ({"system": [{"type": "image"}]}, "system"),
        ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, "tools.0.type"),
        ({"tools": [{"name": "a b"}]}, "tools.0.name"),
        ({"tools": [{"name": "f", "input_schema": 5}]}, "tools.0.input_schema"),
        ({"tools": [TOOL], "tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_what_is_wrong_is_named(serve: Serve, fields: dict[str, Any], param: str) -> None:
    async def test() -> None:
        async with serve() as served:
            answer = await send(served, **fields)
            assert answer.status_code == 400, answer.text
            body = answer.json()
            assert body["type"] == "error"
            assert body["error"]["type"] == "invalid_request_error"
            assert body["error"]["param"] == param

    asyncio.run(test())


def test_an_unknown_model_is_not_found_and_a_failure_ends_the_stream(serve: Serve) -> None:
    async def test() -> None:
        async with serve("hello world and more") as served:
            answer = await send(served, model="unknown")
            assert answer.status_code == 404
            assert answer.json()["error"]["type"] == "not_found_error"
            served.engine.failures[0] = Failure("boom", after=2)
            events = named_events(await send(served, stream=True, max_tokens=9))
            assert events[-1]["type"] == "error"
            assert events[-1]["error"]["type"] == "api_error"

    asyncio.run(test())
