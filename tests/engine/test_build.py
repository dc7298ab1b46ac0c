"""What a configuration becomes: the page pool's size, the form of K and V."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny_models import make_tiny_llama
from turnstile.engine.build import build_engine, pool_pages
from turnstile.engine.config import EngineConfig, EngineConfigError
from turnstile.engine.machine import total_memory

PAGE_BYTES = 1 << 16


@pytest.mark.parametrize("flag", ["num_pages", "kv_cache_memory_bytes"])
def test_a_pool_larger_than_all_memory_is_refused_by_name(flag: str) -> None:
    scale = 1 if flag == "num_pages" else PAGE_BYTES
    fits = total_memory() // PAGE_BYTES
    config = EngineConfig(model="m", **{flag: fits * scale})
    assert pool_pages(config, PAGE_BYTES, 1024, "cpu") == fits
    config = EngineConfig(model="m", **{flag: (fits + 1) * scale})
    wanted = rf"--{flag.replace('_', '-')} {(fits + 1) * scale} would take [\d.,]+ GiB"
    with pytest.raises(EngineConfigError, match=wanted):
        pool_pages(config, PAGE_BYTES, 1024, "cpu")


def test_k_and_v_are_kept_as_asked_and_by_default_like_the_weights(tmp_path: Path) -> None:
    common = {
        "model": str(make_tiny_llama(tmp_path / "tiny")), "backend": "reference",
        "dtype": "float32", "num_pages": 8,
    }  # fmt: skip
    plain, half = (
        build_engine(EngineConfig(**common, kv_cache_dtype=kept), 1, lambda *_: None)[1]
        for kept in ("auto", "bfloat16")
    )
    assert (plain.kv_dtype, half.kv_dtype) == ("float32", "bfloat16")
    assert half.kv_bytes == plain.kv_bytes / 2
