"""What is kept of long texts: exact, apart by salt, bounded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

import tiny_models
from budget import examples
from text.test_tokenizer import sentencepiece_metadata, tiny_metadata
from turnstile.text import Tokenizer
from turnstile.text.sections import LEAST_CHARS, SectionCache

TURN = "<|im_end|>"
PARTS = [
    TURN, "<|im_start|>", "<|im_", "end|>", "<", "|>", "<tool>", "<tool>s", "tool>", "END", "EN",
    "D", "the", "The ", " the", " ", "  ", "\n", "\r\n", "\n\n ", "é", "e\u0301", "한글", "12", "3",
    "'s", "'", ".", "\ud800", "\udc00", "x" * 40,
]  # fmt: skip


def whole_words() -> Tokenizer:
    """Takes words from the vocabulary, has a control token that is one, and three ways to split."""
    metadata = tiny_metadata()
    tokens = [*metadata["tokenizer.ggml.tokens"], "END"]  # type: ignore[misc]
    return Tokenizer.from_gguf(
        metadata
        | {
            "tokenizer.ggml.pre": "llama-bpe",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3, 3, 3, *[1] * (len(tokens) - 4), 3],
            "tokenizer.ggml.add_bos_token": True,
        }
    )


def with_added(root: Path, normalizer: object = None, **flags: bool) -> Tokenizer:
    """One with added tokens that are no control tokens, and begin with one another."""
    backend = tiny_models.make_tokenizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_tokens([AddedToken(t, normalized=False, **flags) for t in ("<tool>", "<tool>s")])
    tiny_models.write_tokenizer(root)
    (root / "tokenizer.json").write_text(json.dumps(json.loads(backend.to_str())))
    return Tokenizer.from_directory(root)


def metaspace(root: Path) -> Tokenizer:
    vocab = {"<unk>": 0, TURN: 1, "▁": 2, "a": 3, "▁a": 4, "b": 5}
    backend = Backend(models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", TURN)])
    root.mkdir(exist_ok=True)
    backend.save(str(root / "tokenizer.json"))
    return Tokenizer.from_directory(root)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("tokenizers")
    make: dict[str, Callable[[Path], Tokenizer]] = {
        "gguf": lambda _: Tokenizer.from_gguf(tiny_metadata()),
        "whole words": lambda _: whole_words(),
        "added": with_added,
        "composing": lambda path: with_added(path, normalizers.NFC()),
        "stripping": lambda path: with_added(path, lstrip=True),
        "single words": lambda path: with_added(path, single_word=True),
        "sentencepiece": lambda _: Tokenizer.from_gguf(sentencepiece_metadata()),
        "metaspace": metaspace,
    }
    made = {}
    for name, build in make.items():
        path = root / name
        path.mkdir()
        made[name] = build(path)
    return made


@given(texts=st.lists(st.lists(st.sampled_from(PARTS), max_size=30).map("".join), max_size=6))
@settings(max_examples=examples(150))
def test_ids_are_those_of_the_whole_text_whatever_is_known_already(
    tokenizers: dict[str, Tokenizer], texts: list[str]
) -> None:
    for name, tokenizer in tokenizers.items():
        for least in (1, 5):
            cache = SectionCache(tokenizer, least_chars=least)
            for text in texts * 2:
                expected = tokenizer.encode(text, add_special_tokens=False)
                assert cache.encode(text, b"") == expected, (name, text)


def test_where_pieces_do_not_stand_alone_nothing_is_cut(tokenizers: dict[str, Tokenizer]) -> None:
    apart = {name: t.section_pattern is not None for name, t in tokenizers.items()}
    assert apart == {
        "gguf": True, "whole words": True, "added": True, "composing": True,
        "stripping": False, "single words": False, "sentencepiece": False, "metaspace": False,
    }  # fmt: skip


def test_only_equal_salts_share_and_clearing_forgets() -> None:
    cache = SectionCache(Tokenizer.from_gguf(tiny_metadata()))
    system = "the rules " * 100
    first, second = (f"{system}{TURN}{question}{TURN}" for question in ("why?", "how?"))
    cache.encode(first, b"a")
    assert cache.hits == 0
    cache.encode(second, b"a")
    assert cache.hits == 1
    cache.encode(second, b"b")
    cache.encode(second, b"")
    assert cache.hits == 1
    # A salt and a text that together read like another salt and text.
    cache.encode(f"b{system}", b"a")
    cache.encode(system, b"ab")
    assert cache.hits == 1
    cache.clear()
    assert cache.num_tokens == 0
    cache.encode(first, b"a")
    assert cache.hits == 1


def test_what_was_not_asked_for_longest_goes_first() -> None:
    tokenizer = Tokenizer.from_gguf(tiny_metadata())
    texts = [chr(ord("a") + k) * LEAST_CHARS for k in range(4)]
    sizes = {len(tokenizer.encode(text, add_special_tokens=False)) for text in texts}
    (size,) = sizes
    cache = SectionCache(tokenizer, most_tokens=3 * size)
    for text in (texts[0], texts[1], texts[2], texts[0], texts[3]):
        cache.encode(text, b"")
    assert (cache.hits, cache.num_tokens) == (1, 3 * size)
    for text in (texts[0], texts[2], texts[3]):
        cache.encode(text, b"")
    assert cache.hits == 4, "the second was forgotten, and no other"
    cache.encode(texts[1], b"")
    assert cache.hits == 4


def test_short_sections_are_not_kept() -> None:
    cache = SectionCache(Tokenizer.from_gguf(tiny_metadata()))
    cache.encode(f"{'x' * (LEAST_CHARS - 1)}{TURN}" * 3, b"")
    assert cache.num_tokens == 0
