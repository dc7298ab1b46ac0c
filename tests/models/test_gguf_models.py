"""Whole models from GGUF files, written with ggml's own package, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.quants import dequantize, quantize

from models.agreement import assert_agreement
from models.test_families import load
from stepping import Stepper
from turnstile.models.errors import UnsupportedModelError
from turnstile.models.rope import frequencies
from turnstile.models.source import resolve

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
SIZES: dict[str, Any] = {
    "vocab_size": 130,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.1,
}
Extra = Callable[[gguf.GGUFWriter], None]


def build(family: str, **overrides: Any) -> transformers.PreTrainedModel:
    name = family.capitalize()
    config = getattr(transformers, f"{name}Config")(**(SIZES | overrides))
    torch.manual_seed(3)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    return model


def random_blocks(shape: tuple[int, ...], qtype: gguf.GGMLQuantizationType) -> np.ndarray:
    """Blocks of a format that the package reads but does not write, with small scales."""
    elements, num_bytes = gguf.GGML_QUANT_SIZES[qtype]
    random = np.random.default_rng(shape[0])
    count = shape[0] * shape[1] // elements
    raw = random.integers(0, 256, (count, num_bytes), dtype=np.uint8)
    halves = {"Q4_K": {0: 4e-4, 2: 3e-3}, "Q5_K": {0: 2e-4, 2: 3e-3}, "Q6_K": {208: 3e-5}}
    for at, size in halves[qtype.name].items():
        value = np.full(count, size, np.float16)
        raw[:, at : at + 2] = value.view(np.uint8).reshape(count, 2)
    return raw.reshape(shape[0], -1)


def write(
    path: Path,
    model: transformers.PreTrainedModel,
    family: str,
    qtype: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    extra: Extra = lambda writer: None,
) -> None:
    """Write ``model`` as llama.cpp's converter does; the model takes on what quantising left."""
    c = model.config
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_eos_token_id(2)
    extra(writer)
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], c.num_hidden_layers)
    for name, parameter in model.named_parameters():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        value = parameter.detach().numpy().copy()
        heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads}
        turned = next((n for part, n in heads.items() if part in name and family == "llama"), 0)
        if value.ndim == 1 or qtype == gguf.GGMLQuantizationType.F32:
            data, kind, kept = value, gguf.GGMLQuantizationType.F32, value
        else:
            own = qtype.name.endswith("_K")
            data = random_blocks(value.shape, qtype) if own else quantize(value, qtype)
            kind, kept = qtype, dequantize(data, qtype).reshape(value.shape)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(kept.astype(np.float32)))
        if turned:
            data = interleaved(data, turned)
        writer.add_tensor(target, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(data: np.ndarray, heads: int) -> np.ndarray:
    """The row order of llama.cpp's converter: rows of a head's two halves alternate."""
    halves = data.reshape(heads, 2, len(data) // heads // 2, *data.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(data.shape))


def logits(model: transformers.PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


IDS = np.random.default_rng(5).integers(0, 130, 90).tolist()


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_families_from_gguf_equal_transformers(family: str, tied: bool, tmp_path: Path) -> None:
    model = build(family, tie_word_embeddings=tied)
    write(tmp_path / "m.gguf", model, family)
    assert_agreement(Stepper(load(tmp_path / "m.gguf")).run("me", IDS), logits(model, IDS))


@pytest.mark.parametrize(
    "qtype", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
)
def test_every_tensor_type_makes_a_model(qtype: str, tmp_path: Path) -> None:
    model = build("llama")
    write(tmp_path / "m.gguf", model, "llama", gguf.GGMLQuantizationType[qtype])
    source = resolve(str(tmp_path / "m.gguf"))
    names = {"F16": "float16", "BF16": "bfloat16"}
    assert source.config.stored_dtype == names.get(qtype, qtype.lower())
    assert_agreement(Stepper(load(source.path)).run("me", IDS), logits(model, IDS))


def test_biases_of_a_llama_are_turned_with_their_rows(tmp_path: Path) -> None:
    model = build("llama", attention_bias=True)
    write(tmp_path / "m.gguf", model, "llama")
    assert_agreement(Stepper(load(tmp_path / "m.gguf")).run("me", IDS), logits(model, IDS))


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_in_the_metadata_is_applied(kind: str, tmp_path: Path) -> None:
    scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 128}
    model = build("qwen2", rope_scaling=scaling)

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(128)

    write(tmp_path / "m.gguf", model, "qwen2", extra=extra)
    assert_agreement(Stepper(load(tmp_path / "m.gguf")).run("me", IDS), logits(model, IDS))


def test_the_table_of_rope_factors_is_applied(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = build("llama", rope_scaling=scaling)
    plain = 10000.0 ** -(np.arange(0, 64, 2) / 64)
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert factors.max() > 7

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", factors)

    write(tmp_path / "m.gguf", model, "llama", extra=extra)
    source = resolve(str(tmp_path / "m.gguf"))
    np.testing.assert_allclose(
        frequencies(source.config.rope)[0], model.model.rotary_emb.inv_freq.numpy(), rtol=1e-6
    )
    assert_agreement(Stepper(load(source.path)).run("me", IDS), logits(model, IDS))


def test_a_sliding_window_in_the_metadata_is_applied(tmp_path: Path) -> None:
    sizes = {**SIZES, "sliding_window": 17}
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**sizes)).eval()
    write(tmp_path / "m.gguf", model, "llama", extra=lambda w: w.add_sliding_window(17))
    assert resolve(str(tmp_path / "m.gguf")).config.sliding_windows == (17, 17)
    assert_agreement(Stepper(load(tmp_path / "m.gguf")).run("me", IDS), logits(model, IDS))


def test_an_unknown_architecture_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    model = build("llama")
    write(tmp_path / "m.gguf", model, "llama")
    raw = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(raw.replace(b"llama", b"mamba", 1))
    with pytest.raises(UnsupportedModelError, match=r"'mamba'.*llama, qwen2, qwen3"):
        resolve(str(tmp_path / "m.gguf"))


def test_a_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", build("llama"), "llama", extra=lambda w: w.add_expert_count(8))
    with pytest.raises(UnsupportedModelError, match="mixture of experts"):
        resolve(str(tmp_path / "m.gguf"))
