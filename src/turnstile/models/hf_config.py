"""``config.json`` and ``generation_config.json`` of a Hugging Face directory, as our own types."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from turnstile.models.config import FAMILIES, Family, ModelConfig, checked, known_architectures
from turnstile.models.errors import CorruptFileError, UnsupportedModelError
from turnstile.models.rope import RopeConfig, yarn_attention_factor

Value = TypeVar("Value", int, float)

# What transformers takes for granted when config.json leaves it out.
_DEFAULT_EPS = 1e-6
_DEFAULT_THETA = 10000.0
_DEFAULT_QWEN3_HEAD_DIM = 128
_DEFAULT_MISTRAL_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28


class JsonObject:
    """A JSON file's top object; complaints name the file and the key."""

    def __init__(self, path: Path, data: Mapping[str, Any]) -> None:
        self.path = path
        self.data = data

    @classmethod
    def read(cls, path: Path) -> JsonObject:
        """Parse ``path``; :class:`CorruptFileError` unless it holds an object."""
        try:
            data = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise CorruptFileError(f"Cannot read {path}: {error}.") from None
        if not isinstance(data, dict):
            raise CorruptFileError(f"{path} is no JSON object.")
        return cls(path, data)

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer; ``default`` stands in for an absent or null key."""
        return self._number(key, int, default)

    def number(self, key: str, default: float | None = None) -> float:
        """A float; ``default`` stands in for an absent or null key."""
        return self._number(key, float, default)

    def flag(self, key: str, default: bool = False) -> bool:
        """A boolean; ``default`` stands in for an absent or null key."""
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise CorruptFileError(f"{self.path}: {key} is {value!r}, which is no boolean.")
        return value

    def inner(self, key: str) -> JsonObject:
        """A nested object, empty if absent or null."""
        value = self.data.get(key)
        if value is not None and not isinstance(value, dict):
            raise CorruptFileError(f"{self.path}: {key} is {value!r}, which is no object.")
        return JsonObject(self.path, value or {})

    def _number(self, key: str, kind: Callable[[Any], Value], default: Value | None) -> Value:
        value = self.data.get(key)
        if value is None:
            value = default
        if value is None:
            raise CorruptFileError(f"{self.path} lacks {key}.")
        try:
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                number = kind(value)
                if number == value and math.isfinite(number):
                    return number
        except (ValueError, OverflowError):  # int(nan), int(inf), float(10**400)
            pass
        raise CorruptFileError(f"{self.path}: {key} is {value!r}, which is no {kind.__name__}.")


def config_from_json(path: Path) -> ModelConfig:
    """Read ``config.json``.

    Raises
    ------
    UnsupportedModelError
        The architecture, or something about it, is not known here.
    CorruptFileError
        The file is broken, or its numbers are impossible.
    """
    data = JsonObject.read(path)
    family = _family(data)
    _refuse_unsupported(data)
    hidden, heads = data.integer("hidden_size"), data.integer("num_attention_heads")
    if heads < 1:
        raise CorruptFileError(f"{path}: num_attention_heads is {heads}.")
    own_dim = _DEFAULT_QWEN3_HEAD_DIM if family.name == "qwen3" else hidden // heads
    head_dim = data.integer("head_dim", own_dim)
    num_layers = data.integer("num_hidden_layers")
    max_positions = data.integer("max_position_embeddings")
    rope, max_positions = _rope(data, head_dim, max_positions)
    attention_bias = data.flag("attention_bias")
    config = ModelConfig(
        family=family,
        vocab_size=data.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=data.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=data.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        max_positions=max_positions,
        norm_eps=data.number("rms_norm_eps", _DEFAULT_EPS),
        rope=rope,
        tied_embeddings=data.flag("tie_word_embeddings"),
        qkv_bias=family.qkv_bias or (attention_bias and family.name != "mistral"),
        o_bias=attention_bias and family.name in ("llama", "qwen3"),
        sliding_windows=_sliding_windows(data, family, num_layers),
        stored_dtype=str(data.data.get("dtype") or data.data.get("torch_dtype") or "float32"),
    )
    return checked(config, str(path))


def _family(data: JsonObject) -> Family:
    named = data.data.get("architectures") or []
    if not isinstance(named, list):
        raise CorruptFileError(f"{data.path}: architectures is {named!r}, which is no list.")
    if not named:  # some older checkpoints give only the type
        named = [f.hf_architecture for f in FAMILIES if f.name == data.data.get("model_type")]
    for family in FAMILIES:
        if family.hf_architecture in named:
            return family
    what = ", ".join(str(name) for name in named) or repr(data.data.get("model_type"))
    raise UnsupportedModelError(
        f"{data.path}: the architecture {what} is not known; known are "
        f"{known_architectures('hf_architecture')}."
    )


def _refuse_unsupported(data: JsonObject) -> None:
    quantisation = data.inner("quantization_config").data
    if quantisation:
        raise UnsupportedModelError(
            f"{data.path}: the weights are quantised with "
            f"{quantisation.get('quant_method', 'an unnamed method')}, which is not read here; "
            "take the unquantised checkpoint or a GGUF."
        )
    activation = data.data.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModelError(f"{data.path}: activation {activation!r}; only silu is known.")
    if data.flag("mlp_bias"):
        raise UnsupportedModelError(f"{data.path}: biases in the MLP are not known here.")


def _rope(data: JsonObject, head_dim: int, max_positions: int) -> tuple[RopeConfig, int]:
    """The RoPE settings in either spelling (``rope_scaling``, or ``rope_parameters`` since
    transformers 5), and the context they make.
    """
    scaling = data.inner("rope_parameters")
    if not scaling.data:
        scaling = data.inner("rope_scaling")
    theta = scaling.number("rope_theta", data.number("rope_theta", _DEFAULT_THETA))
    kind = scaling.data.get("rope_type") or scaling.data.get("type") or "default"
    partial = scaling.number("partial_rotary_factor", data.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise UnsupportedModelError(f"{data.path}: RoPE over part of a head is not known here.")
    if kind in ("default", "dynamic"):
        # "dynamic" changes nothing up to max_position_embeddings, and we serve no more than that.
        return RopeConfig(theta, head_dim), max_positions
    factor = scaling.number("factor")
    if kind == "linear":
        return RopeConfig(theta, head_dim, "linear", factor), max_positions
    original = scaling.integer("original_max_position_embeddings", max_positions)
    if kind == "llama3":
        rope = RopeConfig(
            theta,
            head_dim,
            "llama3",
            factor,
            original,
            low_frequency=scaling.number("low_freq_factor"),
            high_frequency=scaling.number("high_freq_factor"),
        )
        return rope, max_positions
    if kind == "yarn":
        rope = _yarn(scaling, RopeConfig(theta, head_dim, "yarn", factor, original))
        return rope, max(max_positions, int(min(original * factor, 1 << 30)))
    raise UnsupportedModelError(
        f"{data.path}: RoPE scaling {kind!r} is not known; known are linear, llama3, yarn, dynamic."
    )


def _yarn(scaling: JsonObject, plain: RopeConfig) -> RopeConfig:
    attention: float | None = None
    if scaling.data.get("attention_factor") is not None:
        attention = scaling.number("attention_factor")
    elif scaling.data.get("mscale") and scaling.data.get("mscale_all_dim"):
        weights = scaling.number("mscale"), scaling.number("mscale_all_dim")
        if not all(0 < weight < 1e3 for weight in weights):
            raise CorruptFileError(f"{scaling.path}: mscale and mscale_all_dim are {weights}.")
        above, below = (yarn_attention_factor(plain.factor, weight) for weight in weights)
        attention = above / below
    return RopeConfig(
        plain.theta,
        plain.head_dim,
        "yarn",
        plain.factor,
        plain.original_positions,
        beta_slow=scaling.number("beta_slow", 1.0),
        beta_fast=scaling.number("beta_fast", 32.0),
        truncate=scaling.flag("truncate", True),
        attention_factor=attention,
    )


def _sliding_windows(data: JsonObject, family: Family, num_layers: int) -> tuple[int | None, ...]:
    if not 0 < num_layers < 1 << 16:
        raise CorruptFileError(f"{data.path}: num_hidden_layers is {num_layers}.")
    if family.name == "llama":
        return (None,) * num_layers
    if family.name == "mistral":
        if "sliding_window" in data.data and data.data["sliding_window"] is None:
            return (None,) * num_layers
        return (data.integer("sliding_window", _DEFAULT_MISTRAL_WINDOW),) * num_layers
    if not data.flag("use_sliding_window") or data.data.get("sliding_window") is None:
        return (None,) * num_layers
    window = data.integer("sliding_window")
    types = data.data.get("layer_types")
    if types is None:
        full = data.integer("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS)
        return tuple(window if layer >= full else None for layer in range(num_layers))
    known = {"full_attention": None, "sliding_attention": window}
    names = isinstance(types, list) and all(isinstance(kind, str) for kind in types)
    if not names or len(types) != num_layers or not set(types) <= set(known):
        raise UnsupportedModelError(
            f"{data.path}: layer_types must name full_attention or sliding_attention for each of "
            f"{num_layers} layers."
        )
    return tuple(known[kind] for kind in types)
