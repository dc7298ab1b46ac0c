"""Weights from files into a backend: a layer a thread, each tensor copied exactly once.

The files are mapped. A tensor is read, dequantised or converted straight into memory of the format
the backend asks for, handed over, and the pages of the file behind it are given back; so the peak
is the loaded weights plus the layers in work, not twice the model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from turnstile.kernels.base import (
    AttentionShape,
    Backend,
    FloatArray,
    HeadWeights,
    LayerWeights,
    LoadFormat,
    Matrix,
    ModelWeights,
    Opaque,
)
from turnstile.kernels.bfloat16 import bfloat16_bits
from turnstile.models.config import ModelConfig
from turnstile.models.dequantize import FORMATS, dequantize
from turnstile.models.errors import CorruptFileError
from turnstile.models.gguf import BLOCK_FORMATS
from turnstile.models.rope import frequencies
from turnstile.models.source import ModelSource
from turnstile.models.tensor_file import ByteArray, TensorFiles

Progress = Callable[[int, int], None]
"""Called with the bytes read so far and in all, by one thread at a time."""

_WORKERS = 2
"""Layers in work at once: more would hold more of them twice."""
_CHUNK_ELEMENTS = 1 << 15
"""Values converted at a time: they and what they are made of stay in a core's cache."""
_BLOCK_ELEMENTS = {form.name: form.elements for form in BLOCK_FORMATS.values()}

# Our names for a layer's tensors, and theirs.
_LAYER_NAMES: Mapping[str, tuple[str, str]] = {
    "input_norm": ("input_layernorm.weight", "attn_norm.weight"),
    "q": ("self_attn.q_proj.weight", "attn_q.weight"),
    "k": ("self_attn.k_proj.weight", "attn_k.weight"),
    "v": ("self_attn.v_proj.weight", "attn_v.weight"),
    "o": ("self_attn.o_proj.weight", "attn_output.weight"),
    "q_bias": ("self_attn.q_proj.bias", "attn_q.bias"),
    "k_bias": ("self_attn.k_proj.bias", "attn_k.bias"),
    "v_bias": ("self_attn.v_proj.bias", "attn_v.bias"),
    "o_bias": ("self_attn.o_proj.bias", "attn_output.bias"),
    "q_norm": ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    "k_norm": ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    "post_attention_norm": ("post_attention_layernorm.weight", "ffn_norm.weight"),
    "gate": ("mlp.gate_proj.weight", "ffn_gate.weight"),
    "up": ("mlp.up_proj.weight", "ffn_up.weight"),
    "down": ("mlp.down_proj.weight", "ffn_down.weight"),
}
_MODEL_NAMES: Mapping[str, tuple[str, str]] = {
    "embedding": ("model.embed_tokens.weight", "token_embd.weight"),
    "norm": ("model.norm.weight", "output_norm.weight"),
    "projection": ("lm_head.weight", "output.weight"),
}
# Derived from the config, or the tied copy of a tensor already read.
_NEEDLESS = ("rotary_emb.inv_freq", "rope_freqs.weight", "lm_head.weight")


def load_weights(
    source: ModelSource, backend: Backend, progress: Progress = lambda done, total: None
) -> ModelWeights:
    """Read all weights of ``source`` and prepare them for ``backend``.

    Raises
    ------
    CorruptFileError
        A tensor is missing, has another shape than the config says, or is not of the
        architecture: known before anything is read. The message names tensor and file.
    """
    config = source.config
    reader = _Reader(source, source.open_tensors(), backend.load_format, progress)
    reader.check(config)
    inv_freq, rope_scale = frequencies(config.rope)

    def load_layer(layer: int) -> Opaque:
        return backend.prepare_layer(_read_layer(reader, config, layer), inv_freq, rope_scale)

    def load_ends() -> tuple[Opaque, Opaque]:
        table = reader.matrix("embedding", None)
        embedding = backend.prepare_embedding(table)
        norm = reader.vector("norm", None)
        if not config.tied_embeddings:
            table = reader.matrix("projection", None)
        return embedding, backend.prepare_head(HeadWeights(norm, table, config.norm_eps))

    workers = ThreadPoolExecutor(_WORKERS, "load")
    try:
        ends = workers.submit(load_ends)
        loading = [workers.submit(load_layer, layer) for layer in range(config.num_layers)]
        layers = [layer.result() for layer in loading]
        embedding, head = ends.result()
    finally:
        workers.shutdown(cancel_futures=True)
    reader.finish()
    return ModelWeights(embedding, layers, head)


def _model_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    table = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {"embedding": table, "norm": (config.hidden_size,)}
    return shapes if config.tied_embeddings else shapes | {"projection": table}


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_norm": (hidden,),
        "q": (q, hidden),
        "k": (kv, hidden),
        "v": (kv, hidden),
        "o": (hidden, q),
        "post_attention_norm": (hidden,),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    if config.qkv_bias:
        shapes |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
    if config.o_bias:
        shapes |= {"o_bias": (hidden,)}
    if config.family.qk_norm:
        shapes |= {"q_norm": (head_dim,), "k_norm": (head_dim,)}
    return shapes


def _read_layer(reader: _Reader, config: ModelConfig, layer: int) -> LayerWeights:
    head_dim = config.head_dim
    tensors: dict[str, npt.NDArray[Any]] = {
        name: reader.vector(name, layer) if len(shape) == 1 else reader.matrix(name, layer)
        for name, shape in _layer_shapes(config).items()
    }
    if reader.is_gguf and config.family.rotates_neighbours:
        for name in ("q", "k", "q_bias", "k_bias"):
            if name in tensors:
                tensors[name] = _halves_apart(tensors[name], head_dim)
    attention = AttentionShape(
        config.num_heads,
        config.num_kv_heads,
        head_dim,
        head_dim**-0.5,
        config.sliding_windows[layer],
    )
    return LayerWeights(attention=attention, norm_eps=config.norm_eps, **tensors)


def _halves_apart(weight: npt.NDArray[Any], head_dim: int) -> npt.NDArray[Any]:
    """Undo GGUF's order of q and k, where value i of a head's first half precedes value i of its
    second: RoPE here pairs (i, i + d/2), there (2i, 2i + 1).
    """
    pairs = weight.reshape(-1, head_dim // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


@dataclass(slots=True)
class _Progress:
    """Bytes read, told to the callback."""

    report: Progress
    total: int
    done: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.done += num_bytes
            self.report(self.done, self.total)


class _Reader:
    """Takes tensors out of the files by our names."""

    def __init__(
        self, source: ModelSource, files: TensorFiles, form: LoadFormat, progress: Progress
    ) -> None:
        self.is_gguf = source.is_gguf
        self._path = source.path
        self._files = files
        self._format = form
        self._progress = _Progress(progress, files.num_bytes)

    def check(self, config: ModelConfig) -> None:
        """See that the files hold the tensors of the config, in their shapes, and no others:
        without what nobody asked for the model would not be what it claims.
        """
        known = set()
        of_layer = _layer_shapes(config)
        for layer in chain([None], range(config.num_layers)):
            shapes = _model_shapes(config) if layer is None else of_layer
            for ours, shape in shapes.items():
                name = self._name(ours, layer)
                self._check(name, shape)
                known.add(name)
        extra = [n for n in self._files.names() if n not in known and not n.endswith(_NEEDLESS)]
        if extra:
            listed = ", ".join(extra[:3]) + (", ..." if len(extra) > 3 else "")
            raise CorruptFileError(
                f"{self._files.path(extra[0])} has {len(extra)} tensors that are not of the "
                f"architecture ({listed}); the model would give wrong answers without them."
            )

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._files:
            raise CorruptFileError(
                f"{self._path} lacks tensor {name!r}, which the config asks for; fetch it again."
            )
        found = self._files.info(name).shape
        if found != shape:
            raise CorruptFileError(
                f"{self._files.path(name)}: tensor {name!r} has shape {list(found)}, but the "
                f"config says {list(shape)}."
            )

    def matrix(self, ours: str, layer: int | None) -> Matrix:
        """One matrix, in memory of its own and in the backend's format."""
        return self._read(ours, layer, np.float32 if self._format == "float32" else np.uint16)

    def vector(self, ours: str, layer: int | None) -> FloatArray:
        """One vector, in memory of its own."""
        vector: FloatArray = self._read(ours, layer, np.float32)
        return vector

    def _read(self, ours: str, layer: int | None, kind: type[np.generic]) -> npt.NDArray[Any]:
        name = self._name(ours, layer)
        info = self._files.info(name)
        out = np.empty(info.shape, kind)
        _convert(self._files.bytes_of(name), info.dtype, out.reshape(-1))
        self._files.release(name)
        self._progress.add(info.num_bytes)
        return out

    def finish(self) -> None:
        """All is read that will be: tell so, whatever lay in the files beside it."""
        self._progress.add(self._progress.total - self._progress.done)

    def _name(self, ours: str, layer: int | None) -> str:
        if layer is None:
            return _MODEL_NAMES[ours][self.is_gguf]
        prefix = f"blk.{layer}" if self.is_gguf else f"model.layers.{layer}"
        return f"{prefix}.{_LAYER_NAMES[ours][self.is_gguf]}"


def _convert(raw: ByteArray, dtype: str, out: Matrix) -> None:
    """Fill flat ``out`` from stored bytes, a piece at a time."""
    block_bytes, elements = FORMATS[dtype][0], _BLOCK_ELEMENTS[dtype]
    step = _CHUNK_ELEMENTS // elements
    for block in range(0, len(raw) // block_bytes, step):
        chunk = raw[block * block_bytes : (block + step) * block_bytes]
        if chunk.ctypes.data % 4:  # safetensors does not promise alignment
            chunk = chunk.copy()
        piece = out[block * elements : (block + step) * elements]
        if out.dtype == np.float32:
            piece[:] = dequantize(chunk, dtype)
        elif dtype == "bfloat16":
            piece[:] = chunk.view(np.uint16)
        else:
            piece[:] = bfloat16_bits(dequantize(chunk, dtype))
