"""Rotary position embedding: the frequency of every pair of a head's values, and its scalings.

Pair i of a head of width d turns by ``position · theta^(-2i/d)`` (RoFormer, arXiv:2104.09864).
The scalings stretch a trained context: ``linear`` slows every pair down; ``yarn``
(arXiv:2309.00071) and ``llama3`` slow the slow pairs only, because the fast ones have seen whole
turns in training; ``factors`` is a table that GGUF files carry, worked out by their converter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

KINDS = ("default", "linear", "llama3", "yarn", "factors")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions turn. Fields past ``kind`` matter only to the kinds named.

    ``factor``: how much longer the context became (linear, llama3, yarn).
    ``original_positions``: the context of the training (llama3, yarn).
    ``low_frequency``, ``high_frequency``: turns per training context between which llama3 blends.
    ``beta_slow``, ``beta_fast``: the same for yarn; ``truncate`` rounds them to whole pairs.
    ``attention_factor``: yarn's multiplier of cos and sin; None is the paper's.
    ``factors``: one divisor per pair (factors).
    """

    theta: float
    head_dim: int
    kind: str = "default"
    factor: float = 1.0
    original_positions: int = 0
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    beta_slow: float = 1.0
    beta_fast: float = 32.0
    truncate: bool = True
    attention_factor: float | None = None
    factors: tuple[float, ...] = ()


def frequencies(rope: RopeConfig) -> tuple[npt.NDArray[np.float32], float]:
    """Radians per position of each pair, ``[head_dim / 2]``, and the scale of cos and sin."""
    half = np.arange(0, rope.head_dim, 2, dtype=np.float64) / rope.head_dim
    plain = rope.theta**-half
    scale = 1.0
    if rope.kind == "linear":
        scaled = plain / rope.factor
    elif rope.kind == "llama3":
        scaled = _llama3(plain, rope)
    elif rope.kind == "yarn":
        scaled = _yarn(plain, rope)
        scale = yarn_attention_factor(rope.factor)
        if rope.attention_factor is not None:
            scale = rope.attention_factor
    elif rope.kind == "factors":
        scaled = plain / np.asarray(rope.factors)
    else:
        scaled = plain
    return scaled.astype(np.float32), scale


def yarn_attention_factor(factor: float, weight: float = 1.0) -> float:
    """YaRN's temperature for a context stretched by ``factor`` (section 3.4 of the paper)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _llama3(plain: npt.NDArray[np.float64], rope: RopeConfig) -> npt.NDArray[np.float64]:
    """Pairs that turn often in the training context stay, rare ones slow down, between: a blend."""
    turns = rope.original_positions * plain / (2 * math.pi)
    kept = (turns - rope.low_frequency) / (rope.high_frequency - rope.low_frequency)
    return _blend(plain, rope.factor, np.clip(kept, 0, 1))


def _yarn(plain: npt.NDArray[np.float64], rope: RopeConfig) -> npt.NDArray[np.float64]:
    """As llama3, but the blend is linear in the index of the pair, not in its frequency."""

    def pair_turning(turns: float) -> float:
        period = rope.original_positions / (turns * 2 * math.pi)
        return rope.head_dim * math.log(period) / (2 * math.log(rope.theta))

    first, last = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.head_dim - 1)
    width = last - first or 0.001
    slowed = np.clip((np.arange(len(plain)) - first) / width, 0, 1)
    return _blend(plain, rope.factor, 1 - slowed)


def _blend(
    plain: npt.NDArray[np.float64], factor: float, kept: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    return plain * kept + plain / factor * (1 - kept)
