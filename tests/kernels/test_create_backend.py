"""Backends are picked by what they can do, and a refusal says why."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from turnstile.kernels import BACKENDS, BackendError, create_backend, preload


def test_the_reference_is_there_for_every_float_format() -> None:
    for weight_format in ("float32", "bfloat16"):
        backend = create_backend("cpu", weight_format, name="reference")
        assert (backend.name, backend.exact) == ("reference", True)
        assert backend.load_format == weight_format


def test_a_refusal_names_every_backend_and_its_reason() -> None:
    with pytest.raises(BackendError) as refused:
        create_backend("cpu", "int3")
    assert all(name in str(refused.value) for name in BACKENDS)
    assert "float32 or bfloat16" in str(refused.value)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(BackendError, match="native, reference"):
        create_backend(name="nativ")


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("No module named 'torch'"), OSError("libtorch.so: not found")]
)
def test_a_torch_that_cannot_be_loaded_is_a_reason_and_not_a_crash(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def load(name: str) -> Any:
        if name.endswith("reference"):
            raise error
        return SimpleNamespace(available=lambda: (False, "none"), refusal=lambda *_: "not today")

    monkeypatch.setattr("turnstile.kernels.importlib.import_module", load)
    preload()
    with pytest.raises(BackendError, match=r"native: not today; reference: .*torch"):
        create_backend()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(BackendError, match="CUDA"):
        create_backend("cuda")


def test_threads_are_set_when_given() -> None:
    create_backend("cpu", name="reference", threads=2)
    assert torch.get_num_threads() == 2


_TOO_MANY = """
import resource
import turnstile_kernels
from turnstile.kernels.native import NativeBackend, ThreadsError
from pathlib import Path
here = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
limit = here + (128 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    NativeBackend("int8", "int8", 64)
except ThreadsError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere stacks count for nothing")
def test_threads_that_cannot_be_had_are_refused_at_start() -> None:
    """Where the system allows too few, the first request used to find out."""
    pytest.importorskip("turnstile_kernels")
    done = subprocess.run(
        [sys.executable, "-c", _TOO_MANY], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith("64 compute threads cannot be started ("), done.stderr[-500:]
    assert "--threads" in done.stdout
    assert "TasksMax=" in done.stdout
