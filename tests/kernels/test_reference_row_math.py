"""The functions of one row: right, and the same bits in any company on any number of threads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from turnstile.kernels import row_math

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "row_sum": lambda x: row_math.row_sum(x.clone()),
    "rms_norm": lambda x: row_math.rms_norm(x, torch.linspace(0.5, 2, x.shape[-1]), 1e-5),
    "silu": row_math.silu,
    "log_normalizer": row_math.log_normalizer,
    "argmax": row_math.argmax,
    "top_k": lambda x: torch.cat(row_math.top_k(x, 5), dim=-1),
}
TRUTH: dict[str, Callable[[Tensor], Tensor]] = {
    "row_sum": lambda x: x.double().sum(-1),
    "rms_norm": lambda x: torch.nn.functional.rms_norm(
        x.double(), x.shape[-1:], torch.linspace(0.5, 2, x.shape[-1]).double(), 1e-5
    ),
    "silu": lambda x: torch.nn.functional.silu(x.double()),
    "log_normalizer": lambda x: x.double().logsumexp(-1),
}


def rows(width: int) -> Tensor:
    return torch.randn(50, width, generator=torch.Generator().manual_seed(width)) * 4


@pytest.mark.parametrize("width", [5, 64, 577, 128_256])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_row_equals_the_row_among_fifty(name: str, width: int) -> None:
    function, x = FUNCTIONS[name], rows(width)
    everyone = function(x)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for row in (0, 1, 17, 49):
            assert torch.equal(function(x[row : row + 1])[0], everyone[row])
        assert torch.equal(function(x[:7]), everyone[:7])
        assert torch.equal(function(x), everyone)


@pytest.mark.parametrize("width", [5, 64, 577, 49152])
@pytest.mark.parametrize("name", TRUTH)
def test_values_agree_with_double_precision(name: str, width: int) -> None:
    x = rows(width)
    torch.testing.assert_close(FUNCTIONS[name](x).double(), TRUTH[name](x), rtol=2e-5, atol=2e-5)


def test_a_fused_activation_fails_the_same_comparison() -> None:
    """The control: torch's own silu rounds differently in the tail of an array."""
    x = rows(577)
    everyone = torch.nn.functional.silu(x)
    alone = torch.cat([torch.nn.functional.silu(x[i : i + 1]) for i in range(50)])
    assert not torch.equal(alone, everyone)
    assert torch.equal(
        torch.cat([row_math.silu(x[i : i + 1]) for i in range(50)]), row_math.silu(x)
    )


def test_a_library_sum_fails_the_same_comparison() -> None:
    """The control: one long row is split over threads, fifty are not."""
    torch.set_num_threads(2)
    x = rows(128_256)
    for function, independent in ((lambda t: t.sum(-1), False), (FUNCTIONS["row_sum"], True)):
        alone = torch.cat([function(x[i : i + 1]) for i in range(len(x))])
        assert torch.equal(alone, function(x)) == independent


few_values = st.sampled_from([-np.inf, -2.0, -1.5, -0.0, 0.0, 1e-40, 1.5, 3.0])


@given(x=arrays.arrays(np.float32, (3, 12), elements=few_values), k=st.integers(1, 12))
def test_ties_go_to_the_lower_index(x: np.ndarray, k: int) -> None:
    logits = torch.from_numpy(x)
    values, indices = row_math.top_k(logits, k)
    for row in range(3):
        expected = sorted(range(12), key=lambda i: (-float(x[row, i]), i))[:k]
        assert indices[row].tolist() == expected
        assert values[row].tolist() == [float(x[row, i]) for i in expected]
    assert row_math.argmax(logits).tolist() == [int(row.argmax()) for row in x]


def test_a_row_with_nan_or_infinity_is_marked_and_stays_in_range() -> None:
    logits = rows(64)[:4]
    logits[1, 3] = torch.nan
    logits[2, 3] = torch.inf
    marked = row_math.log_normalizer(logits)
    assert marked.isfinite().tolist() == [True, False, False, True]
    assert (row_math.argmax(logits) < 64).all()


def test_turning_by_an_angle_keeps_the_length_of_every_pair() -> None:
    x = torch.randn(6, 3, 16)
    angle = torch.randn(6, 1, 8)
    turned = row_math.rotate(x, angle.cos(), angle.sin())
    pairs, before = (t.unflatten(-1, (2, 8)).norm(dim=-2) for t in (turned, x))
    torch.testing.assert_close(pairs, before)
    back = row_math.rotate(turned, angle.cos(), -angle.sin())
    torch.testing.assert_close(back, x)
