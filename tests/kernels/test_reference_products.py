"""Products in fixed tiles: right, and the same bits at any place, batch size and thread count."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from turnstile.kernels import BackendError, row_products
from turnstile.kernels.row_products import (
    UNIT,
    Projection,
    TileProbe,
    multiply,
    padded_outputs,
)

SHAPES = [(100, 64), (37, 100), (333, 88), (64, 128), (960, 576), (1000, 40)]
DTYPES = [torch.float32, torch.bfloat16]


def product(x: Tensor, projection: Projection) -> Tensor:
    """Pads to whole tiles, as the backend does."""
    rows = -(-len(x) // UNIT) * UNIT
    padded = x.new_zeros(rows, x.shape[1])
    padded[: len(x)] = x
    out = x.new_full((rows, projection.weight.shape[0]), torch.nan)
    return multiply(padded, projection, out)[: len(x)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_do_not_depend_on_their_company(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(shape[0])
    weight = torch.randn(shape, generator=generator).to(dtype)
    x = torch.randn(203, shape[1], generator=generator).to(dtype)
    stored = padded_outputs(weight)
    results = []
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        projection = Projection(stored, shape[0], TileProbe().tiles(stored))
        results.append(product(x, projection))
        for first, end in ((0, 1), (7, 8), (3, 12), (50, 100), (60, 203)):
            assert torch.equal(product(x[first:end], projection), results[0][first:end])
    assert all(torch.equal(result, results[0]) for result in results)
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(
        results[0].double(), x.double() @ weight.double().t(), rtol=tolerance, atol=tolerance
    )


def test_plain_products_fail_the_same_comparison() -> None:
    """The control: one row alone takes another path through the library than among many."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 576, generator=generator) for n in (960, 50))
    projection = Projection(weight, 960, tiles=None)
    out = torch.empty(50, 960)
    everyone = multiply(x, projection, out).clone()
    alone = torch.cat([multiply(x[i : i + 1], projection, out[:1]).clone() for i in range(50)])
    assert not torch.equal(everyone, alone)


def test_a_tile_that_disagrees_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = torch.mm

    def crooked(a: Tensor, b: Tensor) -> Tensor:
        result = honest(a, b)
        return result * (1 + 1e-6) if len(a) == 32 else result

    monkeypatch.setattr(torch, "mm", crooked)
    assert TileProbe().tiles(torch.randn(64, 16)).rows == (128, 64, 16, 8)


def test_where_threads_show_a_product_gets_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = torch.mm

    def split(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        result = honest(a, b, out=out) if out is not None else honest(a, b)
        return result.mul_(1 + 1e-6) if torch.get_num_threads() > 1 else result

    monkeypatch.setattr(torch, "mm", split)
    torch.set_num_threads(2)
    weight, x = torch.randn(64, 16), torch.randn(24, 16)
    tiles = TileProbe().tiles(weight)
    assert tiles.one_thread
    exact = product(x, Projection(weight, 64, tiles))
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    assert torch.equal(exact, product(x, Projection(weight, 64, tiles)))


def test_where_nothing_agrees_exact_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = torch.mm

    def by_place(a: Tensor, b: Tensor) -> Tensor:
        return honest(a, b) * torch.linspace(1, 1.1, len(a))[:, None]

    monkeypatch.setattr(torch, "mm", by_place)
    with pytest.raises(BackendError, match="Exact mode is not possible here"):
        TileProbe().tiles(torch.randn(64, 16))


def test_a_shape_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    probe, calls = TileProbe(), []
    monkeypatch.setattr(row_products, "_agrees", lambda *arguments: calls.append(arguments) or True)
    for _ in range(5):
        probe.tiles(torch.randn(64, 16))
    assert [call[3] for call in calls] == list(row_products.TILES)
