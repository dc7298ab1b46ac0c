"""bfloat16 made in numpy is torch's, bit for bit."""

from __future__ import annotations

import numpy as np
import torch

from turnstile.kernels.bfloat16 import bfloat16_bits


def test_every_kind_of_float_rounds_as_in_torch() -> None:
    """All upper halves with lower halves around the tie: zeros, subnormals, infinities and NaN."""
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    values = (upper | lower).view(np.float32)
    got = bfloat16_bits(values)
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    nan = np.isnan(values)
    assert np.array_equal(got[~nan], expected[~nan])
    assert np.isnan((got[nan].astype(np.uint32) << 16).view(np.float32)).all()


def test_a_matrix_keeps_its_shape_whatever_its_order() -> None:
    values = np.arange(24, dtype=np.float32).reshape(4, 6).T
    assert np.array_equal(bfloat16_bits(values), bfloat16_bits(np.ascontiguousarray(values)))
    assert bfloat16_bits(values).shape == (6, 4)
