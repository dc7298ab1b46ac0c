"""bfloat16 in numpy, which has no such type: its bits, as 16-bit integers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_CHUNK = 1 << 15  # values converted at a time: they and what is made of them stay in a core's cache


def bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """``values`` rounded to bfloat16, to nearest, ties to even: uint16 of the same shape. A NaN
    keeps its upper bits and is made quiet.
    """
    flat = np.ascontiguousarray(values, np.float32).reshape(-1)
    out = np.empty(flat.size, np.uint16)
    for start in range(0, flat.size, _CHUNK):
        chunk = flat[start : start + _CHUNK]
        bits = chunk.view(np.uint32)
        upper = bits >> 16
        rounded = (bits + (upper & 1) + np.uint32(0x7FFF)) >> 16
        nan = np.isnan(chunk)
        if nan.any():
            rounded[nan] = upper[nan] | 0x40
        out[start : start + _CHUNK] = rounded
    return out.reshape(values.shape)
