"""A GGUF file's metadata as a :class:`ModelConfig`."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from turnstile.models.config import FAMILIES, Family, ModelConfig, checked, known_architectures
from turnstile.models.dequantize import dequantize
from turnstile.models.errors import CorruptFileError, UnsupportedModelError
from turnstile.models.gguf import GgufFile
from turnstile.models.rope import RopeConfig, yarn_attention_factor


def config_from_gguf(gguf: GgufFile) -> ModelConfig:
    """Read the model's numbers from the metadata, and from which tensors there are.

    Raises
    ------
    UnsupportedModelError
        The architecture, or something about it, is not known here.
    CorruptFileError
        A number is missing, of the wrong kind, or impossible.
    """
    keys = _Keys(gguf)
    family = _family(gguf)
    if keys.integer("expert_count", 0):
        raise UnsupportedModelError(
            f"{gguf.path} is a mixture of experts, which is not known here."
        )
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden // max(heads, 1))
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(f"{gguf.path}: keys and values of different widths.")
    if keys.integer("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModelError(f"{gguf.path}: RoPE over part of a head is not known here.")
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise CorruptFileError(f"{gguf.path} has no tensor token_embd.weight.")
    if len(embedding.shape) != 2:
        raise CorruptFileError(
            f"{gguf.path}: token_embd.weight has shape {list(embedding.shape)}, which is no matrix."
        )
    num_layers = keys.integer("block_count")
    window = keys.integer("attention.sliding_window", 0) or None
    types = Counter(tensor.dtype for tensor in gguf.tensors.values() if len(tensor.shape) > 1)
    config = ModelConfig(
        family=family,
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=keys.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=keys.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_positions=keys.integer("context_length"),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(keys, gguf, head_dim),
        tied_embeddings="output.weight" not in gguf.tensors,
        qkv_bias="blk.0.attn_q.bias" in gguf.tensors,
        o_bias="blk.0.attn_output.bias" in gguf.tensors,
        sliding_windows=(window,) * min(num_layers, 1 << 16),
        stored_dtype=types.most_common(1)[0][0],
    )
    return checked(config, str(gguf.path))


class _Keys:
    """Metadata under the architecture's prefix; complaints name the file and the key."""

    def __init__(self, gguf: GgufFile) -> None:
        self._gguf = gguf
        self._prefix = str(gguf.metadata.get("general.architecture"))

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()  # a per-layer list that says the same for every layer
        if isinstance(value, np.ndarray):
            raise UnsupportedModelError(
                f"{self._gguf.path}: {self._prefix}.{key} differs between layers, which is not "
                "known here."
            )
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, value, "integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(key, value, "number")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "string")
        return value

    def has(self, key: str) -> bool:
        return f"{self._prefix}.{key}" in self._gguf.metadata

    def _value(self, key: str, default: Any) -> Any:
        value = self._gguf.metadata.get(f"{self._prefix}.{key}", default)
        if value is None:
            raise CorruptFileError(f"{self._gguf.path} lacks the metadata {self._prefix}.{key}.")
        return value

    def _wrong(self, key: str, value: Any, kind: str) -> CorruptFileError:
        return CorruptFileError(
            f"{self._gguf.path}: {self._prefix}.{key} is {value!r}, which is no {kind}."
        )


def _family(gguf: GgufFile) -> Family:
    name = gguf.metadata.get("general.architecture")
    for family in FAMILIES:
        if isinstance(name, str) and family.gguf_architecture == name:
            return family
    raise UnsupportedModelError(
        f"{gguf.path}: the architecture {name!r} is not known; known are "
        f"{known_architectures('gguf_architecture')}."
    )


def _rope(keys: _Keys, gguf: GgufFile, head_dim: int) -> RopeConfig:
    theta = keys.number("rope.freq_base", 10000.0)
    table = gguf.tensors.get("rope_freqs.weight")
    if table is not None:
        if table.shape != (head_dim // 2,):  # before it is read: it may be as large as the file
            raise CorruptFileError(
                f"{gguf.path}: rope_freqs.weight has shape {list(table.shape)}, but a head has "
                f"{head_dim // 2} pairs."
            )
        factors = dequantize(gguf.file.bytes_of(table), table.dtype)
        return RopeConfig(theta, head_dim, "factors", factors=tuple(factors.tolist()))
    kind = keys.text("rope.scaling.type", "none")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if kind == "none" and keys.has("rope.scale_linear"):  # the key of files before scaling.type
        kind = "linear"
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return RopeConfig(theta, head_dim)
    if kind == "linear":
        return RopeConfig(theta, head_dim, "linear", factor)
    if kind != "yarn":
        raise UnsupportedModelError(
            f"{gguf.path}: RoPE scaling {kind!r} is not known; known are none, linear, yarn."
        )
    multiplier = keys.number(
        "rope.scaling.yarn_attn_factor", keys.number("rope.scaling.attn_factor", 1.0)
    )
    return RopeConfig(
        theta,
        head_dim,
        "yarn",
        factor,
        keys.integer("rope.scaling.original_context_length", keys.integer("context_length")),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        attention_factor=multiplier * yarn_attention_factor(factor),
    )
