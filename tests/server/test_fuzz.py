"""Whatever JSON comes in, an answer or a 4xx goes out; never a 500, never a trace left behind."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from budget import examples
from server.served import Serve
from turnstile.server.answer.schemas import (
    ChatRequest,
    CompletionRequest,
    MessagesRequest,
    ResponsesRequest,
)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.sampled_from([0, 1, -1, 2**31, 2**63, 10**40, 1e308, -0.0, 1e-300, 0.5])
    | st.text(max_size=8)
    | st.sampled_from(["text", "json_object", "user", "assistant", "\ud800", "<|im_end|>", "5"])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)
ids = st.lists(st.integers(-2, 330), max_size=6)
prompts = st.text(max_size=20) | ids | st.lists(st.text(max_size=5) | ids, max_size=4) | values
parts = st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url"]) | values}) | values,
    max_size=3,
)
messages = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "system", "assistant", "tool", "developer"]) | values,
            "content": st.text(max_size=10) | parts | values,
        },
        optional={"name": values, "tool_calls": values, "reasoning": values},
    )
    | values,
    max_size=3,
)

kinds = ["message", "function_call", "function_call_output", "reasoning", "function", "auto"]
words = st.sampled_from([*kinds, "required", "none", "f", "{}"])
functions = st.fixed_dictionaries(
    {"type": st.just("function")},
    optional={
        "name": words | values,
        "function": st.fixed_dictionaries({"name": words}, optional={"parameters": values})
        | values,
        "parameters": values,
    },
)
items = st.text(max_size=8) | st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "type": words | values,
            "role": st.sampled_from(["user", "assistant"]) | values,
            "content": st.text(max_size=10) | parts | values,
            **dict.fromkeys(("name", "arguments", "call_id", "output"), words | values),
        },
    )
    | values,
    max_size=3,
)

block_kinds = st.sampled_from(["text", "tool_use", "tool_result", "thinking"])
blocks = st.fixed_dictionaries(
    {"type": block_kinds | values},
    optional=dict.fromkeys(
        ("text", "name", "input", "id", "content", "tool_use_id"), words | values
    ),
)
turns = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant"]) | values,
            "content": st.text(max_size=10) | st.lists(blocks | values, max_size=3) | values,
        }
    )
    | values,
    max_size=3,
)


def bodies(kind: Any, first: str, contents: Any) -> Any:
    fields = {
        name: values
        for name in kind.__struct_encode_fields__
        if name not in (first, "chat_template", "structured_outputs", "response_format")
    }
    plausible = st.integers(1, 6)
    fields["n"] = fields["max_tokens"] = plausible | values
    fields["stream"] = st.booleans() | values
    fields["tools"] = st.lists(functions, max_size=3) | values
    fields["tool_choice"] = words | functions | values
    return st.fixed_dictionaries({first: contents}, optional=fields)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", bodies(CompletionRequest, "prompt", prompts)),
        ("/v1/chat/completions", bodies(ChatRequest, "messages", messages)),
        ("/v1/responses", bodies(ResponsesRequest, "input", items)),
        ("/v1/messages", bodies(MessagesRequest, "messages", turns)),
    ],
)
def test_any_json_is_answered_or_refused(serve: Serve, path: str, body: Any) -> None:
    async def ask(content: bytes) -> None:
        async with serve(lambda generation, sample: [70 + sample, 200, 201]) as served:
            answer = await served.client.post(
                path, content=content, headers={"content-type": "application/json"}
            )
            assert answer.status_code in (200, 400, 404), answer.text
            if answer.headers["content-type"].startswith("text/event-stream"):
                if path == "/v1/responses":
                    assert '"error":null' in answer.text.rpartition("event: ")[2]
                elif path == "/v1/messages":
                    assert answer.text.rpartition("event: ")[2].startswith("message_stop")
                else:
                    assert answer.text.endswith("data: [DONE]\n\n")
                    assert '"error"' not in answer.text
            else:
                json.loads(answer.text)
            metrics = served.service.metrics
            assert metrics.in_flight == 0
            assert sum(metrics.outcomes.values()) == 1
            assert all(stream.done for stream in served.engine.streams)
            gate: Any = served.service.gate
            assert gate.load == 0

    # Three of a handful of optional fields at a time: more would be refused for the first one.
    @settings(max_examples=examples(100), suppress_health_check=list(HealthCheck))
    @given(body, st.data())
    def test(made: dict[str, Any], data: Any) -> None:
        names = sorted(made)
        drawn = data.draw(st.lists(st.sampled_from(names), max_size=3))
        kept = {*drawn, "prompt", "messages", "input"}
        if "max_tokens" in made and path == "/v1/messages":
            kept.add("max_tokens")
        chosen = {name: made[name] for name in names if name in kept}
        asyncio.run(ask(json.dumps(chosen).encode()))

    test()
