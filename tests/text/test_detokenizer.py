from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream

import tiny_models
from budget import examples
from turnstile.text import Detokenizer
from turnstile.text.vocabulary import BYTE_ALPHABET, Vocabulary, build_vocabulary

BACKEND = tiny_models.make_tokenizer()
SIZE = BACKEND.get_vocab_size()
VOCABULARY = build_vocabulary(
    [BACKEND.id_to_token(i) for i in range(SIZE)], byte_level=True, added={0, 1, 2},
    special={0, 1, 2},
)  # fmt: skip

any_ids = st.lists(st.integers(0, SIZE - 1), max_size=60)
text_ids = st.text(max_size=30).map(lambda text: BACKEND.encode(text).ids)


def deltas(ids: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(VOCABULARY, skip_special_tokens=skip)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@given(any_ids | text_ids, st.booleans())
@settings(max_examples=examples(500))
def test_joined_deltas_equal_the_library_s_full_decode(ids: list[int], skip: bool) -> None:
    assert "".join(deltas(ids, skip=skip)) == BACKEND.decode(ids, skip_special_tokens=skip)


@given(text_ids)
@settings(max_examples=examples(300))
def test_deltas_of_real_text_equal_the_library_s_decode_stream(ids: list[int]) -> None:
    stream = DecodeStream(skip_special_tokens=True)
    oracle = [stream.step(BACKEND, i) or "" for i in ids]
    assert deltas(ids) == [*oracle, ""]


@given(text_ids)
def test_no_replacement_character_is_emitted_for_text_that_has_none(ids: list[int]) -> None:
    assert "\ufffd" in BACKEND.decode(ids) or "\ufffd" not in "".join(deltas(ids))


def test_a_character_comes_out_whole_with_its_last_byte() -> None:
    ids = BACKEND.encode("é🙂").ids
    assert deltas(ids) == ["", "é", "", "", "", "🙂", ""]


def test_half_a_character_at_the_end_is_one_replacement() -> None:
    ids = BACKEND.encode("🙂").ids[:3]
    assert deltas(ids) == ["", "", "", "\ufffd"]


def test_a_broken_character_is_replaced_as_soon_as_it_cannot_be_completed() -> None:
    lead = BACKEND.encode("🙂").ids[0]
    the = BACKEND.encode("t").ids
    assert deltas([lead, *the]) == ["", "\ufffdt", ""]


def test_ids_outside_the_vocabulary_add_nothing() -> None:
    assert deltas([SIZE, SIZE + 1000, -1]) == ["", "", "", ""]


def test_the_first_space_goes_only_where_asked_and_only_once() -> None:
    vocabulary = Vocabulary([b" a", b" ", b"<s>"], special={2})

    def decode(ids: list[int], *, strip: bool) -> str:
        detokenizer = Detokenizer(vocabulary, strip_first_space=strip)
        return "".join(map(detokenizer.push, ids))

    assert decode([2, 0, 0], strip=True) == "a a"
    assert decode([1, 0], strip=True) == " a"
    assert decode([0, 0], strip=False) == " a a"


def test_the_byte_alphabet_is_the_library_s() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    assert set(BYTE_ALPHABET) == set(ByteLevel.alphabet())
    assert sorted(BYTE_ALPHABET.values()) == list(range(256))
