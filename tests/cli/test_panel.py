"""What is said when a server is ready."""

from __future__ import annotations

from typing import Any

import pytest

from turnstile.cli.panel import warnings_about
from turnstile.engine.protocol import EngineInfo


def info(**fields: Any) -> EngineInfo:
    values: dict[str, Any] = {
        "epoch": 1, "pid": 1, "model": "m", "architecture": "llama", "vocab_size": 9,
        "max_model_len": 160, "page_size": 16, "num_pages": 10, "kv_bytes": 1, "kv_dtype": "int8",
        "weight_format": "int8", "weight_bytes": 1, "num_parameters": 1, "backend": "native",
        "device": "cpu", "threads": 1, "max_num_seqs": 4, "max_num_batched_tokens": 64,
        "admission": "expected", "exact": True, "load_seconds": 1.0,
    }  # fmt: skip
    return EngineInfo(**(values | fields))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, []),
        ({"admission": "guaranteed"}, []),
        ({"num_pages": 9}, ["144 tokens"]),
        ({"admission": "unchecked"}, ["requests fail"]),
        ({"num_pages": 9, "admission": "unchecked"}, ["144 tokens", "requests fail"]),
    ],
)
def test_what_users_would_feel_is_told_to_the_operator_first(
    fields: dict[str, Any], says: list[str]
) -> None:
    warnings = list(warnings_about(info(**fields)))
    assert len(warnings) == len(says)
    for warning, words in zip(warnings, says, strict=True):
        assert words in warning
