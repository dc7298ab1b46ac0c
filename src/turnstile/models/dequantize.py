"""GGUF's block formats to float32, in numpy, bit for bit as ggml defines them.

A block holds 32 or 256 consecutive values of a row: one or two float16 scales, and small integers
packed low nibble first. The layouts are those of ``ggml-common.h``::

    q4_0   d            qs[16]                   (q - 8) · d
    q4_1   d m          qs[16]                   q · d + m
    q5_0   d       qh[4] qs[16]                  (q - 16) · d        qh: the fifth bits
    q5_1   d m     qh[4] qs[16]                  q · d + m
    q8_0   d            qs[32]                   q · d
    q4_k   d dmin  scales[12] qs[128]            q · (d · sc) - (dmin · mn)    8 groups of 32
    q5_k   d dmin  scales[12] qh[32] qs[128]     the same, with fifth bits
    q6_k   ql[128] qh[64] scales[16] d           (q - 32) · (d · sc)           16 groups of 16

All products and sums are separate float32 operations, as there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from turnstile.models.errors import UnsupportedModelError

FloatArray = npt.NDArray[np.float32]
ByteArray = npt.NDArray[np.uint8]


def dequantize(raw: ByteArray, dtype: str) -> FloatArray:
    """Float32 values of whole blocks: ``raw`` is flat, and so is the result.

    Raises
    ------
    UnsupportedModelError
        For a ``dtype`` not in :data:`FORMATS`.
    """
    if dtype not in FORMATS:
        raise UnsupportedModelError(f"Cannot dequantise {dtype!r}; known: {', '.join(FORMATS)}.")
    block_bytes, convert = FORMATS[dtype]
    return convert(raw.reshape(-1, block_bytes)).reshape(-1)


def _half(blocks: ByteArray, at: int) -> FloatArray:
    """The float16 at byte ``at`` of every block: ``[blocks, 1]``."""
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: ByteArray) -> ByteArray:
    """``[blocks, n]`` bytes to ``[blocks, 2, n]``: all low nibbles, then all high ones."""
    return np.stack((packed & 15, packed >> 4), axis=1)


def _fifth_bits(packed: ByteArray) -> ByteArray:
    """Four bytes of single bits to ``[blocks, 2, 16]`` values of 0 or 16."""
    bits = np.unpackbits(packed, axis=1, bitorder="little")
    return (bits << np.uint8(4)).reshape(-1, 2, 16)


def _float32(blocks: ByteArray) -> FloatArray:
    return blocks.view(np.float32)


def _float16(blocks: ByteArray) -> FloatArray:
    return blocks.view(np.float16).astype(np.float32)


def _bfloat16(blocks: ByteArray) -> FloatArray:
    return (blocks.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: ByteArray) -> FloatArray:
    quants = _nibbles(blocks[:, 2:]).reshape(-1, 32).astype(np.int8) - np.int8(8)
    return quants.astype(np.float32) * _half(blocks, 0)


def _q4_1(blocks: ByteArray) -> FloatArray:
    quants = _nibbles(blocks[:, 4:]).reshape(-1, 32).astype(np.float32)
    return quants * _half(blocks, 0) + _half(blocks, 2)


def _q5_0(blocks: ByteArray) -> FloatArray:
    quants = (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])).reshape(-1, 32)
    return (quants.astype(np.int8) - np.int8(16)).astype(np.float32) * _half(blocks, 0)


def _q5_1(blocks: ByteArray) -> FloatArray:
    quants = (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])).reshape(-1, 32)
    return quants.astype(np.float32) * _half(blocks, 0) + _half(blocks, 2)


def _q8_0(blocks: ByteArray) -> FloatArray:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _half(blocks, 0)


def _scales_and_mins(packed: ByteArray) -> tuple[ByteArray, ByteArray]:
    """Eight 6-bit scales and eight 6-bit minima out of 12 bytes: two ``[blocks, 8]``.

    Bytes 0-3 hold scales 0-3 in their low six bits and the top two bits of scales 4-7; bytes 4-7
    the same for the minima; bytes 8-11 the low nibbles of scales 4-7 and minima 4-7.
    """
    first, second, low = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate((first & 63, (low & 15) | ((first >> 6) << 4)), axis=1)
    minima = np.concatenate((second & 63, (low >> 4) | ((second >> 6) << 4)), axis=1)
    return scales, minima


def _scaled_groups(blocks: ByteArray, quants: ByteArray) -> FloatArray:
    """The common end of q4_k and q5_k: ``quants[blocks, 8, 32]`` with the scales at byte 4."""
    scales, minima = _scales_and_mins(blocks[:, 4:16])
    scale = _half(blocks, 0) * scales.astype(np.float32)
    minimum = _half(blocks, 2) * minima.astype(np.float32)
    return scale[:, :, None] * quants.astype(np.float32) - minimum[:, :, None]


def _nibbles_by_64(packed: ByteArray) -> ByteArray:
    """128 bytes to eight groups of 32: 32 bytes give a group of low and one of high nibbles."""
    chunks = packed.reshape(-1, 4, 32)
    return np.stack((chunks & 15, chunks >> 4), axis=2).reshape(-1, 8, 32)


def _q4_k(blocks: ByteArray) -> FloatArray:
    return _scaled_groups(blocks, _nibbles_by_64(blocks[:, 16:]))


def _q5_k(blocks: ByteArray) -> FloatArray:
    # Bit g of byte i belongs to value i of group g.
    group = np.arange(8, dtype=np.uint8)[None, :, None]
    fifth = (blocks[:, None, 16:48] >> group) & np.uint8(1)
    return _scaled_groups(blocks, _nibbles_by_64(blocks[:, 48:]) | (fifth << np.uint8(4)))


def _q6_k(blocks: ByteArray) -> FloatArray:
    packed = blocks[:, :128].reshape(-1, 2, 64)
    low = np.stack((packed & 15, packed >> 4), axis=2).reshape(-1, 2, 4, 32)
    shift = np.arange(0, 8, 2, dtype=np.uint8)[None, None, :, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shift) & 3
    quants = (low | (high << 4)).reshape(-1, 16, 16).astype(np.int8) - np.int8(32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    scale: FloatArray = _half(blocks, 208) * scales
    values: FloatArray = scale[:, :, None] * quants.astype(np.float32)
    return values


FORMATS: Mapping[str, tuple[int, Callable[[ByteArray], FloatArray]]] = {
    "float32": (4, _float32),
    "float16": (2, _float16),
    "bfloat16": (2, _bfloat16),
    "q4_0": (18, _q4_0),
    "q4_1": (20, _q4_1),
    "q5_0": (22, _q5_0),
    "q5_1": (24, _q5_1),
    "q8_0": (34, _q8_0),
    "q4_k": (144, _q4_k),
    "q5_k": (176, _q5_k),
    "q6_k": (210, _q6_k),
}
"""Bytes of a block, and how it becomes float32."""
