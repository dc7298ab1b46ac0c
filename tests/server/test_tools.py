"""Chats with tools: what is demanded, what is found, and what a client is told."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from server.served import Serve, events, joined, listening
from server.test_openai_client import client
from turnstile.engine.params import SamplingParams

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
NAMED = {"type": "function", "function": {"name": "weather"}}
ROOM = {"max_model_len": 4096, "num_pages": 1024}
"""Settings of an engine with room for tools in words."""
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


def calls_of(chunks: list[Any]) -> list[dict[str, Any]]:
    """The calls that a stream's pieces add up to, as the official client adds them."""
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        for item in chunk["choices"][0]["delta"].get("tool_calls") or []:
            if item["index"] == len(calls):
                calls.append({"id": item["id"], "type": item["type"], **item["function"]})
            else:
                calls[item["index"]]["arguments"] += item["function"]["arguments"]
    return calls


@pytest.mark.parametrize(
    ("says", "content", "cities"),
    [
        (CALL, None, ["Bern"]),
        (f"I look.\n{CALL}\n{CALL.replace('Bern', 'Rom')}", "I look.", ["Bern", "Rom"]),
        ("It rains <in> Bern.", "It rains <in> Bern.", []),
        (CALL.replace("weather", "climate"), CALL.replace("weather", "climate"), []),
    ],
)
def test_a_call_is_found_streamed_or_not(
    serve: Serve, says: str, content: str | None, cities: list[str]
) -> None:
    async def test() -> None:
        async with serve(says, **ROOM) as served:
            length = len(served.tokenizer.encode(says, add_special_tokens=False))
            fields: dict[str, Any] = {"tools": [WEATHER], "max_tokens": length}
            choice = (await served.chat(**fields)).json()["choices"][0]
            assert choice["message"]["content"] == content
            found = choice["message"].get("tool_calls", [])
            assert [json.loads(call["function"]["arguments"]) for call in found] == [
                {"city": city} for city in cities
            ]
            assert all(call["type"] == "function" for call in found)
            assert all(call["function"]["name"] == "weather" for call in found)
            assert len({call["id"] for call in found}) == len(cities)

            chunks = events(await served.chat(stream=True, **fields))
            assert joined(chunks) == (content or "")
            streamed = calls_of(chunks)
            assert [(call["name"], call["arguments"]) for call in streamed] == [
                (call["function"]["name"], call["function"]["arguments"]) for call in found
            ]
            reasons = [c["choices"][0]["finish_reason"] for c in chunks]
            assert reasons == [None] * (len(chunks) - 1) + [choice["finish_reason"]]

    asyncio.run(test())


def test_an_answer_that_stops_with_calls_says_so(serve: Serve, tokenizer: Any) -> None:
    ids = tokenizer.encode(CALL, add_special_tokens=False)
    eos = min(tokenizer.stop_ids)

    async def test() -> None:
        async with serve(lambda generation, sample: [*ids, eos], **ROOM) as served:
            whole = (await served.chat(tools=[WEATHER])).json()["choices"][0]
            assert whole["finish_reason"] == "tool_calls"
            cut = (await served.chat(tools=[WEATHER], max_tokens=len(ids) - 3)).json()["choices"][0]
            assert cut["finish_reason"] == "length"
            chunks = events(await served.chat(tools=[WEATHER], stream=True))
            assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"

    asyncio.run(test())


def params_of(served: Any) -> SamplingParams:
    params: SamplingParams = served.engine.streams[-1].generation.params
    return params


def test_a_demanded_call_constrains_the_output_and_is_the_whole_of_it(serve: Serve) -> None:
    async def test() -> None:
        async with serve('{"city": "Bern"}', **ROOM) as served:
            length = len(served.tokenizer.encode('{"city": "Bern"}', add_special_tokens=False))
            fields: dict[str, Any] = {"tools": [WEATHER], "max_tokens": length}
            message = (await served.chat(tool_choice=NAMED, **fields)).json()["choices"][0][
                "message"
            ]
            assert message["content"] is None
            (call,) = message["tool_calls"]
            assert call["function"] == {"name": "weather", "arguments": '{"city": "Bern"}'}
            assert '"city"' in (params_of(served).grammar or "")
            streamed = calls_of(events(await served.chat(tool_choice=NAMED, stream=True, **fields)))
            assert streamed[0]["arguments"] == '{"city": "Bern"}'
            await served.chat(tool_choice="auto", **fields)
            assert params_of(served).grammar is None
        says = '[{"name": "weather", "parameters": {"city": "Bern"}}]'
        async with serve(says, **ROOM) as served:
            length = len(served.tokenizer.encode(says, add_special_tokens=False))
            answer = await served.chat(tools=[WEATHER], tool_choice="required", max_tokens=length)
            message = answer.json()["choices"][0]["message"]
            assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Bern"}'
            assert '"minItems"' in (params_of(served).grammar or "")

    asyncio.run(test())


def test_every_choice_has_calls_of_its_own(serve: Serve) -> None:
    async def test() -> None:
        async with serve(CALL, **ROOM) as served:
            length = len(served.tokenizer.encode(CALL, add_special_tokens=False))
            answer = await served.chat(tools=[WEATHER], n=2, max_tokens=length)
            ids = [choice["message"]["tool_calls"][0]["id"] for choice in answer.json()["choices"]]
            assert len(set(ids)) == 2

    asyncio.run(test())


def test_tools_reach_the_prompt_unless_none_may_be_called(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served:
            path = "/v1/chat/completions/render"
            body = {"messages": [{"role": "user", "content": "x"}], "tools": [WEATHER]}
            told = (await served.post(path, **body)).json()
            assert "Weather of a city." in told["prompt"]
            assert "<tool_call>" in told["prompt"]
            silent = (await served.post(path, **body, tool_choice="none")).json()
            assert "Weather" not in silent["prompt"]
            counted = (await served.post("/tokenize", **body)).json()
            assert counted["tokens"] == told["prompt_token_ids"]

    asyncio.run(test())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "x"}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools.1.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "weather"}, "tool_choice"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"properties": {"a": {"type": 5}}}},
                    }
                ],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_what_is_wrong_is_named(serve: Serve, fields: dict[str, Any], param: str) -> None:
    async def test() -> None:
        async with serve() as served:
            answer = await served.chat(**fields)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == param
            assert not served.engine.streams

    asyncio.run(test())


def test_an_operator_may_turn_choosing_off(serve: Serve) -> None:
    async def test() -> None:
        async with serve(CALL, config={"enable_auto_tool_choice": False}, **ROOM) as served:
            answer = await served.chat(tools=[WEATHER])
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert (error["param"], error["code"]) == ("tool_choice", "unsupported_parameter")
            assert "--no-enable-auto-tool-choice" in error["message"]
            assert (await served.chat(tools=[WEATHER], tool_choice=NAMED)).status_code == 200

    asyncio.run(test())


def test_the_official_client_sees_calls(serve: Serve, tokenizer: Any) -> None:
    ids = tokenizer.encode(CALL, add_special_tokens=False)
    eos = min(tokenizer.stop_ids)

    async def test() -> None:
        async with (
            serve(lambda generation, sample: [*ids, eos], **ROOM) as served,
            listening(served) as port,
            client(port) as api,
        ):
            asked: Any = {
                "model": "tiny",
                "messages": [{"role": "user", "content": "Is it wet in Bern?"}],
                "tools": [WEATHER],
            }
            whole = await api.chat.completions.create(**asked)
            message = whole.choices[0].message
            assert message.tool_calls is not None
            assert whole.choices[0].finish_reason == "tool_calls"
            async with api.chat.completions.stream(**asked) as stream:
                final = await stream.get_final_completion()
            streamed = final.choices[0].message.tool_calls
            assert streamed is not None
            assert json.loads(streamed[0].function.arguments) == {"city": "Bern"}
            answered = [
                *asked["messages"],
                message.model_dump(exclude_none=True),
                {"role": "tool", "content": "rain", "tool_call_id": message.tool_calls[0].id},
            ]
            again = await api.chat.completions.create(**(asked | {"messages": answered}))
            assert again.choices

    asyncio.run(test())
