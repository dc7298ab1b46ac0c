"""The fixtures other tests stand on are themselves right."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

import tiny_models


def test_any_text_survives_the_tiny_tokenizer(tmp_path: Path) -> None:
    tiny_models.make_tiny_llama(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "the naïve 猫 🐈\tand\n  more"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("<|im_end|>").ids == [tiny_models.TURN_END]
    assert tokenizer.get_vocab_size() <= 320


def test_the_same_seed_makes_the_same_bytes(tmp_path: Path) -> None:
    first, again, other = (
        (tiny_models.make_tiny_llama(tmp_path / name, seed=seed) / "model.safetensors").read_bytes()
        for name, seed in (("first", 0), ("again", 0), ("other", 1))
    )
    assert first == again != other
