"""A file of named tensors, mapped into memory: what GGUF and safetensors have in common."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from turnstile.models.errors import CorruptFileError, ModelNotFoundError

ByteArray = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: ``shape`` is row-major, ``start`` and ``num_bytes`` count in the file.

    ``dtype`` is a lower-case name: a float type (``float32``, ``bfloat16``...) or a block format
    of GGUF (``q4_k``...).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class MappedFile:
    """A file mapped copy-on-write: reads are zero-copy, and nothing here ever writes.

    The mapping is private and writable only so that arrays over it count as writable, which
    torch asks for. A missing, unreadable or empty file raises a :class:`ModelError`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            raise ModelNotFoundError(f"There is no file {path}.") from None
        except ValueError:  # mmap refuses length 0
            raise CorruptFileError(f"{path} is empty; fetch it again.") from None
        except OSError as error:
            raise ModelNotFoundError(f"Cannot read {path}: {error.strerror}.") from None

    def __len__(self) -> int:
        return len(self._map)

    @property
    def buffer(self) -> mmap.mmap:
        """The whole file."""
        return self._map

    def bytes_of(self, tensor: TensorInfo) -> ByteArray:
        """The tensor's bytes as a view of the mapping; the view keeps the mapping alive."""
        return np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.start)

    def release(self, tensor: TensorInfo) -> None:
        """Give the tensor's memory back to the system; touching it again reads the file again.

        Only pages wholly inside the tensor go, so that neighbours are left alone.
        """
        page = mmap.PAGESIZE
        first = -(-tensor.start // page) * page
        end = (tensor.start + tensor.num_bytes) // page * page
        if end > first and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)


class TensorFiles:
    """The tensors of a model, found by name over however many files it is cut into."""

    def __init__(self, files: Mapping[Path, tuple[MappedFile, Mapping[str, TensorInfo]]]) -> None:
        self._places: dict[str, tuple[MappedFile, TensorInfo]] = {}
        for path, (file, tensors) in files.items():
            for name, info in tensors.items():
                if name in self._places:
                    other = self._places[name][0].path
                    raise CorruptFileError(f"Tensor {name!r} is both in {other} and in {path}.")
                self._places[name] = (file, info)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def names(self) -> list[str]:
        """All names, in file order."""
        return list(self._places)

    def info(self, name: str) -> TensorInfo:
        """Shape, type and place of a tensor; KeyError if there is none."""
        return self._places[name][1]

    def path(self, name: str) -> Path:
        """The file that holds a tensor, for messages."""
        return self._places[name][0].path

    def bytes_of(self, name: str) -> ByteArray:
        """The raw bytes of a tensor, zero-copy."""
        file, info = self._places[name]
        return file.bytes_of(info)

    def release(self, name: str) -> None:
        """Let the system take back the memory behind a tensor that has been read."""
        file, info = self._places[name]
        file.release(info)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors as they lie in the files."""
        return sum(info.num_bytes for _, info in self._places.values())
