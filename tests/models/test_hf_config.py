"""config.json in its old and new spellings, and every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from turnstile.models.errors import CorruptFileError, ModelError, UnsupportedModelError
from turnstile.models.generation import generation_from_json
from turnstile.models.hf_config import config_from_json
from turnstile.models.rope import frequencies

MINIMAL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
QWEN2 = {**MINIMAL, "architectures": ["Qwen2ForCausalLM"]}
MISTRAL = {**MINIMAL, "architectures": ["MistralForCausalLM"]}


def write(directory: Path, data: Any) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(data))
    return path


def test_what_is_left_out_is_what_transformers_takes_for_granted(tmp_path: Path) -> None:
    config = config_from_json(write(tmp_path, MINIMAL))
    assert (config.num_kv_heads, config.head_dim, config.norm_eps) == (4, 16, 1e-6)
    assert (config.rope.kind, config.rope.theta) == ("default", 10000.0)
    assert (config.tied_embeddings, config.qkv_bias, config.o_bias) == (False, False, False)
    assert config.sliding_windows == (None, None, None)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        (MISTRAL, (4096,) * 3),
        ({**MISTRAL, "sliding_window": None}, (None,) * 3),
        ({**MISTRAL, "sliding_window": 9}, (9,) * 3),
        ({**QWEN2, "sliding_window": 9}, (None,) * 3),
        (
            {**QWEN2, "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1},
            (None, 9, 9),
        ),
        ({**QWEN2, "sliding_window": 9, "use_sliding_window": True}, (None,) * 3),
        (
            {
                **QWEN2,
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (9, None, 9),
        ),
        ({**MINIMAL, "sliding_window": 9}, (None,) * 3),
    ],
)
def test_windows_are_per_layer(
    changes: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    assert config_from_json(write(tmp_path, changes)).sliding_windows == windows


ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
        "truncate": False,
    },
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.25,
    },
]


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_frequencies_equal_those_of_transformers(
    rope: dict[str, Any], theta: float, tmp_path: Path
) -> None:
    sizes = {**MINIMAL, "head_dim": 128, "max_position_embeddings": 1 << 17}
    theirs = transformers.LlamaConfig(**sizes, rope_parameters=dict(rope, rope_theta=theta))
    if rope["rope_type"] == "default":
        expected, scale = theta ** -(np.arange(0, 128, 2) / 128), 1.0
    else:
        inv_freq, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, "cpu")
        expected = inv_freq.numpy()
    new = {**sizes, "rope_parameters": {**rope, "rope_theta": theta}}
    old_scaling = {("type" if k == "rope_type" else k): v for k, v in rope.items()}
    old = {**sizes, "rope_scaling": old_scaling, "rope_theta": theta}
    for spelling in (new, old):
        config = config_from_json(write(tmp_path, spelling))
        ours, our_scale = frequencies(config.rope)
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, expected, rtol=5e-6)  # theirs is computed in float32
        assert our_scale == pytest.approx(scale)


def test_yarn_makes_the_context_longer(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert (
        config_from_json(write(tmp_path, {**QWEN2, "rope_scaling": scaling})).max_positions == 1024
    )


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_parameters_are_counted_as_transformers_does(family: str, tmp_path: Path) -> None:
    data = {**MINIMAL, "head_dim": 24, "num_key_value_heads": 2, "attention_bias": True}
    config = getattr(transformers, f"{family}Config")(**{**data, "architectures": None})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    ours = config_from_json(write(tmp_path, {**data, "architectures": [f"{family}ForCausalLM"]}))
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert ours.num_parameters == expected


REFUSED = {
    "architecture": (
        {**MINIMAL, "architectures": ["MambaForCausalLM"]},
        "MambaForCausalLM is not known; known are LlamaForCausalLM, MistralForCausalLM",
    ),
    "no architecture": (
        {**MINIMAL, "architectures": None, "model_type": "t5"},
        "'t5' is not known",
    ),
    "quantisation": ({**MINIMAL, "quantization_config": {"quant_method": "gptq"}}, "with gptq"),
    "activation": ({**MINIMAL, "hidden_act": "gelu"}, "'gelu'; only silu"),
    "biases": ({**MINIMAL, "mlp_bias": True}, "biases in the MLP"),
    "scaling": ({**MINIMAL, "rope_scaling": {"type": "longrope", "factor": 2.0}}, "'longrope'"),
    "partial": ({**MINIMAL, "partial_rotary_factor": 0.5}, "part of a head"),
    "layer types": (
        {**QWEN2, "sliding_window": 9, "use_sliding_window": True, "layer_types": ["mamba"] * 3},
        "layer_types",
    ),
    "layer types of no text": (
        {**QWEN2, "sliding_window": 9, "use_sliding_window": True, "layer_types": [[]] * 3},
        "layer_types",
    ),
}
BROKEN = {
    "a number missing": ({k: v for k, v in MINIMAL.items() if k != "hidden_size"}, "hidden_size"),
    "text for a number": ({**MINIMAL, "hidden_size": "64"}, "hidden_size is '64'"),
    "a fraction": ({**MINIMAL, "hidden_size": 64.5}, "no int"),
    "text for a boolean": ({**MINIMAL, "tie_word_embeddings": "yes"}, "no boolean"),
    "an object for nothing": ({**MINIMAL, "rope_scaling": 3}, "no object"),
    "a list": ([1], "no JSON object"),
    "heads": ({**MINIMAL, "num_key_value_heads": 3}, "4 heads share 3"),
    "no heads": ({**MINIMAL, "num_attention_heads": 0}, "num_attention_heads is 0"),
    "no layers": ({**MINIMAL, "num_hidden_layers": 0}, "num_hidden_layers is 0"),
    "endless layers": ({**MINIMAL, "num_hidden_layers": 10**9}, "num_hidden_layers"),
    "a giant width": ({**MINIMAL, "hidden_size": 1 << 40, "head_dim": 16}, "hidden_size is"),
    "odd heads": ({**MINIMAL, "head_dim": 15}, "odd"),
    "epsilon": ({**MINIMAL, "rms_norm_eps": -1.0}, "epsilon"),
    "window": ({**MISTRAL, "sliding_window": 0}, "window is empty"),
    "theta": ({**MINIMAL, "rope_theta": 0.0}, "RoPE base"),
    "factor": ({**MINIMAL, "rope_scaling": {"type": "linear", "factor": 0.0}}, "RoPE factor"),
    "betas": (
        {**MINIMAL, "rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 0.5}},
        "betas",
    ),
    "infinity": ({**MINIMAL, "rope_theta": float("nan")}, "rope_theta"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused_by_name(name: str, tmp_path: Path) -> None:
    data, words = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=words) as refused:
        config_from_json(write(tmp_path, data))
    assert str(tmp_path / "config.json") in str(refused.value)


@pytest.mark.parametrize("name", BROKEN)
def test_impossible_numbers_are_refused_by_name(name: str, tmp_path: Path) -> None:
    data, words = BROKEN[name]
    with pytest.raises(CorruptFileError, match=words) as refused:
        config_from_json(write(tmp_path, data))
    assert str(tmp_path / "config.json") in str(refused.value)


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 1')
    with pytest.raises(ModelError, match=r"Cannot read .*config\.json"):
        config_from_json(tmp_path / "config.json")


def test_sampling_advice_and_ends_come_from_generation_config(tmp_path: Path) -> None:
    write(tmp_path, {**MINIMAL, "eos_token_id": 7, "bos_token_id": 1})
    assert generation_from_json(tmp_path, 100).eos_ids == (7,)
    advice = {"eos_token_id": [2, 3], "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    (tmp_path / "generation_config.json").write_text(json.dumps(advice))
    defaults = generation_from_json(tmp_path, 100)
    assert (defaults.eos_ids, defaults.bos_id) == ((2, 3), 1)
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0.6, 20, 0.95)
    assert defaults.repetition_penalty is None
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "two"}))
    with pytest.raises(CorruptFileError, match="no token id"):
        generation_from_json(tmp_path, 100)
