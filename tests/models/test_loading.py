"""Weights on their way into memory: progress, faults named, and no second copy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from stepping import Stepper
from tiny_models import make_tiny_llama
from turnstile.kernels import create_backend
from turnstile.models.decoder import Decoder
from turnstile.models.errors import CorruptFileError
from turnstile.models.source import resolve


def load(directory: Path, **kwargs: Any) -> Decoder:
    return Decoder.load(resolve(str(directory)), create_backend(name="reference"), **kwargs)


def rewrite(directory: Path, change: Any) -> None:
    path = str(directory / "model.safetensors")
    tensors = {name: value.copy() for name, value in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny_llama(tmp_path / "tiny")


def test_progress_rises_to_the_whole(tiny: Path) -> None:
    calls: list[tuple[int, int]] = []
    load(tiny, progress=lambda done, total: calls.append((done, total)))
    done = [each for each, _ in calls]
    assert len(calls) > 10
    assert done == sorted(done)
    assert {total for _, total in calls} == {done[-1]}
    assert done[-1] == sum(v.nbytes for v in load_file(str(tiny / "model.safetensors")).values())


def test_a_missing_tensor_is_named_with_its_file(tiny: Path) -> None:
    rewrite(tiny, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(
        CorruptFileError, match=r"tiny lacks tensor 'model\.layers\.1\.mlp\.up_proj"
    ):
        load(tiny)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight"])
def test_what_is_wrong_is_told_before_anything_is_read(tiny: Path, name: str) -> None:
    rewrite(tiny, lambda tensors: tensors.update({name: tensors[name][:16].copy()}))
    with pytest.raises(CorruptFileError, match=rf"{name}.* has shape"):
        load(tiny, progress=lambda done, total: pytest.fail("a tensor was read"))


def test_a_tensor_of_another_shape_is_named_with_both(tiny: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    rewrite(tiny, lambda tensors: tensors.update({name: tensors[name][:16].copy()}))
    with pytest.raises(CorruptFileError, match=r"k_proj.* has shape \[16, 64\].* says \[32, 64\]"):
        load(tiny)


def test_a_tensor_nobody_knows_is_not_passed_over(tiny: Path) -> None:
    name = "model.layers.0.self_attn.sinks"
    rewrite(tiny, lambda tensors: tensors.update({name: np.ones(4, np.float32)}))
    with pytest.raises(CorruptFileError, match="sinks"):
        load(tiny)


def test_harmless_leftovers_are_passed_over(tiny: Path) -> None:
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
        "lm_head.weight": np.ones((320, 64), np.float32),  # tied: the embedding is used
    }
    before = Stepper(load(tiny)).run("me", [1, 2, 3])
    rewrite(tiny, lambda tensors: tensors.update(extra))
    assert torch.equal(Stepper(load(tiny)).run("me", [1, 2, 3]), before)


def test_a_file_at_an_odd_offset_loads_the_same(tiny: Path) -> None:
    before = Stepper(load(tiny)).run("me", [1, 2, 3])
    path = tiny / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    path.write_bytes(
        (length + 1).to_bytes(8, "little") + raw[8 : 8 + length] + b" " + raw[8 + length :]
    )
    assert torch.equal(Stepper(load(tiny)).run("me", [1, 2, 3]), before)


def test_the_model_outlives_its_file(tiny: Path) -> None:
    """Weights are copied out, so that a file replaced under a running server does no harm."""
    decoder = load(tiny)
    before = Stepper(decoder).run("me", [1, 2, 3])
    path = tiny / "model.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(Stepper(decoder).run("me", [1, 2, 3]), before)


def test_tied_tables_are_kept_once(tiny: Path) -> None:
    weights = load(tiny).weights
    assert weights.embedding.data_ptr() == weights.head.projection.weight.data_ptr()  # type: ignore[attr-defined]


# VmHWM is of this program alone; ru_maxrss would begin at the parent's size.
MEASURE = """
import sys, torch
torch.set_num_threads(1)
from turnstile.kernels import create_backend
from turnstile.models.decoder import Decoder
from turnstile.models.source import resolve
source, backend = resolve(sys.argv[1]), create_backend("cpu", sys.argv[2], name="reference")
backend._probe.tiles = lambda weight: (8,)  # products are not what is measured
def memory(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if field in line)
torch.ones(1000, 1000) @ torch.ones(1000, 1000)
before = memory("VmRSS")
decoder = Decoder.load(source, backend)
print(before, memory("VmHWM"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("weight_format", ["float32", "bfloat16"])
def test_loading_takes_little_more_than_the_weights(weight_format: str, tmp_path: Path) -> None:
    """A float32 checkpoint of 260 MB: the peak stays within 1.3 times the loaded weights."""
    path = make_tiny_llama(
        tmp_path / "big",
        hidden_size=768,
        intermediate_size=2048,
        num_layers=8,
        num_heads=12,
        num_kv_heads=4,
        head_dim=64,
        vocab_size=20_000,
    )
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path), weight_format],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(source)},
    )
    before, peak = (int(number) * 1024 for number in done.stdout.split())
    weights = resolve(str(path)).config.num_parameters * (4 if weight_format == "float32" else 2)
    assert weights > 120e6
    assert peak - before < 1.3 * weights + 40e6  # the slack is a mapped tensor and a chunk
