"""What a model recommends is followed where it makes sense, and named in a warning where not."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from models.test_gguf import document, entry
from turnstile.models.generation import (
    GenerationDefaults,
    generation_from_gguf,
    generation_from_json,
)
from turnstile.models.gguf import read_gguf

GGUF_NAMES = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}


def from_gguf(tmp_path: Path, name: str, value: float) -> GenerationDefaults:
    path = tmp_path / "m.gguf"
    key = f"general.sampling.{GGUF_NAMES.get(name, name)}"
    path.write_bytes(document([entry(key, 12, struct.pack("<d", value))], []))
    return generation_from_gguf(read_gguf(path), 100)


def from_json(tmp_path: Path, name: str, value: Any) -> GenerationDefaults:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps({name: value}))
    return generation_from_json(tmp_path, 100)


@pytest.mark.parametrize("read", [from_gguf, from_json])
@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 0.0), ("temperature", 0.6), ("top_p", 1.0), ("top_k", -1), ("top_k", 40),
     ("min_p", 0.05), ("repetition_penalty", 1.1)],
)  # fmt: skip
def test_a_sensible_recommendation_is_taken(
    name: str, value: float, read: Any, tmp_path: Path
) -> None:
    assert read(tmp_path, name, value) == GenerationDefaults(**{name: value})


@pytest.mark.parametrize("read", [from_gguf, from_json])
@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", math.nan), ("temperature", -5.0), ("top_p", 0.0), ("top_p", math.inf),
     ("top_k", math.nan), ("top_k", math.inf), ("top_k", 1e300), ("top_k", -2.0), ("min_p", 2.0),
     ("repetition_penalty", 0.0)],
)  # fmt: skip
def test_a_senseless_recommendation_is_dropped_with_a_word(
    name: str, value: float, read: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else every request that leaves the value to the model would be refused for it."""
    assert read(tmp_path, name, value) == GenerationDefaults()
    assert f"recommends the {name} {value!r}" in caplog.text


def test_a_recommendation_in_words_is_dropped_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert from_json(tmp_path, "top_p", "a lot") == GenerationDefaults()
    assert "recommends the top_p 'a lot'" in caplog.text


@pytest.mark.parametrize("end", [100, 4_000_000_000])
def test_an_end_that_no_logit_stands_for_is_dropped_with_a_word(
    end: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a request with min_tokens would forbid a token that is not there, and fail."""
    assert from_json(tmp_path, "eos_token_id", [7, end]).eos_ids == (7,)
    assert f"eos_token_id names [{end}], but the model's ids end at 99" in caplog.text
    path = tmp_path / "m.gguf"
    key = "tokenizer.ggml.eot_token_id"
    path.write_bytes(document([entry(key, 4, struct.pack("<I", end))], []))
    assert generation_from_gguf(read_gguf(path), 100).eos_ids == ()
    assert f"{key} names [{end}]" in caplog.text
