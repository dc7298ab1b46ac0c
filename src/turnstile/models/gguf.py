"""Reads GGUF, the single-file format of llama.cpp, by mmap: metadata, and where each tensor lies.

The layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), all little-endian::

    "GGUF"  u32 version  u64 tensors  u64 entries
    entries:  key: string   type: u32   value          string = u64 length + UTF-8
    tensors:  name: string  u32 dimensions  u64 each   u32 type  u64 offset
    padding to general.alignment
    data      (offsets count from here)

A model file comes from the internet, so nothing in it is believed: every count and offset is
checked against what is left of the file before anything is allocated, and a file that contradicts
itself raises :class:`CorruptFileError`. This module imports no torch, because the API process
reads tokenizers with it.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from turnstile.models.errors import CorruptFileError, UnsupportedModelError
from turnstile.models.tensor_file import MappedFile, TensorInfo

MAX_METADATA_BYTES = 256 << 20
"""The largest known vocabularies with merges take 20 MB; strings swell sixfold in memory."""
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 16
DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A tensor type: ``elements`` values are stored together in ``num_bytes`` bytes."""

    name: str
    elements: int
    num_bytes: int


BLOCK_FORMATS: Mapping[int, BlockFormat] = {
    0: BlockFormat("float32", 1, 4),
    1: BlockFormat("float16", 1, 2),
    2: BlockFormat("q4_0", 32, 18),
    3: BlockFormat("q4_1", 32, 20),
    6: BlockFormat("q5_0", 32, 22),
    7: BlockFormat("q5_1", 32, 24),
    8: BlockFormat("q8_0", 32, 34),
    12: BlockFormat("q4_k", 256, 144),
    13: BlockFormat("q5_k", 256, 176),
    14: BlockFormat("q6_k", 256, 210),
    30: BlockFormat("bfloat16", 1, 2),
}

OTHER_FORMATS: Mapping[int, str] = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16",
    26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
    40: "NVFP4",
}  # fmt: skip
"""Types that exist but are not read here; named in the refusal."""

_SCALARS: Mapping[int, struct.Struct] = {
    0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"),
    4: struct.Struct("<I"), 5: struct.Struct("<i"), 6: struct.Struct("<f"), 7: struct.Struct("<?"),
    10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d"),
}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An open GGUF file.

    ``metadata`` maps keys to int, float, bool, str, a list of str, or a 1-d numpy array;
    ``tensors`` maps names to their places.
    """

    path: Path
    version: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    file: MappedFile


def read_gguf(path: Path | str) -> GgufFile:
    """Open a GGUF file and read everything but the tensors' contents.

    Raises
    ------
    ModelNotFoundError
        The file does not exist or cannot be read.
    CorruptFileError
        It is not GGUF, is truncated, or contradicts itself.
    UnsupportedModelError
        A version, byte order or tensor type that is not read here.
    """
    path = Path(path)
    file = MappedFile(path)
    reader = _Reader(file)
    version, num_tensors, num_entries = reader.header()
    metadata = reader.metadata(num_entries)
    parts = metadata.get("split.count", 0)
    if not isinstance(parts, int) or parts > 1:
        raise UnsupportedModelError(
            f"{path} is one part of a split GGUF; join the parts first "
            "(llama-gguf-split --merge FIRST-PART OUTPUT)."
        )
    tensors = reader.tensors(num_tensors, reader.alignment(metadata))
    return GgufFile(path, version, metadata, tensors, file)


class _Reader:
    """A cursor over the mapped file that never steps past its end."""

    def __init__(self, file: MappedFile) -> None:
        self._path = file.path
        self._buffer = file.buffer
        self._at = 0
        self._end = min(len(file), MAX_METADATA_BYTES)
        self._size = len(file)

    # -- the parts of the file --------------------------------------------------------------

    def header(self) -> tuple[int, int, int]:
        if self._buffer[:4] != b"GGUF":
            raise self._corrupt("does not begin with 'GGUF', so it is no GGUF file")
        self._at = 4
        version = self._u32("the version")
        if version in (2 << 24, 3 << 24):
            raise UnsupportedModelError(f"{self._path} is big-endian; convert it to little-endian.")
        if version not in (2, 3):
            raise UnsupportedModelError(
                f"{self._path} is GGUF version {version}; versions 2 and 3 are read here."
            )
        num_tensors = self._count("tensors", smallest=24)
        num_entries = self._count("metadata entries", smallest=13)
        return version, num_tensors, num_entries

    def metadata(self, num_entries: int) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string("a metadata key")
            if key in entries:
                raise self._corrupt(f"has the metadata key {key!r} twice")
            entries[key] = self._value(key)
        return entries

    def alignment(self, metadata: Mapping[str, Any]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        valid = isinstance(alignment, int) and 0 < alignment <= MAX_ALIGNMENT
        if not valid or alignment & (alignment - 1):
            raise self._corrupt(f"has alignment {alignment!r}, which is no small power of two")
        return int(alignment)

    def tensors(self, num_tensors: int, alignment: int) -> dict[str, TensorInfo]:
        listed = [self._tensor(alignment) for _ in range(num_tensors)]
        data = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, form, shape, offset in listed:
            if name in tensors:
                raise self._corrupt(f"lists tensor {name!r} twice")
            num_bytes = math.prod(shape) // form.elements * form.num_bytes
            if data + offset + num_bytes > self._size:
                raise self._corrupt(
                    f"ends before tensor {name!r} does ({self._size} bytes, "
                    f"{data + offset + num_bytes} needed)"
                )
            tensors[name] = TensorInfo(name, form.name, shape, data + offset, num_bytes)
        self._refuse_overlap(tensors)
        return tensors

    def _refuse_overlap(self, tensors: Mapping[str, TensorInfo]) -> None:
        in_order = sorted(tensors.values(), key=lambda tensor: tensor.start)
        for left, right in itertools.pairwise(in_order):
            if left.start + left.num_bytes > right.start:
                raise self._corrupt(f"has tensors {left.name!r} and {right.name!r} overlapping")

    def _tensor(self, alignment: int) -> tuple[str, BlockFormat, tuple[int, ...], int]:
        name = self._string("a tensor name")
        dimensions = self._u32(f"the dimensions of {name!r}")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self._corrupt(f"gives tensor {name!r} {dimensions} dimensions")
        # GGUF counts the fastest dimension first.
        shape = tuple(self._u64(f"the shape of {name!r}") for _ in range(dimensions))[::-1]
        type_id = self._u32(f"the type of {name!r}")
        offset = self._u64(f"the offset of {name!r}")
        form = BLOCK_FORMATS.get(type_id)
        if form is None:
            known = ", ".join(f.name.upper() for f in BLOCK_FORMATS.values())
            found = OTHER_FORMATS.get(type_id, f"number {type_id}")
            raise UnsupportedModelError(
                f"{self._path}: tensor {name!r} is of type {found}; the known types are {known}."
            )
        if 0 in shape or shape[-1] % form.elements:
            raise self._corrupt(f"gives {form.name} tensor {name!r} the impossible shape {shape}")
        if offset % alignment:
            raise self._corrupt(f"puts tensor {name!r} at an unaligned offset, {offset}")
        return name, form, shape, offset

    # -- values -------------------------------------------------------------------------------

    def _value(self, key: str) -> Any:
        type_id = self._u32(f"the type of {key!r}")
        if type_id == _STRING:
            return self._string(key)
        if type_id == _ARRAY:
            return self._array(key)
        return self._scalar(self._scalar_type(type_id, key), key)

    def _array(self, key: str) -> Any:
        type_id = self._u32(f"the item type of {key!r}")
        if type_id == _STRING:
            return self._strings(key, self._count(f"strings in {key!r}", smallest=8))
        if type_id == _ARRAY:
            raise self._corrupt(f"nests arrays in {key!r}, which no known model does")
        scalar = self._scalar_type(type_id, key)
        count = self._count(f"values in {key!r}", smallest=scalar.size)
        start = self._take(count * scalar.size, key)
        dtype = np.dtype(scalar.format)
        return np.frombuffer(self._buffer, dtype, count, start).copy()

    def _strings(self, key: str, count: int) -> list[str]:
        """The one hot loop: vocabularies hold hundreds of thousands of strings."""
        buffer, at, end = self._buffer, self._at, self._end
        length_at = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            if at + 8 > end:
                raise self._truncated(key)
            start = at + 8
            at = start + length_at(buffer, at)[0]
            if at > end:
                raise self._truncated(key)
            strings.append(str(buffer[start:at], "utf-8", "replace"))
        self._at = at
        return strings

    def _string(self, what: str) -> str:
        length = self._u64(what)
        start = self._take(length, what)
        return str(self._buffer[start : start + length], "utf-8", "replace")

    def _scalar_type(self, type_id: int, key: str) -> struct.Struct:
        scalar = _SCALARS.get(type_id)
        if scalar is None:
            raise self._corrupt(f"gives {key!r} the unknown value type {type_id}")
        return scalar

    def _scalar(self, scalar: struct.Struct, what: str) -> Any:
        return scalar.unpack_from(self._buffer, self._take(scalar.size, what))[0]

    def _u32(self, what: str) -> int:
        return int(self._scalar(_SCALARS[4], what))

    def _u64(self, what: str) -> int:
        return int(self._scalar(_SCALARS[10], what))

    def _count(self, what: str, smallest: int) -> int:
        """A count of things that take at least ``smallest`` bytes each."""
        count = self._u64(f"the number of {what}")
        if count > (self._end - self._at) // smallest:
            raise self._corrupt(f"claims {count} {what}, more than the file has room for")
        return count

    def _take(self, num_bytes: int, what: str) -> int:
        """Step over ``num_bytes`` and return where they begin."""
        start = self._at
        if num_bytes > self._end - start:
            raise self._truncated(what)
        self._at = start + num_bytes
        return start

    def _truncated(self, what: str) -> CorruptFileError:
        if self._end < self._size:
            return self._corrupt(f"has over {MAX_METADATA_BYTES >> 20} MiB of metadata ({what})")
        return self._corrupt(f"ends in the middle of {what}")

    def _corrupt(self, what: str) -> CorruptFileError:
        return CorruptFileError(f"{self._path} {what}; fetch the file again.")
