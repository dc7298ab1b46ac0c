"""Matrix products whose rows do not depend on each other, made from a library that mixes them.

A GEMM library picks its kernel by the shape of the whole product: one row alone is summed in
another order than the same row among fifty, and so comes out different in the last bits. Exact
products therefore use a few fixed numbers of rows only (:data:`TILES`), padded with zeros at the
end, and each weight is tried before it is used: every tile must give every row the same bits
wherever it stands, and on one thread as on all. Where the library splits a product over threads in
ways that show (Intel's MKL does), it gets one thread for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
class Tiles:
    """Row counts whose products agree, largest first; ``one_thread``: on one thread only."""

    rows: tuple[int, ...]
    one_thread: bool = False


@dataclass(frozen=True, slots=True)
class Projection:
    """``x @ weight.T + bias``. ``weight`` is ``[outputs padded, inputs]``; ``tiles`` are those that
    agree on it, or None for a plain product.
    """

    weight: Tensor
    outputs: int
    tiles: Tiles | None
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
    with _one_thread() if projection.tiles.one_thread else nullcontext():
        for tile in projection.tiles.rows:
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
        self._found: dict[tuple[object, ...], Tiles] = {}

    def tiles(self, weight: Tensor) -> Tiles:
        """The tiles that may be used with ``weight``.

        Raises
        ------
        BackendError
            On this machine a row of the smallest tile depends on its place, even on one thread.
        """
        key = (tuple(weight.shape), weight.dtype, weight.device, torch.get_num_threads())
        if key not in self._found:
            self._found[key] = self._probe(weight)
        return self._found[key]

    def _probe(self, weight: Tensor) -> Tiles:
        generator = torch.Generator().manual_seed(_PROBE_SEED)
        rows = torch.randn(UNIT, weight.shape[1], generator=generator)
        rows = rows.to(weight.device, weight.dtype)
        transposed = weight.t()

        def agreeing() -> tuple[int, ...]:
            return tuple(tile for tile in TILES if _agrees(rows, transposed, truth, tile))

        with _one_thread():
            truth = torch.mm(rows, transposed)
        found = Tiles(agreeing())
        if UNIT not in found.rows:
            with _one_thread():
                found = Tiles(agreeing(), one_thread=True)
        if UNIT not in found.rows:
            raise BackendError(
                f"Exact mode is not possible here: {weight.dtype} products of shape "
                f"{list(weight.shape)} depend on a row's place. "
                "Start with other weights, or without exact mode."
            )
        return found


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _agrees(rows: Tensor, transposed: Tensor, truth: Tensor, tile: int) -> bool:
    """Whether products of ``tile`` rows give each row its true bits at every place modulo 8."""
    copies = range(max(tile // UNIT, UNIT))
    order = torch.cat([torch.arange(UNIT).flip(0).roll(copy) for copy in copies])
    return all(
        torch.equal(torch.mm(rows[chosen], transposed), truth[chosen])
        for chosen in torch.split(order, tile)
    )
