"""How much memory the C library's allocator has given out: :func:`heap_bytes`."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

_FIELDS = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd",
    "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
)  # fmt: skip


class _Counts(ctypes.Structure):
    """``struct mallinfo2`` of glibc (mallinfo(3))."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def heap_bytes() -> int | None:
    """Bytes in use, in the arenas and mapped beside them; None where the C library does not tell
    (it is not glibc, or one before 2.33).

    What extensions hold is in it, and Python's own small objects are not. The count looks at all
    free pieces: it takes microseconds in a young process and may take a millisecond in an old one.
    """
    count = _counter()
    if count is None:
        return None
    counts = count()
    return int(counts.uordblks + counts.hblkhd)


@functools.cache
def _counter() -> Callable[[], _Counts] | None:
    try:
        count = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return None
    count.restype = _Counts
    return count
