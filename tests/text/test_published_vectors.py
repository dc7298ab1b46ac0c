"""Ids against those of the models' own tokenizers, for every way of cutting text that has them."""

import json
from pathlib import Path
from typing import Any

import pytest

from text.texts import TEXTS
from turnstile.text import Tokenizer
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
def test_published_ids_come_out(name: str) -> None:
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
