"""Reported faults of kind c about text: where it stops, and bytes that are none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cases.servers import four_ways, text
from e2e.harness import ServerProcess, text_of

pytestmark = pytest.mark.e2e

BASE: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def saying(words: str) -> dict[str, Any]:
    """Fields that make any model say exactly this, whatever its tokens are."""
    return {"structured_outputs": {"choice": [words]}, "max_tokens": 200, "ignore_eos": False}


def expected(whole: str, stops: list[str], *, include: bool = False) -> tuple[str, str]:
    """What a client gets of a text: the stop string that is completed first ends it."""
    ends = [(whole.find(stop) + len(stop), -len(stop)) for stop in stops if stop in whole]
    if not ends:
        return whole, ""
    end, length = min(ends)
    return whole[: end if include else end + length], whole[end + length : end]


# B35 ---------------------------------------------------------------------------------------------

WORDS = "the foobar and the other thing in another hand, over and out"
STOPS = [
    ["foo"],
    ["foobar", "foo"],  # one begins the other: the shorter is complete first
    ["bar", "foobar"],  # both end at the same character: neither shows
    ["obar and th"],  # begins in one token, ends some tokens later
    ["r", "d"],
    ["t"],  # the very first character
    ["the foobar"],
    [WORDS],  # all there is
    ["out"],  # the end of all there is
    ["outside"],  # held back at the end, and never completed
    ["and o", "and the", "hand"],
    ["nowhere to be found"],
    ["the other thing in another hand, over and outside", "over"],
    [WORDS[k : k + 2] for k in range(40, 56)],
]


@pytest.mark.parametrize("stops", STOPS, ids=str)
@pytest.mark.parametrize("include", [False, True])
def test_b35_nothing_behind_a_stop_string_is_said(
    server: ServerProcess, stops: list[str], include: bool
) -> None:
    said, stop = expected(WORDS, stops, include=include)
    fields = {**saying(WORDS), "stop": stops, "include_stop_str_in_output": include}
    ways = list(four_ways(server, **fields))
    assert [way[0] for way in ways] == [said] * 4
    assert {way[1] for way in ways} == {"stop"}
    assert ways[0][2] == ways[1][2] == ways[2][2] == ways[3][2]
    _, answer = server.complete("x", **fields, temperature=0, return_token_ids=True, logprobs=0)
    choice = answer["choices"][0]
    assert choice["stop_reason"] == (stop or None)
    # The token that completes the stop string is the last one counted, and the last one told.
    count = answer["usage"]["completion_tokens"]
    assert len(choice["token_ids"]) == count
    assert len(choice["logprobs"]["tokens"]) == count
    if stop:
        pieces = choice["logprobs"]["tokens"]
        assert stop in "".join(pieces)
        assert stop not in "".join(pieces[:-1])


def test_b35_every_place_of_an_answer_can_be_a_stop(server: ServerProcess) -> None:
    _, answer = server.complete(server.tokens(9, seed=35), **BASE, max_tokens=60)
    whole = answer["choices"][0]["text"]
    for start in range(0, len(whole) - 4, 3):
        stop = whole[start : start + 1 + start % 4]
        _, cut = server.complete(server.tokens(9, seed=35), **BASE, max_tokens=60, stop=stop)
        assert cut["choices"][0]["text"] == whole[: whole.index(stop)]


def test_b35_each_sample_has_a_stop_of_its_own(server: ServerProcess) -> None:
    body = {"n": 4, "temperature": 1.0, "seed": 35, "max_tokens": 40, "ignore_eos": True}
    prompt = server.tokens(9, seed=35)
    _, plain = server.complete(prompt, **body)
    texts = [choice["text"] for choice in plain["choices"]]
    only = next(c for c in texts[1] if all(c not in t for t in [*texts[:1], *texts[2:]]))
    _, stopped = server.complete(prompt, **body, stop=only)
    assert [c["text"] for c in stopped["choices"]] == [
        t.partition(only)[0] if k == 1 else t for k, t in enumerate(texts)
    ]
    assert [c["finish_reason"] for c in stopped["choices"]] == ["length", "stop"] + ["length"] * 2
    events = list(server.stream("/v1/completions", prompt=prompt, **body, stop=only))
    assert [text_of(events, k) for k in range(4)] == [c["text"] for c in stopped["choices"]]


# B37 ---------------------------------------------------------------------------------------------

MANY_BYTES = "é漢字🙂é漢字🙂 e\u0301x 👨\u200d👩\u200d👧 ﷽ \u2028 done"


@pytest.mark.parametrize(
    "stops",
    [["字🙂"], ["🙂"], ["漢"], ["\u0301"], ["\u200d"], ["👧"], ["﷽"], ["\u2028"], ["🙃", "\u0302"],
     ["é漢字🙂é漢字🙂 e"], ["\u200d👧", "👩"], ["🙂é", "🙂 "]],
    ids=ascii,
)  # fmt: skip
def test_b37_stop_strings_of_many_bytes_cut_between_characters(
    server: ServerProcess, stops: list[str]
) -> None:
    said, _ = expected(MANY_BYTES, stops)
    ways = list(four_ways(server, **saying(MANY_BYTES), stop=stops))
    assert [way[0] for way in ways] == [said] * 4
    assert "\ufffd" not in said


def test_b37_no_chunk_of_a_stream_cuts_a_character(server: ServerProcess) -> None:
    for interval in (1, 2, 3):
        events = list(
            server.stream(
                "/v1/completions", prompt="x", temperature=0, stream_interval=interval,
                **saying(MANY_BYTES),
            )
        )  # fmt: skip
        assert text_of(events) == MANY_BYTES
        assert not any("\ufffd" in text_of([event]) for event in events)
        assert len(events) > 5


# B39 ---------------------------------------------------------------------------------------------


@pytest.mark.model
def test_b39_the_stop_string_is_not_in_the_answer_and_ends_it(real: ServerProcess) -> None:
    question = "Count from 1 to 10, with commas."
    whole = real.chat(question, temperature=0, max_tokens=100)
    assert "7" in text(whole)
    messages = [{"role": "user", "content": question}]
    for said, reason, usage in four_ways(
        real, messages, stop=["7"], max_tokens=100, ignore_eos=False
    ):
        assert said == text(whole).partition("7")[0]
        assert reason == "stop"
        assert usage["completion_tokens"] < whole[1]["usage"]["completion_tokens"]


def test_b39_a_stop_string_ends_the_work_too(single: ServerProcess) -> None:
    server = single
    said = text(server.complete(server.tokens(9, seed=39), **BASE, max_tokens=20))
    before = server.metric("turnstile_steps_total")
    body = {**BASE, "max_tokens": 30_000, "stop": said[3:6]}
    answer = server.complete(server.tokens(9, seed=39), **body)
    assert text(answer) == said[: said.index(said[3:6])]
    server.idle()
    # The API process finds it while the engine goes on: not as far as it would have gone.
    assert server.metric("turnstile_steps_total") - before < 10_000


# B41 ---------------------------------------------------------------------------------------------


def test_b41_any_bytes_are_still_json(server: ServerProcess) -> None:
    prompt = server.tokens(9, seed=1)

    def one(seed: int) -> None:
        body = {"temperature": 1.5, "top_k": 0, "max_tokens": 100, "seed": seed, "logprobs": 5}
        status, whole = server.complete(prompt, **body)
        assert status == 200
        events = list(server.stream("/v1/completions", prompt=prompt, **body))
        assert text_of(events) == whole["choices"][0]["text"]
        json.dumps(whole).encode()

    for first in range(0, 50, 25):
        server.gather([lambda s=s: one(s) for s in range(first, first + 25)])


@pytest.mark.parametrize("character", ["🙂", "漢", "é"])
@pytest.mark.parametrize("place", [0, -1])
def test_b41_half_a_character_is_a_replacement_and_no_error(
    server: ServerProcess, character: str, place: int
) -> None:
    half = server.post("/tokenize", prompt=character).json()["tokens"][place]
    fields = {"logit_bias": {str(half): 100}, "max_tokens": 5}
    ways = list(four_ways(server, **fields))
    assert [way[0] for way in ways] == ["\ufffd" * 5] * 4
    _, chat = server.chat("x", **BASE, **fields, logprobs=True, top_logprobs=3)
    entries = chat["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [[character.encode()[place]]] * 5
    _, echoed = server.complete([half], **BASE, echo=True, logprobs=1, max_tokens=2)
    assert echoed["choices"][0]["text"].startswith("\ufffd")


@pytest.mark.parametrize("text", ['"\\ud83d"', '"a\\udc00b"', '["ok", "\\ud800\\ud800"]'])
def test_b41_half_a_surrogate_pair_in_a_request_is_no_server_error(
    server: ServerProcess, text: str
) -> None:
    headers = {"content-type": "application/json"}
    for path, body in (
        ("/v1/completions", '{"prompt": %s, "max_tokens": 2}'),
        ("/v1/completions", '{"prompt": "a", "max_tokens": 2, "stop": %s}'),
        ("/tokenize", '{"prompt": %s}'),
        ("/v1/chat/completions", '{"messages": [{"role": "user", "content": %s}]}'),
    ):
        answer = server.http.post(path, content=(body % text).encode(), headers=headers)
        assert answer.status_code in (200, 400), answer.text
        answer.json()
