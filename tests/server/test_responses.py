"""``/v1/responses``: a chat in another form."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from server.fake_engine import Failure
from server.served import Serve, Served, listening
from server.test_openai_client import client
from server.test_reasoning import SAYS, THINKING
from server.test_tools import CALL, ROOM, WEATHER
from turnstile.server.api.responses import MOST_REPEATED

FUNCTION = {"type": "function", **WEATHER["function"]}


def named_events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, whose names and numbers are checked on the way."""
    assert answer.status_code == 200, answer.text
    found = []
    for number, text in enumerate(answer.text.removesuffix("\n\n").split("\n\n")):
        name, data = text.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        found.append(event)
    return found


async def respond(served: Served, **body: Any) -> httpx.Response:
    return await served.post("/v1/responses", **({"input": "hello"} | body))


def length_of(served: Served, says: str) -> int:
    return len(served.tokenizer.encode(says, add_special_tokens=False))


def test_an_answer_is_a_message(serve: Serve) -> None:
    async def test() -> None:
        async with serve("hello world") as served:
            length = length_of(served, "hello world")
            asked: dict[str, Any] = {"max_output_tokens": length, "metadata": {"a": "b"}}
            answer = (await respond(served, **asked)).json()
            assert answer["object"] == "response"
            assert answer["id"].startswith("resp-")
            (item,) = answer["output"]
            assert (item["type"], item["role"], item["status"]) == (
                "message",
                "assistant",
                "completed",
            )
            assert item["content"][0]["text"] == "hello world"
            assert answer["status"] == "incomplete"
            assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
            assert answer["metadata"] == {"a": "b"}
            assert answer["usage"]["output_tokens"] == length

    asyncio.run(test())


@pytest.mark.parametrize(
    ("says", "kinds", "config"),
    [
        ("hello world", ["message"], {}),
        (SAYS, ["reasoning", "message"], THINKING),
        (f"Wait.\n{CALL}\n{CALL}", ["message", "function_call", "function_call"], {}),
    ],
)
def test_a_stream_tells_how_each_item_grows(
    serve: Serve, tokenizer: Any, says: str, kinds: list[str], config: dict[str, Any]
) -> None:
    ids = [*tokenizer.encode(says, add_special_tokens=False), min(tokenizer.stop_ids)]

    async def test() -> None:
        async with serve(lambda generation, sample: ids, config=config, **ROOM) as served:
            tools = [FUNCTION] if "function_call" in kinds else None
            events = named_events(await respond(served, tools=tools, stream=True))
            assert [e["type"] for e in events[:2]] == ["response.created", "response.in_progress"]
            assert events[-1]["type"] == "response.completed"
            final = events[-1]["response"]
            assert final["status"] == "completed"
            assert [item["type"] for item in final["output"]] == kinds
            for index, item in enumerate(final["output"]):
                of_item = [e for e in events if e.get("output_index") == index]
                assert of_item[0]["type"] == "response.output_item.added"
                assert of_item[-1]["type"] == "response.output_item.done"
                assert of_item[-1]["item"] == item
                grown = "".join(e["delta"] for e in of_item if e["type"].endswith(".delta"))
                is_call = item["type"] == "function_call"
                assert grown == (item["arguments"] if is_call else item["content"][0]["text"])
                assert all(e["item_id"] == item["id"] for e in of_item[1:-1])
            whole = (await respond(served, tools=tools)).json()
            assert [without_ids(item) for item in whole["output"]] == [
                without_ids(item) for item in final["output"]
            ]
            assert whole["usage"] == final["usage"]

    asyncio.run(test())


def without_ids(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


def test_a_conversation_goes_on_with_calls_and_their_outputs(serve: Serve) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Is it wet?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "function_call",
            "call_id": "c1",
            "name": "weather",
            "arguments": '{"city": "Bern"}',
        },
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "It is.", "annotations": []}],
        },
        {"role": "user", "content": "Thanks"},
    ]

    async def test() -> None:
        async with serve("hello", **ROOM) as served:
            await respond(served, input=items, instructions="Be brief.", tools=[FUNCTION])
            generation = served.engine.streams[-1].generation
            prompt = served.tokenizer.decode(generation.prompt)
            for text in ("Be brief.", "Is it wet?", '"city": "Bern"', "rain", "It is.", "Thanks"):
                assert text in prompt
            assert prompt.index("Bern") < prompt.index("rain") < prompt.index("It is.")

    asyncio.run(test())


def test_a_shape_or_a_call_may_be_demanded(serve: Serve) -> None:
    async def test() -> None:
        async with serve('{"city": "Bern"}', **ROOM) as served:
            shape = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
            await respond(served, text={"format": shape})
            assert served.engine.streams[-1].generation.params.grammar is not None
            answer = await respond(
                served,
                tools=[FUNCTION],
                tool_choice={"type": "function", "name": "weather"},
                max_output_tokens=length_of(served, '{"city": "Bern"}'),
            )
            (call,) = answer.json()["output"]
            assert (call["type"], call["name"]) == ("function_call", "weather")
            assert json.loads(call["arguments"]) == {"city": "Bern"}

    asyncio.run(test())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": [{"role": "pilot", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "pilot", "content": "x"}], "instructions": "x"}, "input.0.role"),
        ({"input": [{"type": "reasoning"}, {"role": "user", "content": 5}]}, "input.1.content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format"),
        ({"text": {"format": 5}}, "text.format"),
        ({"text": {"x": "y" * MOST_REPEATED}}, "text"),
        ({"tools": [{**FUNCTION, "x": "y" * MOST_REPEATED}], "tool_choice": "none"}, "tools"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {str(i): "v" for i in range(17)}}, "metadata"),
    ],
)
def test_what_is_wrong_is_named_as_it_was_sent(
    serve: Serve, fields: dict[str, Any], param: str
) -> None:
    async def test() -> None:
        async with serve() as served:
            answer = await respond(served, **fields)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == param

    asyncio.run(test())


def test_a_stream_that_fails_says_so(serve: Serve) -> None:
    async def test() -> None:
        async with serve("hello world and more") as served:
            served.engine.failures[0] = Failure("boom", after=2)
            events = named_events(await respond(served, stream=True, max_output_tokens=9))
            assert [e["type"] for e in events[-2:]] == ["error", "response.failed"]
            assert events[-1]["response"]["status"] == "failed"

    asyncio.run(test())


def test_the_official_client_understands_it(serve: Serve, tokenizer: Any) -> None:
    ids = [*tokenizer.encode(CALL, add_special_tokens=False), min(tokenizer.stop_ids)]

    async def test() -> None:
        async with (
            serve(lambda generation, sample: ids, **ROOM) as served,
            listening(served) as port,
            client(port) as api,
        ):
            asked: Any = {"model": "tiny", "input": "Is it wet in Bern?", "tools": [FUNCTION]}
            whole = await api.responses.create(**asked)
            assert [item.type for item in whole.output] == ["function_call"]
            async with api.responses.stream(**asked) as stream:
                kinds = [event.type async for event in stream]
                final = await stream.get_final_response()
            assert "response.function_call_arguments.delta" in kinds
            assert final.output[0].type == "function_call"
            assert json.loads(final.output[0].arguments) == {"city": "Bern"}
            plain = await api.responses.create(model="tiny", input="hello")
            assert plain.output_text == CALL

    asyncio.run(test())
