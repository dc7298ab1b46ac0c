"""Chats with models that think aloud."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from server.served import Serve, events, joined
from server.test_tools import CALL, ROOM, WEATHER

THOUGHT = "<think>\nIt may rain.\n</think>\n\n"
SAYS = f"{THOUGHT}Take a coat."
THINKING = {"reasoning_parser": "qwen3"}


def reasoning_of(chunks: list[Any]) -> str:
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    for delta in deltas:
        assert delta.get("reasoning") == delta.get("reasoning_content")
    return "".join(delta.get("reasoning_content", "") for delta in deltas)


def test_thought_stands_beside_the_content_streamed_or_not(serve: Serve) -> None:
    async def test() -> None:
        async with serve(SAYS, config=THINKING) as served:
            encode = served.tokenizer.encode
            thought = len(encode("<think>\nIt may rain.\n</think>", add_special_tokens=False))
            fields: dict[str, Any] = {"max_tokens": len(encode(SAYS, add_special_tokens=False))}
            whole = (await served.chat(**fields)).json()
            message = whole["choices"][0]["message"]
            assert message["content"] == "Take a coat."
            assert message["reasoning_content"] == message["reasoning"] == "It may rain."
            options = {"include_usage": True}
            chunks = events(await served.chat(stream=True, stream_options=options, **fields))
            assert joined(chunks) == "Take a coat."
            assert reasoning_of(chunks) == "It may rain."
            counted = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
            assert chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == counted
            assert thought <= counted <= whole["usage"]["completion_tokens"]

    asyncio.run(test())


def test_who_does_not_want_to_see_it_does_not(serve: Serve) -> None:
    async def test() -> None:
        async with serve(SAYS, config=THINKING) as served:
            length = len(served.tokenizer.encode(SAYS, add_special_tokens=False))
            fields: dict[str, Any] = {"max_tokens": length, "include_reasoning": False}
            message = (await served.chat(**fields)).json()["choices"][0]["message"]
            assert message["content"] == "Take a coat."
            assert "reasoning_content" not in message
            chunks = events(await served.chat(stream=True, **fields))
            assert joined(chunks) == "Take a coat."
            assert reasoning_of(chunks) == ""
            begun = len(served.tokenizer.encode("<think>\nIt may", add_special_tokens=False))
            cut = await served.chat(**(fields | {"max_tokens": begun}))
            assert cut.json()["choices"][0]["message"]["content"] == ""

    asyncio.run(test())


def test_calls_come_after_the_thought(serve: Serve) -> None:
    says = THOUGHT + CALL

    async def test() -> None:
        async with serve(says, config=THINKING, **ROOM) as served:
            length = len(served.tokenizer.encode(says, add_special_tokens=False))
            answer = await served.chat(tools=[WEATHER], max_tokens=length)
            message = answer.json()["choices"][0]["message"]
            assert message["reasoning_content"] == "It may rain."
            assert message["content"] is None
            assert message["tool_calls"][0]["function"]["name"] == "weather"

    asyncio.run(test())


@pytest.mark.parametrize(
    ("parser", "template", "found"),
    [
        ("auto", "{{ messages[0].content }}", False),
        ("auto", "{{ messages[0].content.split('</think>')[-1] }}", True),
        ("none", "{{ messages[0].content.split('</think>')[-1] }}", False),
        ("deepseek_r1", "{{ messages[0].content }}", True),
    ],
)
def test_the_template_says_whether_its_model_thinks(
    serve: Serve, parser: str, template: str, found: bool
) -> None:
    config = {"reasoning_parser": parser, "trust_request_chat_template": True}

    async def test() -> None:
        async with serve(SAYS, config=config) as served:
            length = len(served.tokenizer.encode(SAYS, add_special_tokens=False))
            answer = await served.chat(max_tokens=length, chat_template=template)
            message = answer.json()["choices"][0]["message"]
            assert message["content"] == ("Take a coat." if found else SAYS)

    asyncio.run(test())


def test_a_template_may_open_the_thought_itself(serve: Serve) -> None:
    config = {"reasoning_parser": "auto", "trust_request_chat_template": True}
    template = "{{ messages[0].content.split('</think>')[-1] }}<think>\n"
    says = SAYS.removeprefix("<think>\n")

    async def test() -> None:
        async with serve(says, config=config) as served:
            length = len(served.tokenizer.encode(says, add_special_tokens=False))
            answer = await served.chat(max_tokens=length, chat_template=template)
            message = answer.json()["choices"][0]["message"]
            assert message["reasoning_content"] == "It may rain."
            assert message["content"] == "Take a coat."

    asyncio.run(test())


def test_a_constrained_answer_is_not_thought_about(serve: Serve) -> None:
    async def test() -> None:
        async with serve(SAYS, config=THINKING) as served:
            length = len(served.tokenizer.encode(SAYS, add_special_tokens=False))
            wanted = {"regex": ".*"}
            answer = await served.chat(max_tokens=length, structured_outputs=wanted)
            assert answer.json()["choices"][0]["message"]["content"] == SAYS

    asyncio.run(test())
