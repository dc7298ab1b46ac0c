"""Tiny random models of every family give the logits of transformers, which wrote them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from models.agreement import assert_agreement
from stepping import Stepper
from turnstile.kernels import create_backend
from turnstile.models.decoder import Decoder
from turnstile.models.source import resolve

BASE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1}),
    "llama-biases": ("Llama", {"attention_bias": True}),
    "llama-odd-vocabulary": ("Llama", {"vocab_size": 131, "tie_word_embeddings": True}),
    "llama-wide-heads": ("Llama", {"head_dim": 24}),
    "llama3-rope": ("Llama", {"rope_scaling": LLAMA3}),
    "linear-rope": ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "yarn-rope": ("Llama", {"rope_scaling": YARN, "max_position_embeddings": 256}),
    "yarn-untruncated": (
        "Qwen2",
        {"rope_scaling": YARN | {"truncate": False}, "max_position_embeddings": 256},
    ),
    "dynamic-rope": ("Llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 21}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window-in-late-layers": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 13, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3-biases": ("Qwen3", {"attention_bias": True}),
}


def save_model(name: str, directory: Path, **save: Any) -> transformers.PreTrainedModel:
    """A random model with every parameter random: norms and biases are not left at 1 and 0."""
    family, overrides = CASES[name]
    config = getattr(transformers, f"{family}Config")(**(BASE | overrides))
    config._attn_implementation = "eager"
    torch.manual_seed(len(name))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(directory, **save)
    return model


DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def load(directory: Path, weight_format: str = "float32", device: str = "cpu") -> Decoder:
    backend = create_backend(device, weight_format, name="reference")
    return Decoder.load(resolve(str(directory)), backend)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(name: str, device: str, tmp_path: Path) -> None:
    model = save_model(name, tmp_path)
    ids = np.random.default_rng(1).integers(0, model.config.vocab_size, 150).tolist()
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0]
    ours = Stepper(load(tmp_path, device=device), poison=True).run("only", ids)
    assert_agreement(ours.cpu(), theirs)


def test_a_window_matters_to_the_sliding_models(tmp_path: Path) -> None:
    """Else the cases above would pass with the window ignored."""
    model = save_model("mistral-window", tmp_path)
    ids = np.random.default_rng(1).integers(0, 160, 60).tolist()
    changed = [(ids[0] + 1) % 160, *ids[1:]]
    with torch.no_grad():
        near, far = (model(torch.tensor([each])).logits[0] for each in (ids, changed))
    model.config.sliding_window = None
    with torch.no_grad():
        unwindowed = model(torch.tensor([ids])).logits[0]
    assert not torch.equal(near[20], far[20])
    assert (near - unwindowed).abs().max() > 1e-3


def test_a_model_cut_into_files_is_put_together(tmp_path: Path) -> None:
    model = save_model("qwen2", tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    ids = list(range(100))
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0]
    assert_agreement(Stepper(load(tmp_path)).run("only", ids), theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files_load_as_the_values_they_hold(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    save_model("llama", tmp_path).to(dtype).save_pretrained(tmp_path)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = list(range(64))
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0]
    assert_agreement(Stepper(load(tmp_path)).run("only", ids), theirs)


def test_bfloat16_weights_stay_near_the_float32_answer(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    ids = list(range(100))
    exact, half = (Stepper(load(tmp_path, f)).run("only", ids) for f in ("float32", "bfloat16"))
    error = (half - exact).norm() / exact.norm()
    assert 1e-4 < error < 0.03
