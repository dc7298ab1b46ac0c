"""The size of the page pool: as told, if there can be memory for it."""

from __future__ import annotations

import pytest

from turnstile.engine.build import pool_pages
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
