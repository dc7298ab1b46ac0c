"""Languages that know one kind of number write 4 as 4.0: it is taken for the integer it is."""

from __future__ import annotations

import asyncio
import json

import pytest

from server.served import Serve
from turnstile.server.answer.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    MessagesRequest,
)
from turnstile.server.errors import ApiError
from turnstile.server.http.json_body import decode


def test_integers_may_be_written_as_floats_wherever_they_stand() -> None:
    body = b'{"prompt": [[1.0, 2], [3e0]], "max_tokens": 4.0, "seed": -7.0, "temperature": 1.0}'
    request = decode(body, CompletionRequest)
    assert (request.prompt, request.max_tokens, request.seed) == ([[1, 2], [3]], 4, -7)
    assert type(request.max_tokens) is int
    assert decode(b'{"tokens": [1.0, 2]}', DetokenizeRequest).tokens == [1, 2]
    assert decode(b'{"max_tokens": 5.0, "messages": []}', MessagesRequest).max_tokens == 5


def test_what_is_no_field_of_integers_stays_as_it_was_written() -> None:
    body = {"messages": [{"n": 1.0}], "n": 2.0, "chat_template_kwargs": {"x": 1.0}}
    request = decode(json.dumps(body).encode(), ChatRequest)
    assert request.n == 2
    assert request.chat_template_kwargs is not None
    assert type(request.chat_template_kwargs["x"]) is float
    assert type(request.messages[0]["n"]) is float


@pytest.mark.parametrize("value", ["4.5", "1e30", "-9007199254740994.0", "1e-3"])
def test_a_fraction_is_no_integer(value: str) -> None:
    with pytest.raises(ApiError) as caught:
        decode(b'{"prompt": "a", "max_tokens": %b}' % value.encode(), CompletionRequest)
    assert caught.value.param == "max_tokens"
    assert "max_tokens must be an integer or null, not a number with a fraction" in str(
        caught.value.message
    )


def test_texts_are_still_no_integers() -> None:
    for wrong, param in ((b'"n": 1.0, "max_tokens": "4"', "max_tokens"), (b'"n": true', "n")):
        with pytest.raises(ApiError) as caught:
            decode(b'{"prompt": "a", %b}' % wrong, CompletionRequest)
        assert caught.value.param == param


def test_a_request_with_whole_numbers_is_answered(serve: Serve) -> None:
    async def test() -> None:
        async with serve("a b c d e f g h") as served:
            answer = await served.complete(max_tokens=3.0, n=1.0)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 3

    asyncio.run(test())
