"""What answers say: both endpoints, in one piece and streamed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from server.fake_engine import Failure
from server.served import Serve, events, joined
from turnstile.text.errors import CANNOT_FOLLOW


def test_a_completion_has_text_reason_and_usage(serve: Serve) -> None:
    async def test() -> None:
        async with serve("hello world") as served:
            answer = (await served.complete("hi there", max_tokens=5)).json()
            choice = answer["choices"][0]
            said = served.tokenizer.encode("hello world")[:5]
            assert answer["object"] == "text_completion"
            assert answer["model"] == "tiny"
            assert choice["text"] == served.tokenizer.decode(said)
            assert choice["finish_reason"] == "length"
            prompt = len(served.tokenizer.encode("hi there"))
            assert answer["usage"]["prompt_tokens"] == prompt
            assert answer["usage"]["completion_tokens"] == 5
            assert answer["usage"]["total_tokens"] == prompt + 5
            assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}

    asyncio.run(test())


@pytest.mark.parametrize("path", ["completions", "chat"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_says_what_the_answer_in_one_piece_says(serve: Serve, path: str, n: int) -> None:
    def script(generation: Any, sample: int) -> list[int]:
        return [100 + sample, 101 + generation.seed % 5, 3 + sample, 120, 121, 122, 123]

    async def test() -> None:
        async with serve(script) as served:
            ask = served.complete if path == "completions" else served.chat
            whole = (await ask(n=n, max_tokens=7, seed=7)).json()
            options = {"include_usage": True}
            stream = await ask(n=n, max_tokens=7, seed=7, stream=True, stream_options=options)
            chunks = events(stream)
            assert len(whole["choices"]) == n
            for choice in whole["choices"]:
                text = choice["text"] if path == "completions" else choice["message"]["content"]
                assert joined(chunks, choice["index"]) == text
                reasons = [
                    c["finish_reason"]
                    for chunk in chunks
                    for c in chunk["choices"]
                    if c["index"] == choice["index"] and c["finish_reason"] is not None
                ]
                assert reasons == [choice["finish_reason"]]
            assert chunks[-1]["choices"] == []
            assert chunks[-1]["usage"] == whole["usage"]
            assert all(chunk["usage"] is None for chunk in chunks[:-1])
            assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1

    asyncio.run(test())


# B35, B39: the earliest match wins, nothing behind it is sent, both ways count the same tokens.
@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (["wor"], "hello "),
        (["o w"], "hell"),
        (["hello world!", "llo"], "he"),
        (["h"], ""),
        (["foo", "world", "w"], "hello "),
    ],
)
@pytest.mark.parametrize("path", ["completions", "chat"])
def test_stop_strings_end_both_kinds_of_answer_alike(
    serve: Serve, path: str, stops: list[str], text: str
) -> None:
    async def test() -> None:
        async with serve("hello world! and more of it") as served:
            ask = served.complete if path == "completions" else served.chat
            whole = (await ask(stop=stops, max_tokens=20)).json()
            choice = whole["choices"][0]
            got = choice["text"] if path == "completions" else choice["message"]["content"]
            assert got == text
            assert choice["finish_reason"] == "stop"
            assert choice["stop_reason"] in stops
            assert whole["usage"]["completion_tokens"] < 20
            options = {"include_usage": True}
            stream = await ask(stop=stops, max_tokens=20, stream=True, stream_options=options)
            chunks = events(stream)
            assert joined(chunks) == text
            assert chunks[-1]["usage"] == whole["usage"]
            assert all(s.cancelled[0] == (0, "stop") for s in served.engine.streams)

    asyncio.run(test())


# B61: a stop that hits one sample leaves the others alone.
def test_a_stop_string_ends_only_the_sample_it_is_in(serve: Serve) -> None:
    async def test() -> None:
        async with serve(lambda generation, sample: [70 + sample] * 6) as served:
            stop = served.tokenizer.decode([71, 71])
            answer = (await served.complete(n=3, stop=stop, max_tokens=6)).json()
            reasons = [choice["finish_reason"] for choice in answer["choices"]]
            assert reasons == ["length", "stop", "length"]
            assert answer["usage"]["completion_tokens"] == 6 + 2 + 6

    asyncio.run(test())


# B37, B41: a character that spans tokens is sent whole; bytes that are none become U+FFFD.
def test_characters_that_span_tokens_arrive_whole(serve: Serve) -> None:
    async def test() -> None:
        async with serve("é漢字🙂!") as served:
            count = len(served.tokenizer.encode("é漢字🙂!"))
            chunks = events(await served.complete(max_tokens=count, stream=True))
            assert joined(chunks) == "é漢字🙂!"
            assert all("\ufffd" not in c["text"] for chunk in chunks for c in chunk["choices"])
            cut = (await served.complete(max_tokens=count - 2)).json()["choices"][0]["text"]
            assert cut == "é漢字\ufffd"
            stopped = (await served.complete(stop="字🙂", max_tokens=count)).json()
            assert stopped["choices"][0]["text"] == "é漢"

    asyncio.run(test())


def test_an_end_of_sequence_token_stops_without_text_or_stop_reason(serve: Serve) -> None:
    end = 2

    async def test() -> None:
        async with serve(lambda generation, sample: [70, 71, end, 72]) as served:
            answer = (await served.complete(max_tokens=10)).json()
            choice = answer["choices"][0]
            assert choice["text"] == served.tokenizer.decode([70, 71])
            assert choice["finish_reason"] == "stop"
            assert choice["stop_reason"] is None
            assert answer["usage"]["completion_tokens"] == 3
            ignoring = (await served.complete(max_tokens=10, ignore_eos=True)).json()
            assert ignoring["choices"][0]["finish_reason"] == "length"
            own = (await served.complete(max_tokens=10, stop_token_ids=[71])).json()
            assert own["choices"][0]["stop_reason"] == 71

    asyncio.run(test())


def test_many_prompts_make_choices_in_order(serve: Serve) -> None:
    async def test() -> None:
        async with serve(lambda generation, k: [generation.prompt[0], 80 + k]) as served:
            prompts = [[70], [71, 72], [73]]
            answer = (await served.complete(prompts, n=2, max_tokens=2)).json()
            assert [c["index"] for c in answer["choices"]] == list(range(6))
            expected = [[p, 80 + k] for p in (70, 71, 73) for k in range(2)]
            texts = [served.tokenizer.decode(ids) for ids in expected]
            assert [c["text"] for c in answer["choices"]] == texts
            assert answer["usage"]["prompt_tokens"] == 4
            assert answer["usage"]["completion_tokens"] == 12
            chunks = events(await served.complete(prompts, n=2, max_tokens=2, stream=True))
            assert [joined(chunks, i) for i in range(6)] == texts

    asyncio.run(test())


# B45: echo covers prompt and output, max_tokens 0 scores.
@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_scores_the_prompt(serve: Serve, stream: bool) -> None:
    async def test() -> None:
        async with serve() as served:
            text = "The cat sat 🙂"
            ids = served.tokenizer.encode(text)
            for prompt in (text, ids):
                answer = await served.complete(
                    prompt, echo=True, logprobs=1, max_tokens=0, stream=stream
                )
                if stream:
                    chunks = events(answer)
                    choice = chunks[0]["choices"][0]
                    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
                else:
                    choice = answer.json()["choices"][0]
                    assert choice["finish_reason"] == "length"
                    assert answer.json()["usage"]["completion_tokens"] == 0
                logprobs = choice["logprobs"]
                assert choice["text"] == text
                assert len(logprobs["token_logprobs"]) == len(ids)
                assert logprobs["token_logprobs"][0] is None
                assert all(value == -0.5 for value in logprobs["token_logprobs"][1:])
                assert logprobs["text_offset"][0] == 0
                assert max(logprobs["text_offset"]) <= len(text)

    asyncio.run(test())


def test_echo_puts_the_prompt_before_the_output(serve: Serve) -> None:
    async def test() -> None:
        async with serve("xyz") as served:
            body = {"echo": True, "logprobs": 0, "max_tokens": 3}
            whole = (await served.complete("ab é", **body)).json()["choices"][0]
            assert whole["text"] == "ab éxyz"
            assert whole["logprobs"]["text_offset"][-3:] == [4, 5, 6]
            assert joined(events(await served.complete("ab é", **body, stream=True))) == "ab éxyz"
            assert (await served.complete("ab", echo=True, max_tokens=0)).json()["choices"][0][
                "text"
            ] == "ab"

    asyncio.run(test())


# B43: the shape of log-probabilities, in one piece and streamed.
def test_completion_logprobs_are_parallel_arrays(serve: Serve) -> None:
    async def test() -> None:
        async with serve("hello world") as served:
            whole = (await served.complete(max_tokens=4, logprobs=2)).json()
            logprobs = whole["choices"][0]["logprobs"]
            assert [len(logprobs[key]) for key in logprobs] == [4, 4, 4, 4]
            assert all(len(top) == 2 for top in logprobs["top_logprobs"])
            chunks = events(await served.complete(max_tokens=4, logprobs=2, stream=True))
            streamed = [
                value for c in chunks for value in c["choices"][0]["logprobs"]["token_logprobs"]
            ]
            assert streamed == logprobs["token_logprobs"]
            none = (await served.complete(max_tokens=1, logprobs=0)).json()["choices"][0]
            assert none["logprobs"]["top_logprobs"] == [None]

    asyncio.run(test())


def test_chat_logprobs_carry_tokens_and_bytes(serve: Serve) -> None:
    async def test() -> None:
        async with serve("é!") as served:
            body = {"logprobs": True, "top_logprobs": 3, "max_tokens": 3}
            content = (await served.chat(**body)).json()["choices"][0]["logprobs"]["content"]
            assert bytes(b for entry in content for b in entry["bytes"]) == "é!".encode()
            assert all(len(entry["top_logprobs"]) == 3 for entry in content)
            chunks = events(await served.chat(**body, stream=True))
            streamed = [
                entry
                for c in chunks
                if c["choices"] and c["choices"][0]["logprobs"]
                for entry in c["choices"][0]["logprobs"]["content"]
            ]
            assert streamed == content
            bare = (await served.chat(logprobs=True, max_tokens=1)).json()
            assert bare["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []

    asyncio.run(test())


def test_best_of_returns_the_likeliest_and_charges_all(serve: Serve) -> None:
    async def test() -> None:
        async with serve(lambda generation, sample: [70 + sample]) as served:
            answer = (await served.complete(best_of=3, n=2, max_tokens=2)).json()
            assert [c["index"] for c in answer["choices"]] == [0, 1]
            assert answer["usage"]["completion_tokens"] == 6
            assert answer["choices"][0]["logprobs"] is None
            assert (await served.complete(best_of=1, n=2)).status_code == 400
            assert (await served.complete(best_of=3, stream=True)).status_code == 400

    asyncio.run(test())


def test_continuous_usage_grows_with_every_chunk(serve: Serve) -> None:
    async def test() -> None:
        async with serve("abcdef") as served:
            options = {"include_usage": True, "continuous_usage_stats": True}
            body = {"max_tokens": 6, "stream": True, "stream_options": options}
            chunks = events(await served.complete(**body))
            counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert counts == [1, 2, 3, 4, 5, 6, 6]

    asyncio.run(test())


# B49: the grammar of chat chunks.
def test_chat_chunks_begin_with_a_role_and_end_with_an_empty_delta(serve: Serve) -> None:
    async def test() -> None:
        async with serve("hi") as served:
            chunks = events(await served.chat(n=2, max_tokens=2, stream=True))
            for index in range(2):
                mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
                assert mine[0]["delta"] == {"role": "assistant", "content": ""}
                assert all("role" not in c["delta"] for c in mine[1:])
                assert mine[-1]["delta"] == {}
                assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["length"]
                assert all({"index", "delta", "finish_reason"} <= c.keys() for c in mine)

    asyncio.run(test())


def test_stream_interval_sends_fewer_chunks_with_the_same_text(serve: Serve) -> None:
    async def test() -> None:
        async with serve("abcdefghij") as served:
            every = events(await served.complete(max_tokens=10, stream=True))
            fewer = events(await served.complete(max_tokens=10, stream=True, stream_interval=4))
            assert joined(every) == joined(fewer)
            assert len(every) == 10
            assert len(fewer) == 4

    asyncio.run(test())


# B47, B59: defaults and aliases of max_tokens.
def test_max_completion_tokens_wins_and_a_chat_gets_the_room_left(serve: Serve) -> None:
    async def test() -> None:
        async with serve("x", max_model_len=64) as served:

            async def tokens(prompt: Any = "hello", **body: Any) -> int:
                usage = (await served.complete(prompt, **body)).json()["usage"]
                return int(usage["completion_tokens"])

            assert await tokens(max_completion_tokens=30) == 30
            assert await tokens(max_completion_tokens=3, max_tokens=9) == 3
            assert await tokens() == 16
            assert await tokens([70] * 60) == 4
            assert (await served.chat()).json()["usage"]["total_tokens"] == 64

    asyncio.run(test())


def test_ids_of_prompt_and_output_are_returned_on_request(serve: Serve) -> None:
    async def test() -> None:
        async with serve(lambda generation, sample: [80, 81]) as served:
            body = {"max_tokens": 2, "return_token_ids": True}
            choice = (await served.complete([70, 71], **body)).json()["choices"][0]
            assert choice["token_ids"] == [80, 81]
            assert choice["prompt_token_ids"] == [70, 71]
            chunks = events(await served.complete([70, 71], **body, stream=True))
            streamed = [t for c in chunks for t in c["choices"][0].get("token_ids", [])]
            assert streamed == [80, 81]

    asyncio.run(test())


def test_prompt_logprobs_cover_every_prompt_token(serve: Serve) -> None:
    async def test() -> None:
        async with serve("x") as served:
            body = {"max_tokens": 1, "prompt_logprobs": 2}
            choice = (await served.complete([70, 71, 72], **body)).json()["choices"][0]
            assert choice["prompt_logprobs"][0] is None
            assert [set(e) for e in choice["prompt_logprobs"][1:]] == [{"71", "72"}, {"72", "73"}]
            assert choice["prompt_logprobs"][1]["71"]["rank"] == 1

    asyncio.run(test())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "ab"}},
    ],
)
def test_a_grammar_the_engine_cannot_follow_is_the_clients_fault(
    serve: Serve, fields: dict[str, Any], stream: bool
) -> None:
    async def test() -> None:
        async with serve() as served:
            served.engine.failures[0] = Failure(CANNOT_FOLLOW + "too many expressions")
            answer = await served.chat(**fields, stream=stream)
            assert answer.status_code == (200 if stream else 400)
            lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
            error = next(json.loads(line) for line in lines if '"error"' in line)
            assert error["error"]["type"] == "invalid_request_error"
            assert error["error"]["param"] == next(iter(fields))
            assert "too many expressions" in error["error"]["message"]

    asyncio.run(test())


# B69: what is asked of the output's shape reaches the engine.
def test_a_response_format_becomes_a_grammar(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served:
            for fields, word in (
                ({"response_format": {"type": "json_object"}}, "json_schema"),
                ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes"),
            ):
                assert (await served.chat(**fields, max_tokens=1)).status_code == 200
                assert word in (served.engine.streams[-1].generation.params.grammar or "")
            text = {"response_format": {"type": "text"}}
            assert (await served.chat(**text, max_tokens=1)).status_code == 200
            assert served.engine.streams[-1].generation.params.grammar is None

    asyncio.run(test())
