"""Every block format gives the float32 values of ggml's own package, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as oracle

from turnstile.models.dequantize import FORMATS, dequantize
from turnstile.models.errors import UnsupportedModelError
from turnstile.models.gguf import BLOCK_FORMATS

# Where the float16 scales lie; everything else in a block may be any byte.
HALVES = {
    "q4_0": [0], "q4_1": [0, 2], "q5_0": [0], "q5_1": [0, 2], "q8_0": [0],
    "q4_k": [0, 2], "q5_k": [0, 2], "q6_k": [208],
}  # fmt: skip


def random_blocks(dtype: str, count: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    block_bytes = FORMATS[dtype][0]
    blocks = random.integers(0, 256, (count, block_bytes), dtype=np.uint8)
    for at in HALVES.get(dtype, []):
        # Finite halves of every magnitude, subnormals and both zeros among them.
        halves = random.integers(0, 1 << 16, count, dtype=np.uint16)
        halves[(halves & 0x7C00) == 0x7C00] ^= 0x4000
        blocks[:, at : at + 2] = halves.view(np.uint8).reshape(count, 2)
    if dtype in ("float32", "float16", "bfloat16"):
        values = random.standard_normal(count).astype(np.float32)
        if dtype == "float32":
            blocks = values.view(np.uint8).reshape(count, 4)
        elif dtype == "float16":
            blocks = values.astype(np.float16).view(np.uint8).reshape(count, 2)
        else:
            blocks = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return blocks.reshape(-1)


@pytest.mark.parametrize("dtype", FORMATS)
def test_values_equal_those_of_the_gguf_package_bit_for_bit(dtype: str) -> None:
    names = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    qtype = GGMLQuantizationType[names.get(dtype, dtype.upper().replace("_K", "_K"))]
    raw = random_blocks(dtype, 3000, seed=len(dtype))
    ours = dequantize(raw, dtype)
    theirs = oracle(raw.view(np.float32) if dtype == "float32" else raw, qtype).reshape(-1)
    assert ours.dtype == np.float32
    assert len(ours) > 2000
    assert np.array_equal(ours.view(np.uint32), theirs.astype(np.float32).view(np.uint32))


def test_the_table_of_sizes_is_that_of_the_gguf_package() -> None:
    for type_id, form in BLOCK_FORMATS.items():
        assert GGML_QUANT_SIZES[GGMLQuantizationType(type_id)] == (form.elements, form.num_bytes)
        assert FORMATS[form.name][0] == form.num_bytes


def test_an_unknown_format_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="iq2_xs"):
        dequantize(np.zeros(4, np.uint8), "iq2_xs")
