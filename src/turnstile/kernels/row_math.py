"""Functions of one row that give the same bits whatever stands around it, on any thread count.

Built from operations that are exact element by element. Library reductions are not used for sums
(they split long rows over threads when there are few), nor fused activations (their vector body
and their scalar tail round differently, and where the tail falls depends on the batch).
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension by folding halves onto each other; overwrites ``x``."""
    width = x.shape[-1]
    while width > 1:
        half = (width + 1) // 2
        x[..., : width - half] += x[..., half:width]
        width = half
    return x[..., 0]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps) · weight`` over the last dimension (arXiv:1910.07467)."""
    mean = row_sum(x * x) / x.shape[-1]
    return x * torch.rsqrt(mean + eps).unsqueeze(-1) * weight


def silu(x: Tensor) -> Tensor:
    """``x · sigmoid(x)``."""
    return x / (torch.exp(-x) + 1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn ``x[T, heads, d]`` in pairs (i, i + d/2) by angles given as ``cos, sin [T, 1, d/2]``."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def log_normalizer(logits: Tensor) -> Tensor:
    """``log Σ exp`` of each row; NaN where a row holds NaN or +inf."""
    peak = logits.amax(-1, keepdim=True)
    return row_sum(torch.exp(logits - peak)).log() + peak.squeeze(-1)


def argmax(logits: Tensor) -> Tensor:
    """Lowest index of each row's maximum; the last index for a row with NaN."""
    last = logits.shape[-1] - 1
    peak = logits.amax(-1, keepdim=True)
    index = torch.arange(last + 1, device=logits.device)
    return torch.where(logits == peak, index, last).amin(-1)


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row, ties by lower index.

    Value and index become one integer, so that no two are equal and any library sorts them alike:
    the value's bits in an order integers share, then the index, reversed.
    """
    bits = (logits.float() + 0.0).contiguous().view(torch.int32)  # + 0.0 makes -0.0 a 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    index = torch.arange(logits.shape[-1], device=logits.device)
    keys = (ordered.to(torch.int64) << 32) + (0xFFFFFFFF - index)
    chosen = 0xFFFFFFFF - (torch.topk(keys, k, dim=-1).values & 0xFFFFFFFF)
    return logits.gather(-1, chosen), chosen
