"""A tiny random model: real in everything but its sense, made in memory in milliseconds.

Its text is noise, but attention, pages, draws and exactness are those of the engine, so that
whatever goes wrong in a cache shows in its tokens at once. Weights are large enough that greedy
decoding wanders instead of repeating itself.
"""

from __future__ import annotations

import numpy as np

from turnstile.kernels.base import (
    AttentionShape,
    Backend,
    FloatArray,
    HeadWeights,
    LayerWeights,
    Matrix,
    ModelWeights,
)
from turnstile.kernels.bfloat16 import bfloat16_bits
from turnstile.models.config import FAMILIES, ModelConfig
from turnstile.models.decoder import Decoder
from turnstile.models.rope import RopeConfig, frequencies

NAME = "tiny"

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 512, 64, 128, 2, 4, 2, 16
POSITIONS = 4096
EPS = 1e-5


def tiny_config() -> ModelConfig:
    """The shape of the tiny model."""
    return ModelConfig(
        family=FAMILIES[0],
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_positions=POSITIONS,
        norm_eps=EPS,
        rope=RopeConfig(theta=10_000.0, head_dim=HEAD_DIM),
        tied_embeddings=False,
        qkv_bias=False,
        o_bias=False,
        sliding_windows=(None,) * LAYERS,
        stored_dtype="float32",
    )


def make_tiny(backend: Backend, seed: int = 0) -> Decoder:
    """The tiny model on ``backend``; the same weights for the same ``seed``."""
    config = tiny_config()
    random = np.random.default_rng(seed)

    def matrix(outputs: int, inputs: int, scale: float = 1.5) -> Matrix:
        floats: FloatArray = random.standard_normal((outputs, inputs), np.float32)
        floats *= np.float32(scale * inputs**-0.5)
        return floats if backend.load_format == "float32" else bfloat16_bits(floats)

    def norm(size: int) -> FloatArray:
        return 1 + np.float32(0.1) * random.standard_normal(size, np.float32)

    inv_freq, rope_scale = frequencies(config.rope)
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shape = AttentionShape(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5)
    embedding = backend.prepare_embedding(matrix(VOCAB, HIDDEN, scale=6.0))
    layers = []
    for _ in range(LAYERS):
        weights = LayerWeights(
            attention=shape,
            input_norm=norm(HIDDEN),
            q=matrix(q, HIDDEN),
            k=matrix(kv, HIDDEN),
            v=matrix(kv, HIDDEN),
            o=matrix(HIDDEN, q),
            post_attention_norm=norm(HIDDEN),
            gate=matrix(INNER, HIDDEN),
            up=matrix(INNER, HIDDEN),
            down=matrix(HIDDEN, INNER),
            norm_eps=EPS,
        )
        layers.append(backend.prepare_layer(weights, inv_freq, rope_scale))
    head = backend.prepare_head(HeadWeights(norm(HIDDEN), matrix(VOCAB, HIDDEN), EPS))
    return Decoder(config, ModelWeights(embedding, layers, head), backend)
