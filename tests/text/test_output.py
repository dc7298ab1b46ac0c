from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import tiny_models
from budget import examples
from turnstile.text.logprobs import LOWEST, chat_logprobs, completion_logprobs
from turnstile.text.output import TextOptions, TextStream
from turnstile.text.stop import StopAutomaton
from turnstile.text.vocabulary import Vocabulary, build_vocabulary

BACKEND = tiny_models.make_tokenizer()
VOCABULARY = build_vocabulary(
    [BACKEND.id_to_token(i) for i in range(BACKEND.get_vocab_size())],
    byte_level=True, added={0, 1, 2}, special={0, 1, 2},
)  # fmt: skip


@dataclass
class Logprobs:
    logprob: float
    top: list[tuple[int, float]]


def ids_of(text: str) -> list[int]:
    ids: list[int] = BACKEND.encode(text).ids
    return ids


def words(*texts: str) -> Vocabulary:
    """A vocabulary whose token i is the i-th text."""
    return Vocabulary([text.encode() for text in texts], special=set())


def options(stops: Sequence[str] = (), **settings: Any) -> TextOptions:
    return TextOptions(stop=StopAutomaton(stops) if stops else None, **settings)


def run(vocabulary: Vocabulary, ids: list[int], **settings: Any) -> tuple[list[str], TextStream]:
    stops = settings.pop("stops", ())
    stream = TextStream(vocabulary, options(stops, **settings))
    texts = []
    for token in ids:
        stream.push(token)
        texts.append(stream.take().text)
    stream.finish()
    texts.append(stream.take().text)
    return texts, stream


text = st.text(alphabet="abé🙂 \n", max_size=30)


@given(text, st.lists(st.text(alphabet="abé🙂 \n", min_size=1, max_size=4), max_size=3))
@settings(max_examples=examples(400))
def test_streamed_and_unstreamed_text_agree_and_hold_no_stop(text: str, stops: list[str]) -> None:
    deltas, streamed = run(VOCABULARY, ids_of(text), stops=stops)
    whole = TextStream(VOCABULARY, options(stops))
    for token in ids_of(text):
        whole.push(token)
    whole.finish()
    assert whole.take().text == "".join(deltas)
    assert whole.num_tokens == streamed.num_tokens
    assert whole.stop_reason == streamed.stop_reason
    result = "".join(deltas)
    assert text.startswith(result)
    assert not any(stop in result for stop in stops)
    assert (result == text) == (not streamed.stopped)
    if streamed.stopped:
        assert text.startswith(result + str(streamed.stop_reason))


def test_text_that_may_begin_a_stop_is_held_until_it_cannot() -> None:
    deltas, stream = run(words("He", "llo", " Us", "ually", "."), [0, 1, 2, 3, 4], stops=[" User:"])
    assert deltas == ["He", "llo", "", " Usually", ".", ""]
    assert not stream.stopped


def test_what_is_held_comes_out_at_the_end() -> None:
    deltas, _ = run(words("a", " User"), [0, 1], stops=[" User:"])
    assert deltas == ["a", "", " User"]


def test_nothing_behind_a_stop_is_emitted_or_counted() -> None:
    vocabulary = words("ab", "cST", "OPd", "more")
    deltas, stream = run(vocabulary, [0, 1, 2, 3, 3], stops=["STOP"])
    assert deltas == ["ab", "c", "", "", "", ""]
    assert (stream.num_tokens, stream.stop_reason) == (3, "STOP")


def test_a_stop_in_the_first_characters_leaves_nothing() -> None:
    deltas, stream = run(words("Hello", " x"), [0, 1], stops=["Hello"])
    assert deltas == ["", "", ""]
    assert stream.stopped


def test_the_first_of_several_stops_in_one_token_wins() -> None:
    deltas, stream = run(words("one two three"), [0], stops=["three", "two", "e t"])
    assert "".join(deltas) == "on"
    assert stream.stop_reason == "e t"


def test_the_stop_string_stays_where_asked_and_ends_the_text() -> None:
    deltas, _ = run(words("ab", "cST", "OPd"), [0, 1, 2], stops=["STOP"], include_stop=True)
    assert "".join(deltas) == "abcSTOP"


def test_multi_byte_stops_cut_between_characters() -> None:
    for stop, left in (("字🙂", "é漢"), ("🙂", "é漢字"), ("\u200d", "é漢字🙂é")):
        deltas, _ = run(VOCABULARY, ids_of("é漢字🙂é\u200d漢"), stops=[stop])
        assert "".join(deltas) == left


def test_no_stop_string_ends_a_sample_before_its_minimum() -> None:
    vocabulary = words("x", "S")
    _, stream = run(vocabulary, [1, 0, 1, 0, 1, 0], stops=["S"], min_tokens=4)
    assert stream.num_tokens == 5
    _, stream = run(vocabulary, [1, 0, 1, 0], stops=["S"], min_tokens=3)
    assert stream.num_tokens == 3


def test_a_stop_token_counts_but_does_not_show() -> None:
    for include, expected in ((False, "a"), (True, "aEND")):
        stream = TextStream(words("a", "END"), options(include_stop=include))
        stream.push(0)
        assert stream.push(1, is_stop=True) is False
        stream.finish()
        assert stream.take().text == expected
        assert (stream.num_tokens, stream.stop_reason) == (2, 1)


def test_special_tokens_show_only_where_asked() -> None:
    ids = ids_of("a<|im_end|>b")
    assert "".join(run(VOCABULARY, ids)[0]) == "ab"
    assert "".join(run(VOCABULARY, ids, skip_special_tokens=False)[0]) == "a<|im_end|>b"


def test_offsets_point_at_the_text_of_each_token() -> None:
    text = "the é🙂 and"
    ids = ids_of(text)
    stream = TextStream(VOCABULARY, options(logprobs=True, offset=10))
    for token in ids:
        stream.push(token, Logprobs(-1.0, []))
    stream.finish()
    delta = stream.take()
    assert delta.token_ids == ids
    for entry in delta.logprobs:
        whole = entry.chosen.data.decode("utf-8", "ignore")
        assert text[entry.offset - 10 :].startswith(whole)
    assert b"".join(entry.chosen.data for entry in delta.logprobs).decode() == text


def test_entries_come_with_the_text_and_none_is_lost_at_a_stop() -> None:
    vocabulary = words("a", "b", "c")
    stream = TextStream(vocabulary, options(["bc"], logprobs=True))
    seen = []
    for token in (0, 1, 2, 0):
        stream.push(token, Logprobs(-0.5, [(token, -0.5)]))
        seen += stream.take().logprobs
    assert [entry.chosen.token_id for entry in seen] == [0, 1, 2]


def test_both_shapes_tell_parts_of_characters_apart_and_stay_json() -> None:
    lead, rest = ids_of("é")
    stream = TextStream(VOCABULARY, options(logprobs=True))
    stream.push(lead, Logprobs(-0.25, [(lead, -0.25), (rest, float("-inf"))]))
    stream.finish()
    entries = stream.take().logprobs
    completion = completion_logprobs(entries)
    assert completion["tokens"] == ["bytes:\\xc3"]
    assert completion["top_logprobs"] == [{"bytes:\\xc3": -0.25, "bytes:\\xa9": LOWEST}]
    chat = chat_logprobs(entries)
    assert chat["content"] == [
        {
            "token": "bytes:\\xc3", "logprob": -0.25, "bytes": [0xC3],
            "top_logprobs": [
                {"token": "bytes:\\xc3", "logprob": -0.25, "bytes": [0xC3]},
                {"token": "bytes:\\xa9", "logprob": LOWEST, "bytes": [0xA9]},
            ],
        }
    ]  # fmt: skip


def test_two_tokens_that_read_alike_both_appear_among_the_likeliest() -> None:
    stream = TextStream(words("A", "A", "B"), options(logprobs=True))
    stream.push(0, Logprobs(-0.1, [(0, -0.1), (1, -2.0), (2, -3.0)]))
    (top,) = completion_logprobs(stream.take().logprobs)["top_logprobs"]  # type: ignore[misc,attr-defined]
    assert top == {"A": -0.1, "token_id:1": -2.0, "B": -3.0}
