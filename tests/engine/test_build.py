"""What a configuration becomes: the page pool's size, the form of K and V."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from tiny_models import make_tiny_llama
from turnstile.engine.build import build_engine, pool_pages
from turnstile.engine.config import MOST_THREADS, EngineConfig, EngineConfigError
from turnstile.engine.machine import total_memory
from turnstile.kernels import native

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


def test_more_threads_than_any_machine_can_use_are_refused_before_the_model_is_loaded() -> None:
    EngineConfig(model="m", threads=MOST_THREADS).check()
    with pytest.raises(EngineConfigError, match="--threads 5000 is more than 1024"):
        EngineConfig(model="m", threads=5000).check()


@pytest.mark.parametrize(
    ("flag", "value"),
    [("target_itl", 0.0), ("target_itl", math.nan), ("step_timeout", 0.0), ("step_timeout", -1.0),
     ("step_timeout", math.inf), ("neighbour_steps", math.nan), ("neighbour_steps", math.inf),
     ("max_restarts", -1)],
)  # fmt: skip
def test_a_number_no_engine_can_work_with_is_refused_by_its_flag(flag: str, value: float) -> None:
    with pytest.raises(EngineConfigError, match=f"--{flag.replace('_', '-')} must"):
        EngineConfig(model="m", **{flag: value}).check()


@pytest.mark.skipif(not native.available()[0], reason="the native kernels are not built")
def test_a_page_size_the_kernels_cannot_use_is_refused_by_its_flag(tmp_path: Path) -> None:
    model = str(make_tiny_llama(tmp_path / "tiny"))
    config = EngineConfig(model=model, backend="native", page_size=7, num_pages=8)
    with pytest.raises(EngineConfigError, match=r"--page-size 7: .*multiple of 16"):
        build_engine(config, 1, lambda *_: None)


def test_a_machine_with_a_gpu_and_no_torch_computes_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnstile.engine.build._GPU_NODES", (str(tmp_path),))
    monkeypatch.setitem(sys.modules, "torch", None)
    config = EngineConfig(model=str(make_tiny_llama(tmp_path / "tiny")), num_pages=8)
    assert build_engine(config, 1, lambda *_: None)[1].device == "cpu"


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


LEVELS = native._extension()[0].levels() if native.available()[0] else []


@pytest.mark.parametrize("level", LEVELS)
def test_auto_is_int8_on_every_level_that_is_faster_with_it(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(native.LEVEL_VARIABLE, level)
    model = str(make_tiny_llama(tmp_path / "tiny"))
    chosen = build_engine(EngineConfig(model=model, num_pages=8), 1, lambda *_: None)[
        1
    ].weight_format
    assert (chosen == "int8") == (level != "portable")


def test_auto_is_a_float_for_kernels_that_have_no_int8(tmp_path: Path) -> None:
    config = EngineConfig(
        model=str(make_tiny_llama(tmp_path / "tiny")), backend="reference", num_pages=8
    )
    assert build_engine(config, 1, lambda *_: None)[1].weight_format in ("bfloat16", "float32")
