"""Heads whose size is no multiple of 16, made so: each half is padded with zeros to whole vectors.

RoPE turns the pairs (i, i + d/2), so the halves are padded one by one::

    head of 20:   [ 10 values ][ 10 values ]
    stored as 32: [ 10 values, 6 zeros ][ 10 values, 6 zeros ]

Zeros stay zeros under rotation, add nothing to a score and nothing to a result.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import numpy as np

from turnstile.kernels.base import FloatArray, LayerWeights, Matrix

_Array = TypeVar("_Array", FloatArray, Matrix)

_HALF = 8  # values of half a head: two halves fill a vector of 16


def stored_head_dim(head_dim: int) -> int:
    """The head size in memory. ValueError for an odd one, which RoPE cannot pair."""
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"A head size must be even for RoPE, not {head_dim}.")
    return -(-head_dim // (2 * _HALF)) * 2 * _HALF


def spread(rows: _Array, head_dim: int) -> _Array:
    """``[heads * head_dim, ...]`` to ``[heads * stored, ...]``, zeros after each half."""
    half, stored = head_dim // 2, stored_head_dim(head_dim) // 2
    heads = rows.shape[0] // head_dim
    out = np.zeros((heads, 2, stored, *rows.shape[1:]), rows.dtype)
    out[:, :, :half] = rows.reshape(heads, 2, half, *rows.shape[1:])
    return out.reshape(heads * 2 * stored, *rows.shape[1:])


def with_stored_heads(weights: LayerWeights) -> LayerWeights:
    """The same layer with every head padded; the same object if nothing needs padding."""
    head_dim = weights.attention.head_dim
    stored = stored_head_dim(head_dim)
    if stored == head_dim:
        return weights

    def wide(rows: FloatArray | None) -> FloatArray | None:
        return None if rows is None else spread(rows, head_dim)

    return replace(
        weights,
        attention=replace(weights.attention, head_dim=stored),
        q=spread(weights.q, head_dim),
        k=spread(weights.k, head_dim),
        v=spread(weights.v, head_dim),
        o=spread(weights.o.T, head_dim).T,
        q_bias=wide(weights.q_bias),
        k_bias=wide(weights.k_bias),
        v_bias=wide(weights.v_bias),
        q_norm=wide(weights.q_norm),
        k_norm=wide(weights.k_norm),
    )
