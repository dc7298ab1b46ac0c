"""Relatives of all cases of kind c: fields that were tried one by one, in any combination.

Whatever valid fields are put together, the answer is a 200 that says the same streamed and whole,
or a 400 that names what contradicts what; never a 500, never a page or a sequence left behind.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from e2e.harness import ServerProcess, text_of

pytestmark = pytest.mark.e2e

FIELDS: dict[str, list[Any]] = {
    "temperature": [0, 1e-6, 0.5, 1, 1.7, 100],
    "top_p": [1, 0.999, 0.5, 1e-9],
    "top_k": [0, -1, 1, 5, 10**6],
    "min_p": [0, 0.1, 1],
    "repetition_penalty": [1, 1.3, 0.5, 100, 1e-3],
    "presence_penalty": [-2, 0, 2],
    "frequency_penalty": [-2, 0.3, 2],
    "n": [1, 2, 3, 8],
    "logprobs": [0, 1, 5, 20],
    "min_tokens": [0, 1, 3],
    "ignore_eos": [True, False],
    "stop": ["e", ["a", "b"], ["\ufffd"], [" the", "he"]],
    "stop_token_ids": [[70], [2], [0, 1, 2], list(range(3, 100))],
    "include_stop_str_in_output": [True, False],
    "skip_special_tokens": [True, False],
    "logit_bias": [{"2": 100}, {"70": -100}, {str(k): 5.5 for k in range(100)}],
    "allowed_token_ids": [[70, 71, 72], list(range(320)), [2]],
    "structured_outputs": [
        {"regex": "[a-c]{2,9}"}, {"choice": ["yes", "no"]}, {"json_object": True},
        {"json": {"type": "integer", "maximum": 99}},
    ],
    "return_token_ids": [True],
    "return_tokens_as_token_ids": [True],
    "stream_interval": [1, 3],
    "truncate_prompt_tokens": [1, 5, -1],
    "priority": [-5, 5],
    "cache_salt": ["x", "y"],
    "echo": [True],
}  # fmt: skip
PROMPTS = ["the thing é🙂", ["a", "bb"], [0, 1, 2], "long enough for pages to be shared " * 3]
MESSAGES = ["abc", "é漢🙂", "", "x" * 50]
SEEDS = [0, -5, 2**63 - 1, -(2**63), 12345]


def some_body(number: int) -> tuple[str, dict[str, Any]]:
    """A path and a body, the same for the same number."""
    chance = random.Random(number)
    body: dict[str, Any] = {
        name: chance.choice(FIELDS[name])
        for name in chance.sample(sorted(FIELDS), chance.randrange(8))
    }
    body |= {"seed": chance.choice(SEEDS), "max_tokens": chance.choice([1, 2, 5, 17, 40])}
    if chance.random() < 0.6:
        return "/v1/completions", body | {"prompt": chance.choice(PROMPTS)}
    body.pop("echo", None)
    if "logprobs" in body:
        body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    content = chance.choice(MESSAGES)
    return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": content}]}


def answered_alike(server: ServerProcess, number: int) -> int:
    """Send a body whole and streamed and compare; returns the status."""
    path, body = some_body(number)
    answer = server.post(path, **body)
    whole = answer.json()
    if answer.status_code == 400:
        error = whole["error"]
        assert error["code"] == "contradictory_constraints" or error["param"], (body, error)
        return 400
    assert answer.status_code == 200, (body, whole)
    events = list(server.stream(path, **body, stream_options={"include_usage": True}))
    assert not any("error" in event for event in events), (body, events[-1])
    for choice in whole["choices"]:
        index = choice["index"]
        said = choice["text"] if "text" in choice else choice["message"]["content"]
        assert text_of(events, index) == said, body
        reasons = [c["finish_reason"] for e in events for c in e["choices"] if c["index"] == index]
        assert [reason for reason in reasons if reason] == [choice["finish_reason"]], body
        assert choice["finish_reason"] in ("stop", "length")
    counted = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert all(events[-1]["usage"][name] == whole["usage"][name] for name in counted), body
    return 200


@pytest.mark.parametrize("start", range(0, 96, 24))
def test_any_fields_together_say_the_same_streamed_and_whole(
    server: ServerProcess, start: int
) -> None:
    calls = [lambda k=k: answered_alike(server, k) for k in range(start, start + 24)]
    statuses = server.gather(calls)
    assert statuses.count(200) > 12
