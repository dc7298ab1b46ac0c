"""Reported faults of kind c about log-probabilities: their shape, echoed prompts, their cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from e2e.harness import ServerProcess, text_of
from e2e.pool import Srv

pytestmark = pytest.mark.e2e

BASE: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


# B43 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logprobs", [True, False, None])
@pytest.mark.parametrize("top", ["absent", 0, 5, 20, 21, -1, "5", None])
def test_b43_chat_takes_what_makes_sense_and_answers_all_fields(
    server: ServerProcess, logprobs: bool | None, top: Any
) -> None:
    body: dict[str, Any] = {**BASE, "max_tokens": 3, "logprobs": logprobs}
    if top != "absent":
        body["top_logprobs"] = top
    status, answer = server.chat("abc", **body)
    asked = 0 if top in ("absent", None) else top
    sensible = asked in (0, 5, 20) and not isinstance(asked, str)
    if not sensible or (not logprobs and top not in ("absent", None)):
        assert status == 400
        assert answer["error"]["param"] == "top_logprobs"
        return
    assert status == 200
    messages = [{"role": "user", "content": "abc"}]
    events = list(server.stream("/v1/chat/completions", messages=messages, **body))
    streamed = [
        entry
        for event in events
        for choice in event["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    if not logprobs:
        assert answer["choices"][0]["logprobs"] is None
        assert not streamed
        return
    content = answer["choices"][0]["logprobs"]["content"]
    assert streamed == content
    assert len(content) == 3
    for entry in content:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == asked
        assert entry["logprob"] <= 0
        for other in entry["top_logprobs"]:
            assert set(other) == {"token", "logprob", "bytes"}
        if asked:
            assert {k: entry[k] for k in ("token", "logprob", "bytes")} == entry["top_logprobs"][0]


@pytest.mark.parametrize(
    ("count", "status"),
    [(0, 200), (1, 200), (5, 200), (20, 200),
     (100, 400), (-1, 400), ("5", 400), (True, 400)],
)  # fmt: skip
def test_b43_completions_have_the_older_shape(
    server: ServerProcess, count: Any, status: int
) -> None:
    prompt = server.tokens(9, seed=43)
    body = {**BASE, "max_tokens": 20, "logprobs": count}
    got, answer = server.complete(prompt, **body)
    assert got == status, answer
    if status == 400:
        assert answer["error"]["param"] == "logprobs"
        return
    choice = answer["choices"][0]
    shape = choice["logprobs"]
    assert set(shape) >= {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert len({len(shape[key]) for key in shape}) == 1
    for place, offset in enumerate(shape["text_offset"]):
        piece = shape["tokens"][place]
        if "\ufffd" not in piece and not piece.startswith("bytes:"):
            assert choice["text"].startswith(piece, offset)
    for token, logprob, top in zip(
        shape["tokens"], shape["token_logprobs"], shape["top_logprobs"], strict=True
    ):
        if count:
            assert len(top) in (count, count - 1, count + 1)  # two tokens may look alike
            assert top[token] == logprob == max(top.values())
    events = list(server.stream("/v1/completions", prompt=prompt, **body))
    streamed: list[Any] = [
        p for e in events for c in e["choices"] for p in c["logprobs"]["token_logprobs"]
    ]
    assert streamed == shape["token_logprobs"]


def test_b43_offsets_count_characters_of_many_bytes_once(server: ServerProcess) -> None:
    words = "é漢字🙂 done"
    body = {"structured_outputs": {"choice": [words]}, "max_tokens": 60, "logprobs": 0}
    _, answer = server.complete("é🙂", **body, echo=True, temperature=0)
    choice = answer["choices"][0]
    assert choice["text"] == "é🙂" + words
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    at = choice["logprobs"]["tokens"].index("d")
    assert offsets[at] == choice["text"].index("d")


# B45 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_b45_an_echoed_prompt_has_log_probabilities(
    server: ServerProcess, stream: bool, max_tokens: int
) -> None:
    words = "The cat sat"
    ids = server.post("/tokenize", prompt=words).json()["tokens"]
    for prompt in (words, ids, [words, "a dog"], [ids, [70, 71]]):
        body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": max_tokens} | BASE
        if stream:
            options = {"include_usage": True}
            events = list(server.stream("/v1/completions", **body, stream_options=options))
            usage = events[-1]["usage"]
            said = text_of(events)
            parts = [c["logprobs"] for e in events for c in e["choices"] if c["index"] == 0]
            scores = [p for part in parts if part for p in part["token_logprobs"]]
            reasons = [c["finish_reason"] for e in events for c in e["choices"]]
            assert {reason for reason in reasons if reason} == {"length"}
        else:
            answer = server.post("/v1/completions", **body).json()
            usage, first = answer["usage"], answer["choices"][0]
            said, scores = first["text"], first["logprobs"]["token_logprobs"]
            assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
        assert said.startswith(words)
        assert (said == words) == (max_tokens == 0)
        assert len(scores) == len(ids) + max_tokens
        assert scores[0] is None
        assert all(score <= 0 for score in scores[1:])
        batch = isinstance(prompt, list) and not isinstance(prompt[0], int)
        assert usage["completion_tokens"] == max_tokens * (2 if batch else 1)


def test_b45_a_scored_prompt_agrees_with_a_plain_forward_pass(srv: Srv, tiny: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    server = srv(pages=64, chunk=32, dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(str(tiny), dtype=torch.float32)
    for length in (2, 31, 32, 33, 200):
        ids = server.tokens(length, seed=length)
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0]
        right = logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        body = {"echo": True, "logprobs": 1, "max_tokens": 0}
        for _ in range(2):  # the second time the prefix cache could have it, and must not
            _, answer = server.complete(ids, **body)
            scores = answer["choices"][0]["logprobs"]["token_logprobs"]
            assert scores[1:] == pytest.approx(right.tolist(), abs=1e-3)


def test_b45_max_tokens_0_without_echo_is_refused(server: ServerProcess) -> None:
    for fields in ({}, {"logprobs": 1}, {"echo": False}):
        status, answer = server.complete("The cat", max_tokens=0, **fields)
        assert status == 400
        assert answer["error"]["param"] == "max_tokens"
    assert server.complete("The cat", max_tokens=0, echo=True)[0] == 200


# B77 ---------------------------------------------------------------------------------------------


def test_b77_a_request_for_the_whole_vocabulary_costs_nothing(server: ServerProcess) -> None:
    process = psutil.Process(server.engine_pid)
    prompt = server.tokens(1500, seed=77)
    server.complete(prompt, echo=True, logprobs=20, max_tokens=1)
    before = process.memory_info().rss
    for count in (-1, 21, 320, 10**9, 2**70):
        for fields in ({"logprobs": count, "echo": True}, {"prompt_logprobs": count}):
            status, answer = server.complete(prompt, max_tokens=1, **fields)
            assert status == 400, fields
            assert answer["error"]["param"] in fields or "logprobs" in answer["error"]["param"]
        assert server.chat("a", logprobs=True, top_logprobs=count, max_tokens=1)[0] == 400
        assert server.chat("a", prompt_logprobs=count, max_tokens=1)[0] == 400
    # What is allowed at most is bounded by the context: it comes and goes.
    for _ in range(3):
        assert server.complete(prompt, echo=True, logprobs=20, max_tokens=1)[0] == 200
    assert process.memory_info().rss < before + 64 * 2**20
