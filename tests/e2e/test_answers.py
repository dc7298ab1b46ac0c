"""Whole answers of a real (tiny, random) model through HTTP: reported faults of kind c.

All share a server, which is checked after each of them (:mod:`e2e.pool`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.harness import ServerProcess, text_of

pytestmark = pytest.mark.e2e

BASE: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def four_ways(server: ServerProcess, **fields: Any) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Text, finish reason and usage of the same request on both endpoints, streamed and not.

    The chat is made to see the very prompt of the completion.
    """
    messages = [{"role": "user", "content": "abc"}]
    rendered = server.post("/v1/chat/completions/render", messages=messages).json()
    body = BASE | fields
    chat, completion = {"messages": messages}, {"prompt": rendered["prompt_token_ids"]}
    options = {"include_usage": True}
    for path, prompt in (("/v1/completions", completion), ("/v1/chat/completions", chat)):
        whole = server.post(path, **prompt, **body).json()
        choice = whole["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        yield text, choice["finish_reason"], whole["usage"]
        events = list(server.stream(path, **prompt, **body, stream_options=options))
        reasons = [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]]
        assert len(reasons) == 1
        yield text_of(events), reasons[0], events[-1]["usage"]


def baseline(server: ServerProcess, tokens: int = 40) -> tuple[str, list[str]]:
    """A greedy answer to the same prompt, and its tokens' texts."""
    messages = [{"role": "user", "content": "abc"}]
    ids = server.post("/v1/chat/completions/render", messages=messages).json()["prompt_token_ids"]
    _, answer = server.complete(ids, **BASE, max_tokens=tokens, logprobs=0)
    choice = answer["choices"][0]
    return choice["text"], choice["logprobs"]["tokens"]


# B35, B37, B39
def test_stop_strings_cut_all_four_ways_alike(server: ServerProcess) -> None:
    text, tokens = baseline(server)
    middle = "".join(tokens[:10])
    inside = len(middle) if text.startswith(middle) else len(text) // 3
    candidates = [
        [text[inside - 1 : inside + 2]],  # begins in one token and ends in another
        [text[inside : inside + 1]],
        [text[inside : inside + 3], text[inside : inside + 6]],  # one begins the other
        [text[:1]],  # the very first character
        [text[inside + 4 : inside + 9], text[inside : inside + 4]],
        ["🙂 is not in there"],
    ]
    for stops in candidates:
        ends = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
        if ends:
            end = min(ends)[0]
            start = min(e - len(s) for e, s in ends if e == end)
            expected, reason = text[:start], "stop"
        else:
            expected, reason = text, "length"
        results = list(four_ways(server, max_tokens=40, stop=stops))
        assert [r[0] for r in results] == [expected] * 4, stops
        assert [r[1] for r in results] == [reason] * 4
        counts = {r[2]["completion_tokens"] for r in results}
        assert len(counts) == 1
        assert (counts.pop() < 40) == (reason == "stop") or reason == "length"


# B41
def test_bytes_that_are_no_text_are_still_json(server: ServerProcess) -> None:
    prompt = server.tokens(9, seed=1)
    for seed in range(10):
        body = {"temperature": 1.5, "top_k": 0, "max_tokens": 60, "logprobs": 5, "seed": seed}
        status, whole = server.complete(prompt, **body)
        assert status == 200
        assert (
            text_of(list(server.stream("/v1/completions", prompt=prompt, **body)))
            == (whole["choices"][0]["text"])
        )
    lone = server.post("/tokenize", prompt="🙂").json()["tokens"][0]  # 0xF0, half a character
    body = BASE | {"max_tokens": 5, "logit_bias": {str(lone): 100}}
    status, whole = server.complete(prompt, **body)
    assert status == 200
    assert whole["choices"][0]["text"] == "\ufffd" * 5
    assert text_of(list(server.stream("/v1/completions", prompt=prompt, **body))) == "\ufffd" * 5


# B43
def test_the_sampled_token_is_the_likeliest_when_greedy(server: ServerProcess) -> None:
    status, answer = server.chat("abc", **BASE, max_tokens=8, logprobs=True, top_logprobs=5)
    assert status == 200
    for entry in answer["choices"][0]["logprobs"]["content"]:
        assert entry["logprob"] <= 0
        assert len(entry["top_logprobs"]) == 5
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"]
        assert entry["token"] == entry["top_logprobs"][0]["token"]


# B45
def test_scoring_a_text_agrees_with_generating_it(server: ServerProcess) -> None:
    prompt = server.tokens(12, seed=2)
    body = {**BASE, "max_tokens": 8, "logprobs": 1, "return_token_ids": True}
    _, made = server.complete(prompt, **body)
    whole = prompt + made["choices"][0]["token_ids"]
    for many in (whole, [whole, prompt]):
        _, scored = server.complete(many, echo=True, logprobs=1, max_tokens=0)
        logprobs = scored["choices"][0]["logprobs"]["token_logprobs"]
        assert len(logprobs) == len(whole)
        assert logprobs[0] is None
        expected = made["choices"][0]["logprobs"]["token_logprobs"]
        assert logprobs[12:] == pytest.approx(expected, abs=1e-3)
        assert scored["usage"]["completion_tokens"] == 0


# B47, B59
def test_lengths_are_kept_to_the_token(server: ServerProcess) -> None:
    prompt = server.tokens(100, seed=3)
    _, answer = server.complete(prompt, **BASE, max_completion_tokens=50)
    assert answer["usage"]["completion_tokens"] == 50
    limit = server.http.get("/v1/models").json()["data"][0]["max_model_len"]
    prompt = server.tokens(limit - 28, seed=3)
    _, answer = server.complete(prompt, **BASE, max_tokens=28)
    assert answer["usage"]["completion_tokens"] == 28
    assert answer["choices"][0]["finish_reason"] == "length"
    assert server.complete(prompt, **BASE, max_tokens=29)[0] == 400


# B53
def test_logit_bias_forces_and_forbids(server: ServerProcess) -> None:
    prompt = server.tokens(10, seed=4)
    _, plain = server.complete(prompt, **BASE, max_tokens=4, return_token_ids=True)
    first = plain["choices"][0]["token_ids"][0]
    bodies = [
        {"logit_bias": {"77": 100}},
        {"logit_bias": {str(first): -100}},
        {"logit_bias": {str(k): -100 for k in range(320)}},
        {"logit_bias": {}},
    ]
    calls = [
        lambda body=body: server.complete(
            prompt, **BASE, max_tokens=4, return_token_ids=True, **body
        )
        for body in bodies
    ]
    results = [answer["choices"][0]["token_ids"] for _, answer in server.gather(calls)]
    assert results[0] == [77] * 4
    assert results[1][0] != first
    assert len(results[2]) == 4
    assert results[3] == plain["choices"][0]["token_ids"]


# B55
def test_tiny_temperatures_are_greedy_and_disturb_nobody(server: ServerProcess) -> None:
    prompt = server.tokens(10, seed=5)
    body = {"max_tokens": 12, "ignore_eos": True, "seed": 3}
    _, greedy = server.complete(prompt, **body, temperature=0)
    expected = greedy["choices"][0]["text"]
    cases: list[tuple[float, float, bool]] = [
        (0, 1, True), (1e-45, 1, True), (1e-10, 1, True), (1e-6, 0.0001, True), (2, 1, False),
        (100, 1, False), (1, 0.0001, True), (0.01, 1, False),
    ]  # fmt: skip
    calls = [
        lambda t=t, p=p: server.complete(prompt, **body, temperature=t, top_p=p)
        for t, p, _ in cases
    ]
    for (temperature, _, same), (status, answer) in zip(cases, server.gather(calls), strict=True):
        assert status == 200
        assert answer["usage"]["completion_tokens"] == 12
        if same:
            assert answer["choices"][0]["text"] == expected, temperature


# B61
def test_n_samples_differ_share_their_prompt_and_repeat_with_their_seed(
    server: ServerProcess,
) -> None:
    prompt = server.tokens(64, seed=6)
    body = {"n": 3, "temperature": 1, "seed": 7, "max_tokens": 12, "ignore_eos": True}
    _, whole = server.complete(prompt, **body)
    texts = [choice["text"] for choice in whole["choices"]]
    assert len(set(texts)) > 1
    events = list(server.stream("/v1/completions", prompt=prompt, **body))
    assert [text_of(events, k) for k in range(3)] == texts
    assert whole["usage"]["prompt_tokens"] == 64
    assert whole["usage"]["completion_tokens"] == 36
    _, pair = server.complete([prompt, prompt[:20]], **{**body, "n": 2})
    assert [choice["index"] for choice in pair["choices"]] == [0, 1, 2, 3]
    _, greedy = server.complete(prompt, **{**body, "temperature": 0})
    assert len({choice["text"] for choice in greedy["choices"]}) == 1


# B33
def test_equal_requests_at_once_get_equal_answers(server: ServerProcess) -> None:
    prompt = server.tokens(30, seed=8)
    _, alone = server.complete(prompt, **BASE, max_tokens=24)
    calls = [lambda: server.complete(prompt, **BASE, max_tokens=24)] * 12
    texts = {answer["choices"][0]["text"] for _, answer in server.gather(calls)}
    assert texts == {alone["choices"][0]["text"]}


# B69
def test_a_json_answer_is_json(server: ServerProcess) -> None:
    import json

    schema = {
        "type": "object", "properties": {"a": {"type": "integer", "maximum": 99}},
        "required": ["a"], "additionalProperties": False,
    }  # fmt: skip
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    status, answer = server.chat("abc", response_format=shape, max_tokens=300, seed=1)
    assert status == 200
    choice = answer["choices"][0]
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"])["a"], int)
    status, answer = server.complete(
        "x", structured_outputs={"choice": ["yes", "no"]}, max_tokens=20, seed=2
    )
    assert answer["choices"][0]["text"] in ("yes", "no")


# B91
def test_token_counters_agree_with_usage(server: ServerProcess) -> None:
    def total() -> float:
        return server.metric("vllm:generation_tokens_total")

    before, told = total(), 0
    for k in range(6):
        _, answer = server.complete(
            server.tokens(20 + k, seed=k), max_tokens=10 + k, n=1 + k % 3, temperature=1
        )
        told += answer["usage"]["completion_tokens"]
    assert total() - before == told
    assert not math.isnan(told)


# B19, B85 of the cached kind: a second time the prompt comes from the cache, with the same answer.
def test_a_repeated_prompt_comes_from_the_cache(server: ServerProcess) -> None:
    prompt = server.tokens(200, seed=77)
    _, cold = server.complete(prompt, **BASE, max_tokens=8)
    _, warm = server.complete(prompt, **BASE, max_tokens=8)
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] >= 176
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]
    assert server.http.post("/reset_prefix_cache").status_code == 200
    server.idle()
    _, again = server.complete(prompt, **BASE, max_tokens=8)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


# B25, B79
def test_clients_that_leave_free_their_pages(server: ServerProcess) -> None:
    for k in range(8):
        stream = server.stream(
            "/v1/completions", prompt=server.tokens(600, seed=k), max_tokens=800, **BASE
        )
        if k % 2:
            next(stream)
        stream.close()  # type: ignore[attr-defined]
    server.idle()
    assert server.metric("turnstile_pages", state="held") == 0
