"""Matrix products whose rows do not depend on each other, made from a library that mixes them.

A GEMM library picks its kernel by the shape of the whole product: one row alone is summed in
another order than the same row among fifty, and so comes out different in the last bits. Exact
products therefore use a few fixed numbers of rows only (:data:`TILES`), padded with zeros at the
end, and each weight is tried before it is used: every tile must give every row the same bits
wherever it stands, and on one thread as on all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from turnstile.kernels import BackendError

TILES = (128, 64, 32, 16, 8)
"""Rows of a product, largest first. The last is the unit batches are padded to."""
UNIT = TILES[-1]

COLUMN_UNIT = 64
"""Outputs are padded to whole vectors for every thread, or the split over threads shows."""

_PROBE_SEED = 20_24


@dataclass(frozen=True, slots=True)
class Projection:
    """``x @ weight.T + bias``. ``weight`` is ``[outputs padded, inputs]``; ``tiles`` are the row
    counts that agree on it, or None for a plain product.
    """

    weight: Tensor
    outputs: int
    tiles: tuple[int, ...] | None
    bias: Tensor | None = None


def padded_outputs(weight: Tensor) -> Tensor:
    """``weight`` with zero rows up to a multiple of :data:`COLUMN_UNIT`; the same if it is one."""
    missing = -weight.shape[0] % COLUMN_UNIT
    if not missing:
        return weight
    return torch.cat((weight, weight.new_zeros(missing, weight.shape[1])))


def multiply(x: Tensor, projection: Projection, out: Tensor) -> Tensor:
    """``x[n, inputs]`` times the weight into ``out[n, outputs padded]`` (x's dtype), without the
    bias; returns ``out[:, :outputs]``. For exact products n is a multiple of :data:`UNIT`.
    """
    transposed = projection.weight.t()
    if projection.tiles is None:
        torch.mm(x, transposed, out=out)
        return out[:, : projection.outputs]
    start = 0
    for tile in projection.tiles:
        while len(x) - start >= tile:
            torch.mm(x[start : start + tile], transposed, out=out[start : start + tile])
            start += tile
    return out[:, : projection.outputs]


class TileProbe:
    """Finds the tiles that agree for a shape of weight; remembers what it found.

    Which kernel runs depends on shapes, dtype and threads, not on values, so that one random
    weight stands for all of its shape.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], tuple[int, ...]] = {}

    def tiles(self, weight: Tensor) -> tuple[int, ...]:
        """The tiles that may be used with ``weight``, largest first.

        Raises
        ------
        BackendError
            Not even the smallest tile is independent of position and threads on this machine.
        """
        key = (tuple(weight.shape), weight.dtype, weight.device, torch.get_num_threads())
        if key not in self._found:
            self._found[key] = self._probe(weight)
        return self._found[key]

    def _probe(self, weight: Tensor) -> tuple[int, ...]:
        generator = torch.Generator().manual_seed(_PROBE_SEED)
        rows = torch.randn(UNIT, weight.shape[1], generator=generator)
        rows = rows.to(weight.device, weight.dtype)
        transposed = weight.t()
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            truth = torch.mm(rows, transposed)
        finally:
            torch.set_num_threads(threads)
        agreeing = tuple(tile for tile in TILES if _agrees(rows, transposed, truth, tile))
        if UNIT not in agreeing:
            raise BackendError(
                f"Exact mode is not possible here: {weight.dtype} products of shape "
                f"{list(weight.shape)} depend on a row's place or on the threads. "
                "Start with one thread, with other weights, or without exact mode."
            )
        return agreeing


def _agrees(rows: Tensor, transposed: Tensor, truth: Tensor, tile: int) -> bool:
    """Whether products of ``tile`` rows give each row its true bits at every place modulo 8."""
    copies = range(max(tile // UNIT, UNIT))
    order = torch.cat([torch.arange(UNIT).flip(0).roll(copy) for copy in copies])
    return all(
        torch.equal(torch.mm(rows[chosen], transposed), truth[chosen])
        for chosen in torch.split(order, tile)
    )
