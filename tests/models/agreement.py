"""When two models agree: close logits, and the same greedy choice wherever it is clear."""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = 1e-4


def assert_agreement(ours: Tensor, theirs: Tensor) -> None:
    """Rows ``[tokens, vocab]`` differ by at most 1e-4 of the row's largest logit, and the largest
    is the same one unless the runner-up is closer than that.
    """
    assert ours.shape == theirs.shape
    scale = theirs.abs().amax(-1, keepdim=True)
    error = ((ours - theirs).abs() / scale).amax(-1)
    assert error.max() < TOLERANCE, f"relative error {error.max():.2e} at row {error.argmax()}"
    top = theirs.topk(2, dim=-1).values
    clear = (top[:, 0] - top[:, 1]) > 2 * TOLERANCE * scale[:, 0]
    assert clear.float().mean() > 0.5  # else the comparison below says nothing
    assert torch.equal(ours.argmax(-1)[clear], theirs.argmax(-1)[clear])
