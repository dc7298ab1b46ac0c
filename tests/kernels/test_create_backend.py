"""Backends are picked by what they can do, and a refusal says why."""

from __future__ import annotations

import pytest
import torch

from turnstile.kernels import BACKENDS, BackendError, create_backend


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(BackendError, match="CUDA"):
        create_backend("cuda")


def test_threads_are_set_when_given() -> None:
    create_backend("cpu", name="reference", threads=2)
    assert torch.get_num_threads() == 2
