"""Backends: the code that touches K and V. :func:`create_backend` picks and builds one."""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from turnstile.kernels.base import Backend

BACKENDS = ("native", "reference")
"""In order of preference. Each is a module ``turnstile.kernels.NAME`` with two functions:
``refusal(device, weight_format, kv_dtype)`` says in a sentence why it cannot serve (or None), and
``create(device, weight_format, kv_dtype, exact, threads)`` builds the backend. ``refusal`` must
not fail where an optional package is missing: that is one of the things it says.
"""

WEIGHT_FORMATS = ("float32", "bfloat16", "int8")


class BackendError(Exception):
    """No backend can do what was asked. The message says what can be done instead."""


def preload() -> None:
    """Import the backend that will probably be asked for: the first that can be had here. Of those
    only ``reference`` needs torch, which takes more than a second.
    """
    native = importlib.import_module("turnstile.kernels.native")
    if not native.available()[0]:
        with contextlib.suppress(ImportError, OSError):  # create_backend says so
            importlib.import_module("turnstile.kernels.reference")


def create_backend(
    device: str = "cpu",
    weight_format: str = "float32",
    kv_dtype: str | None = None,
    exact: bool = True,
    threads: int | None = None,
    *,
    name: str | None = None,
) -> Backend:
    """Build the best backend for the device and formats, or the one named ``name``.

    ``weight_format`` is one of :data:`WEIGHT_FORMATS`; ``kv_dtype`` (None: the backend's own
    choice) is the storage type of K and V; ``exact`` promises that rows do not depend on the
    batch; ``threads`` sets the number of compute threads of this process (None: leave it).

    Raises
    ------
    BackendError
        No backend fits; the message has the reason of each.
    """
    names = (name,) if name else BACKENDS
    refusals = []
    for each in names:
        if each not in BACKENDS:
            raise BackendError(f"There is no backend {each!r}; there are {', '.join(BACKENDS)}.")
        try:
            module = importlib.import_module(f"turnstile.kernels.{each}")
        except (ImportError, OSError) as error:  # a package is missing, or its libraries are
            gone = error.name if isinstance(error, ModuleNotFoundError) else None
            why = f"needs {gone}, which is not installed" if gone else str(error)
            refusals.append(f"{each}: {why}")
            continue
        refusal = module.refusal(device, weight_format, kv_dtype)
        if refusal is None:
            backend: Backend = module.create(device, weight_format, kv_dtype, exact, threads)
            return backend
        refusals.append(f"{each}: {refusal}")
    raise BackendError(
        f"No backend serves {weight_format} weights with {kv_dtype or 'any'} K and V on {device} "
        f"({'; '.join(refusals)})."
    )
