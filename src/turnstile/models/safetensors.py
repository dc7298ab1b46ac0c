"""Reads safetensors by mmap: where each tensor lies, and nothing believed that is not checked.

The layout (https://huggingface.co/docs/safetensors): u64 length, a JSON header of that length,
then the data. The header maps names to ``{"dtype", "shape", "data_offsets": [begin, end]}``.
Own reader rather than the library's because it names tensor and file in every complaint, imports
no torch, and can give memory back to the system layer by layer.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnstile.models.errors import CorruptFileError, UnsupportedModelError
from turnstile.models.tensor_file import MappedFile, TensorFiles, TensorInfo

MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
FLOAT_TYPES: Mapping[str, tuple[str, int]] = {
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
}
MAX_DIMENSIONS = 8
MAX_NUMBER = (1 << 63) - 1
"""Of a size or an offset: Python would multiply larger ones too, for as long as it takes."""
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


def open_safetensors(directory: Path) -> TensorFiles:
    """Open the tensors of a checkpoint directory, in one file or cut into several.

    Raises
    ------
    UnsupportedModelError
        There is no safetensors file, or a tensor is no float.
    CorruptFileError
        A file is truncated or contradicts itself or the index.
    """
    paths = _paths_of(directory)
    files = {}
    for path in paths:
        file = MappedFile(path)
        files[path] = (file, read_header(file))
    return TensorFiles(files)


def _paths_of(directory: Path) -> list[Path]:
    index = directory / INDEX_NAME
    if index.exists():
        return _paths_in_index(index)
    single = directory / SINGLE_NAME
    if single.exists():
        return [single]
    found = sorted(directory.glob("*.safetensors"))
    if not found:
        raise UnsupportedModelError(
            f"{directory} has no .safetensors file; other formats of weights are not read. "
            "Convert the checkpoint (save_pretrained writes safetensors), or use a GGUF file."
        )
    return found


def _paths_in_index(index: Path) -> list[Path]:
    try:
        names = json.loads(index.read_text("utf-8"))["weight_map"].values()
        unique = sorted({str(name) for name in names})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CorruptFileError(f"{index} has no readable weight_map; fetch it again.") from None
    for name in unique:
        if Path(name).name != name or name in ("", ".."):  # an index must not lead elsewhere
            raise CorruptFileError(f"{index} names {name!r}, which is no plain file name.")
        if not _exists(index.parent / name):
            raise CorruptFileError(f"{index} names {name!r}, which is missing; fetch it again.")
    return [index.parent / name for name in unique]


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name longer than any file's
        return False


def read_header(file: MappedFile) -> dict[str, TensorInfo]:
    """The tensors of one file, checked to lie inside it and not to overlap."""
    path, size = file.path, len(file)
    length = int.from_bytes(file.buffer[:8], "little")
    if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
        raise CorruptFileError(
            f"{path} is truncated or no safetensors file (a header of {length} bytes in a file of "
            f"{size}); fetch it again."
        )
    try:
        header = json.loads(file.buffer[8 : 8 + length], object_pairs_hook=_without_repeats)
    except _RepeatedKeyError as error:
        raise CorruptFileError(f"The header of {path} has {error} twice.") from None
    except (ValueError, RecursionError):
        raise CorruptFileError(f"The header of {path} is no JSON; fetch the file again.") from None
    if not isinstance(header, dict):
        raise CorruptFileError(f"The header of {path} is no JSON object; fetch the file again.")
    header.pop("__metadata__", None)
    data = 8 + length
    tensors = {name: _tensor(path, name, entry, data, size) for name, entry in header.items()}
    in_order = sorted(tensors.values(), key=lambda tensor: tensor.start)
    for left, right in itertools.pairwise(in_order):
        if left.start + left.num_bytes > right.start:
            raise CorruptFileError(f"{path}: tensors {left.name!r} and {right.name!r} overlap.")
    return tensors


class _RepeatedKeyError(Exception):
    """Carries the key: readers that take the first and readers that take the last would differ."""


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for key, value in pairs:
        if key in entries:
            raise _RepeatedKeyError(repr(key))
        entries[key] = value
    return entries


def _tensor(path: Path, name: str, entry: Any, data: int, size: int) -> TensorInfo:
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        if not isinstance(dtype, str):
            raise TypeError
    except (KeyError, TypeError, ValueError):
        raise CorruptFileError(f"{path}: the entry of tensor {name!r} is malformed.") from None
    if len(shape) > MAX_DIMENSIONS:
        raise CorruptFileError(
            f"{path}: tensor {name!r} has {len(shape)} dimensions; at most {MAX_DIMENSIONS} may be."
        )
    numbers = (*shape, begin, end)
    if not all(type(n) is int and 0 <= n <= MAX_NUMBER for n in numbers):
        raise CorruptFileError(f"{path}: the entry of tensor {name!r} has impossible numbers.")
    if dtype not in FLOAT_TYPES:
        raise UnsupportedModelError(
            f"{path}: tensor {name!r} is of type {dtype}; known are {', '.join(FLOAT_TYPES)}. "
            "A quantised checkpoint must be converted, or taken as GGUF."
        )
    form, width = FLOAT_TYPES[dtype]
    if end - begin != math.prod(shape) * width:
        raise CorruptFileError(
            f"{path}: tensor {name!r} of shape {list(shape)} takes {end - begin} bytes, which is "
            f"not {math.prod(shape) * width}."
        )
    if data + end > size:
        raise CorruptFileError(
            f"{path} is truncated: it ends at byte {size}, tensor {name!r} at {data + end}; "
            "fetch it again."
        )
    return TensorInfo(name, form, shape, data + begin, end - begin)
