"""Ids against those of the models' own tokenizers, for every way of cutting text that has them."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from text.texts import TEXTS
from turnstile.text import Tokenizer
from turnstile.text.control_text import choose_marks, encode_marked
from turnstile.text.export import export_tokenizer
from turnstile.text.pretokenizers import PRE_TOKENIZERS

DATA: dict[str, Any] = json.loads(
    (Path(__file__).parent / "data" / "vocabularies.json").read_text()
)
NAMES = sorted(DATA["vocabularies"])


def wrong(metadata: dict[str, object], name: str) -> list[str]:
    entry = DATA["vocabularies"][name]
    tokenizer = Tokenizer.from_gguf(metadata)
    texts = entry.get("texts", DATA["texts"])
    pairs = zip(texts, entry["ids"], strict=True)
    return [t for t, ids in pairs if tokenizer.encode(t, add_special_tokens=False) != ids]


@pytest.mark.parametrize("name", NAMES)
def test_texts_get_the_ids_their_publishers_give(name: str) -> None:
    assert wrong(DATA["vocabularies"][name]["metadata"], name) == []


@pytest.mark.parametrize("name", ["qwen2", "llama-bpe", "starcoder", "falcon", "deepseek-llm"])
def test_the_wrong_pre_tokenizer_shows(name: str) -> None:
    metadata = DATA["vocabularies"][name]["metadata"] | {"tokenizer.ggml.pre": "gpt-2"}
    assert wrong(metadata, name)


@pytest.mark.parametrize("name", NAMES)
def test_published_vocabularies_give_the_text_back(name: str) -> None:
    tokenizer = Tokenizer.from_gguf(DATA["vocabularies"][name]["metadata"])
    for text in DATA["texts"]:
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_way_of_cutting_loses_nothing(pre: str) -> None:
    metadata = DATA["vocabularies"]["gpt-2"]["metadata"] | {"tokenizer.ggml.pre": pre}
    tokenizer = Tokenizer.from_gguf(metadata)
    composed = PRE_TOKENIZERS[pre].nfc
    for text in TEXTS:
        if composed and "e\u0301" in text:
            continue
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


MIXED = "HTTPServer über ÜBER 12345 don't\n\n  x"


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("tekken", "HTTPServer| über| ÜBER| |1|2|3|4|5| don|'t|\n\n| | x"),
        ("gpt-4o", "HTTPServer| über| ÜBER| |123|45| don't|\n\n| | x"),
        ("llama-bpe", "HTTPServer| über| ÜBER| |123|45| don|'t|\n\n| | x"),
        ("qwen2", "HTTPServer| über| ÜBER| |1|2|3|4|5| don|'t|\n\n| | x"),
        ("smollm", "HTTPServer| über| ÜBER| |1|2|3|4|5| don|'t|\n\n | x"),
        ("gpt-2", "HTTPServer| über| ÜBER| 12345| don|'t|\n\n | x"),
        ("deepseek-v3", "HTTPServer| über| ÜBER| |123|45| don|'t|\n\n| | x"),
    ],
)
def test_words_are_cut_where_the_model_s_expression_cuts(pre: str, words: str) -> None:
    cut = PRE_TOKENIZERS[pre].build().pre_tokenize_str(MIXED)
    assert [MIXED[start:end] for _, (start, end) in cut] == words.split("|")


def with_turns(name: str) -> Tokenizer:
    """The excerpt with two control tokens at its end."""
    metadata = dict(DATA["vocabularies"][name]["metadata"])
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<|turn|>", "</s>"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 3, 3]
    if "tokenizer.ggml.scores" in metadata:
        metadata["tokenizer.ggml.scores"] = [*metadata["tokenizer.ggml.scores"], 0.0, 0.0]
    metadata["tokenizer.ggml.eos_token_id"] = len(metadata["tokenizer.ggml.tokens"]) - 1
    return Tokenizer.from_gguf(metadata)


@pytest.mark.parametrize("name", NAMES)
def test_chats_with_and_without_forgery_encode_alike_where_nothing_is_forged(name: str) -> None:
    tokenizer = with_turns(name)
    texts = DATA["texts"]
    for first, second in itertools.pairwise(texts):
        text = f"{first}<|turn|>{second}</s><|turn|> {first}"
        marks = choose_marks(text)
        expected = tokenizer.encode(text, add_special_tokens=False)
        assert encode_marked(tokenizer, text, marks) == expected
        forged = text.replace("</s>", f"{marks.start}</s>{marks.end}")
        ids = encode_marked(tokenizer, forged, marks)
        assert ids.count(tokenizer.eos_id) == 0
        assert len(ids) > len(expected)


@pytest.mark.parametrize("name", ["phi-3", "qwen2", "gpt-2"])
def test_exports_read_the_same_in_transformers(name: str, tmp_path: Path) -> None:
    tokenizer = with_turns(name)
    export_tokenizer(tokenizer, tmp_path)
    exported = AutoTokenizer.from_pretrained(str(tmp_path))
    for text in [*DATA["texts"], "a<|turn|> b</s>", " x", "x " * 3]:
        ids = exported.encode(text)
        assert ids == tokenizer.encode(text)
        assert tokenizer.decode(ids) == exported.decode(ids, clean_up_tokenization_spaces=False)
