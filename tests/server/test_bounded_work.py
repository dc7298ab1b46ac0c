"""A body as large as is taken must not hold up the others: what is hopeless is refused before
anybody looks into it, and what is long is done in a thread.

No times are measured here: what must not be called is replaced by what fails.
"""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from server.served import Serve, Served
from turnstile.server.answer.schemas import CompletionRequest, DetokenizeRequest
from turnstile.server.errors import ApiError
from turnstile.server.http.json_body import MAX_CONTAINERS, MAX_KEYS, MAX_VALUES, decode
from turnstile.text.chat import ChatEncoder, ChatInput, ChatPrompt
from turnstile.text.messages import MAX_ARGUMENTS_CHARS


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("this should not have been called")


async def refused(served: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await served.post(path, **body)
    assert answer.status_code == 400, answer.text
    assert not served.engine.streams
    error: dict[str, Any] = answer.json()["error"]
    return error


@pytest.mark.parametrize("prompt", [["a"] * 1025, [[70]] * 1025, ["a", [70]] * 513])
def test_too_many_prompts_are_refused_before_any_is_tokenized(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, prompt: Any
) -> None:
    async def scenario() -> None:
        async with serve() as served:
            monkeypatch.setattr(type(served.tokenizer), "encode_batch", never)
            monkeypatch.setattr("turnstile.server.answer.prompts.check_ids", never)
            error = await refused(served, "/v1/completions", {"prompt": prompt})
            assert error["param"] == "n"
            assert f"{len(prompt)} prompts" in error["message"]
            assert "1024 choices" in error["message"]
            halves = {"prompt": prompt[:513], "n": 1, "best_of": 2}
            assert (await refused(served, "/v1/completions", halves))["param"] == "n"

    asyncio.run(scenario())


@pytest.mark.parametrize("field", ["allowed_token_ids", "stop_token_ids", "logit_bias"])
def test_more_token_ids_than_there_are_is_refused(serve: Serve, field: str) -> None:
    async def scenario() -> None:
        async with serve() as served:
            # Not even ids: nobody has looked at them.
            many = {f"x{i}": 1 for i in range(321)} if field == "logit_bias" else [10**6] * 321
            error = await refused(served, "/v1/completions", {"prompt": "a", field: many})
            assert error["param"] == field
            assert "321 entries; at most 320" in error["message"]

    asyncio.run(scenario())


@pytest.mark.parametrize("tail", ["[5]," * MAX_CONTAINERS, "{}," * MAX_CONTAINERS])
def test_millions_of_lists_are_refused_before_they_are_built(
    monkeypatch: pytest.MonkeyPatch, tail: str
) -> None:
    monkeypatch.setattr("turnstile.server.http.json_body._decoder", never)
    body = '{"prompt": "\\"[", "x": [' + tail + "0]}"
    with pytest.raises(ApiError, match=f"more than {MAX_CONTAINERS} arrays and objects") as caught:
        decode(body.encode(), CompletionRequest)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "field",
    [
        '"prompt": [' + "1," * (MAX_VALUES + 1) + "1]",
        '"prompt": [' + '"",' * (MAX_VALUES + 1) + '""]',
        '"logit_bias": {' + '"1":1,' * (MAX_KEYS + 1) + '"2":2}',
    ],
    ids=["ids", "texts", "keys"],
)
def test_millions_of_values_are_refused_before_they_are_built(
    monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    monkeypatch.setattr("turnstile.server.http.json_body._decoder", never)
    with pytest.raises(ApiError, match=f"{MAX_KEYS} keys or {MAX_VALUES} values") as caught:
        decode(b"{" + field.encode() + b"}", CompletionRequest)
    assert caught.value.status == 400


def test_as_many_ids_as_may_be_detokenized_are_no_millions() -> None:
    ids = [7] * MAX_VALUES
    assert decode(json.dumps({"tokens": ids}).encode(), DetokenizeRequest).tokens == ids


def test_commas_and_colons_inside_texts_are_texts() -> None:
    text = ":, " * (MAX_VALUES + 1)
    assert decode(json.dumps({"prompt": text}).encode(), CompletionRequest).prompt == text


@pytest.mark.parametrize("value", ["1e999", "-1e999", "1" + "0" * 5000])
@pytest.mark.parametrize("field", ["temperature", "max_tokens", "seed"])
def test_a_number_beyond_all_numbers_is_named(field: str, value: str) -> None:
    with pytest.raises(ApiError, match=f"{field} is a number of more than 64 bits") as caught:
        decode(f'{{"{field}": {value}}}'.encode(), CompletionRequest)
    assert caught.value.param == field


def test_brackets_inside_texts_are_texts() -> None:
    text = '[{\\"' * MAX_CONTAINERS
    request = decode(json.dumps({"prompt": [text, text]}).encode(), CompletionRequest)
    assert request.prompt == [text, text]


def test_a_string_that_does_not_end_is_no_json() -> None:
    junk = '{"a": "[' + '\\"[' * MAX_CONTAINERS
    with pytest.raises(ApiError) as caught:
        decode(junk.encode(), DetokenizeRequest)
    assert caught.value.code == "invalid_json"


# Twice the context of 2048 tokens, were each of the longest token there is.
HOPELESS = "x" * 400_000


@pytest.mark.parametrize(
    "content",
    [
        HOPELESS,
        [HOPELESS],
        [{"type": "text", "text": HOPELESS}],
        [{"type": "refusal", "refusal": HOPELESS}],
        ["x" * 1000] * 400,
    ],
    ids=["string", "string part", "text part", "refusal", "many parts"],
)
def test_a_hopeless_conversation_is_not_even_rendered(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, content: Any
) -> None:
    async def scenario() -> None:
        async with serve(max_model_len=2048) as served:
            monkeypatch.setattr("turnstile.text.chat.ChatEncoder.encode", never)
            body = {"messages": [{"role": "user", "content": content}]}
            error = await refused(served, "/v1/chat/completions", body)
            assert error["code"] == "context_length_exceeded"
            assert error["n_ctx"] == 2048

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/v1/chat/completions/render", "/tokenize"])
@pytest.mark.parametrize("size", [10, 20_000])
def test_what_is_long_anywhere_in_the_body_is_rendered_in_a_thread(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, path: str, size: int
) -> None:
    threads = []
    encode = ChatEncoder.encode

    def noted(self: ChatEncoder, chat: ChatInput, *ways: Any) -> ChatPrompt:
        threads.append(threading.current_thread())
        return encode(self, chat, *ways)

    async def scenario() -> None:
        async with serve() as served:
            monkeypatch.setattr(ChatEncoder, "encode", noted)
            call = {"function": {"name": "f", "arguments": '{"a": "' + "b" * size + '"}'}}
            said = {"role": "assistant", "content": "hi", "tool_calls": [call]}
            answer = await served.post(path, messages=[said])
            assert answer.status_code == 200, answer.text
            assert (threads[0] is threading.main_thread()) == (size == 10)

    asyncio.run(scenario())


def test_arguments_too_long_to_parse_are_refused(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with serve(config={"max_text_size": 10**6}) as served:
            monkeypatch.setattr("turnstile.text.messages.parse_arguments", never)
            arguments = "[" + "1," * MAX_ARGUMENTS_CHARS + "1]"
            call = {"function": {"name": "f", "arguments": arguments}}
            said = {"role": "assistant", "content": "hi", "tool_calls": [call]}
            error = await refused(served, "/v1/chat/completions", {"messages": [said]})
            assert error["param"] == "messages.0.tool_calls.0.function.arguments"
            assert str(MAX_ARGUMENTS_CHARS) in error["message"]

    asyncio.run(scenario())


def test_more_ids_than_are_detokenized_are_refused(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with serve() as served:
            monkeypatch.setattr("turnstile.server.api.tokenize._MOST_IDS", 3)
            monkeypatch.setattr("turnstile.server.api.tokenize.check_ids", never)
            error = await refused(served, "/detokenize", {"tokens": [70] * 4})
            assert error["param"] == "tokens"
            assert "4 ids; at most 3" in error["message"]

    asyncio.run(scenario())


def test_ids_that_cannot_fit_are_refused_unread_unless_they_are_cut(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with serve(max_model_len=256) as served:
            long = [70] * 300 + [320]
            cut = {"prompt": long, "truncate_prompt_tokens": 5}
            assert "prompt.300: 320" in (await refused(served, "/v1/completions", cut))["message"]
            with monkeypatch.context() as patch:
                patch.setattr("turnstile.server.answer.prompts.check_ids", never)
                for prompt in (long, [[70] * 301]):
                    body = {"prompt": prompt, "max_tokens": 7}
                    error = await refused(served, "/v1/completions", body)
                    assert error["code"] == "context_length_exceeded"
                    assert error["n_prompt_tokens"] == 301
                    assert "308" in error["message"]
            assert (await served.complete([70] * 300, truncate_prompt_tokens=5)).status_code == 200

    asyncio.run(scenario())
