"""Attention over pages in plain torch: for all rows at once, in blocks of whole pages, in order.

Rows are laid out in *tiles* of :data:`TILE` consecutive positions of one sequence. A row's place
in its tile is ``position % TILE``, so that it is the same row of the same small product whether
it came in a chunk of a prompt or alone; keys come in *blocks* of whole pages that begin at fixed
positions. Batches and chunks decide which tiles there are, never what a row is computed from::

    positions        0   1   2   3 | 4   5   6   7 | 8 ...
    chunk 2..5               a   a | a   a                     two tiles, places 2 3 and 0 1
    decode 6                               b                   one tile, place 2

Every tile walks over its blocks with the running maximum, sum and weighted values of an online
softmax (Milakov and Gimelshein, arXiv:1805.02867). Tiles are sorted by their number of blocks:
those still walking are a prefix, and those done are not touched again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from turnstile.kernels.base import AttentionShape, FlatBatch
from turnstile.kernels.row_math import row_sum

TILE = 4
BLOCK_TOKENS = 128
GROUP_ELEMENTS = 1 << 22
"""Upper bound of the K elements gathered at a time (16 MiB in float32)."""

Int64Array = npt.NDArray[np.int64]


@dataclass(slots=True)
class LayerPages:
    """One layer's K and V: ``[pages + 1, kv_heads, page_size, head_dim]``, the last page zero."""

    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True)
class _Round:
    """One block of the first ``tiles`` tiles of a group: rows of K and V seen as
    ``[(pages + 1) · kv_heads, page_size · head_dim]``, and which scores are hidden.
    """

    tiles: int
    rows: Tensor
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class _Group:
    """Tiles ``first`` to ``end`` of the plan, few enough to be gathered together."""

    first: int
    end: int
    rounds: list[_Round]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What one step's attention needs, the same for every layer of one shape.

    ``places[T]`` is where each token's row stands among ``num_tiles · TILE`` rows.
    """

    places: Tensor
    num_tiles: int
    groups: list[_Group]


@dataclass(frozen=True, slots=True)
class _Tiles:
    """The tiles of a batch, those with most blocks first: arrays ``[tiles]``."""

    sequence: Int64Array
    base: Int64Array  # the position of place 0
    last: Int64Array  # the last position present
    first_block: Int64Array
    num_blocks: Int64Array


def plan_attention(
    batch: FlatBatch, shape: AttentionShape, zero_page: int, device: torch.device
) -> AttentionPlan:
    """Lay out a batch for :func:`attend`. ``zero_page`` is the id of the page of zeros."""
    block_pages = max(1, BLOCK_TOKENS // batch.page_size)
    tiles, places = _tiles_of(batch, block_pages * batch.page_size, shape.sliding_window)
    elements = shape.num_kv_heads * block_pages * batch.page_size * shape.head_dim
    at_once = max(1, GROUP_ELEMENTS // elements)
    groups = []
    for first in range(0, len(tiles.base), at_once):
        end = min(first + at_once, len(tiles.base))
        rounds = []
        for index in range(int(tiles.num_blocks[first])):
            walking = int(np.searchsorted(-tiles.num_blocks[first:end], -index))
            chosen = slice(first, first + walking)
            rounds.append(
                _round(batch, tiles, chosen, index, block_pages, shape, zero_page, device)
            )
        groups.append(_Group(first, end, rounds))
    return AttentionPlan(torch.from_numpy(places).to(device), len(tiles.base), groups)


def _tiles_of(batch: FlatBatch, block_tokens: int, window: int | None) -> tuple[_Tiles, Int64Array]:
    positions = batch.positions.astype(np.int64)
    sequence = batch.sequence_of.astype(np.int64)
    begins = positions % TILE == 0
    begins[batch.query_offsets[:-1]] = True
    of_token = np.cumsum(begins) - 1
    starts = np.flatnonzero(begins)
    ends = np.append(starts[1:], len(positions)) - 1
    last = positions[ends]
    first_block = np.zeros(len(starts), np.int64)
    if window is not None:
        first_block = np.maximum(positions[starts] - window + 1, 0) // block_tokens
    num_blocks = last // block_tokens + 1 - first_block
    order = np.argsort(-num_blocks, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    base = positions[starts] // TILE * TILE
    tiles = _Tiles(
        sequence[starts][order], base[order], last[order], first_block[order], num_blocks[order]
    )
    return tiles, rank[of_token] * TILE + positions % TILE


def _round(
    batch: FlatBatch,
    tiles: _Tiles,
    chosen: slice,
    index: int,
    block_pages: int,
    shape: AttentionShape,
    zero_page: int,
    device: torch.device,
) -> _Round:
    """Block ``index`` of the ``chosen`` tiles, counted from each tile's own first block."""
    first_page = (tiles.first_block[chosen] + index) * block_pages
    pages = first_page[:, None] + np.arange(block_pages)
    within = np.minimum(pages, batch.page_tables.shape[1] - 1)
    ids = batch.page_tables[tiles.sequence[chosen][:, None], within].astype(np.int64)
    # Past the last page the table holds anything; zeros keep 0 · value from being NaN.
    ids[pages * batch.page_size > tiles.last[chosen][:, None]] = zero_page
    heads = np.arange(shape.num_kv_heads)
    rows = ids[:, None, :] * shape.num_kv_heads + heads[:, None]
    keys = first_page[:, None] * batch.page_size + np.arange(block_pages * batch.page_size)
    queries = tiles.base[chosen][:, None] + np.arange(TILE)
    hidden = keys[:, None, :] > queries[:, :, None]
    if shape.sliding_window is not None:
        hidden |= keys[:, None, :] <= queries[:, :, None] - shape.sliding_window
    return _Round(
        len(ids),
        torch.from_numpy(rows.reshape(-1)).to(device),
        torch.from_numpy(hidden[:, None, :, None, :]).to(device),
    )


def attend(q: Tensor, pages: LayerPages, plan: AttentionPlan, shape: AttentionShape) -> Tensor:
    """Causal attention of ``q[T, heads, head_dim]`` over K and V in ``pages``: the same shape."""
    kv_heads, head_dim = shape.num_kv_heads, shape.head_dim
    shared = shape.num_heads // kv_heads  # query heads to a KV head
    rows = q.new_zeros(plan.num_tiles * TILE, shape.num_heads, head_dim)
    rows[plan.places] = q * shape.scale
    tiles = rows.view(plan.num_tiles, TILE, kv_heads, shared, head_dim).transpose(1, 2)
    tiles = tiles.reshape(plan.num_tiles, kv_heads, TILE * shared, head_dim)
    attended = torch.empty_like(tiles)
    for group in plan.groups:
        attended[group.first : group.end] = _attend_group(
            tiles[group.first : group.end], pages, group.rounds
        )
    attended = attended.view(plan.num_tiles, kv_heads, TILE, shared, head_dim).transpose(1, 2)
    return attended.reshape(rows.shape)[plan.places]


def _attend_group(q: Tensor, pages: LayerPages, rounds: list[_Round]) -> Tensor:
    """Online softmax over the blocks of ``q[tiles, kv_heads, rows, head_dim]``."""
    _, kv_heads, num_rows, head_dim = q.shape
    # The lowest finite number: a block hidden as a whole then changes nothing, without NaN.
    maximum = q.new_full(q.shape[:3], torch.finfo(q.dtype).min)
    total = q.new_zeros(q.shape[:3])
    weighted = torch.zeros_like(q)
    k_rows = pages.k.flatten(0, 1).flatten(1)
    v_rows = pages.v.flatten(0, 1).flatten(1)
    for each in rounds:
        n = each.tiles
        k = k_rows.index_select(0, each.rows).to(q.dtype).view(n * kv_heads, -1, head_dim)
        v = v_rows.index_select(0, each.rows).to(q.dtype).view(n * kv_heads, -1, head_dim)
        scores = torch.bmm(q[:n].flatten(0, 1), k.transpose(1, 2))
        by_query = scores.view(n, kv_heads, TILE, num_rows // TILE, -1)
        by_query.masked_fill_(each.hidden, -torch.inf)
        scores = scores.view(n, kv_heads, num_rows, -1)
        peak = torch.maximum(maximum[:n], scores.amax(-1))
        weights = scores.sub_(peak.unsqueeze(-1)).exp_()
        kept = (maximum[:n] - peak).exp_()
        product = torch.bmm(weights.flatten(0, 1), v).view(n, kv_heads, num_rows, head_dim)
        weighted[:n].mul_(kept.unsqueeze(-1)).add_(product)
        total[:n].mul_(kept).add_(row_sum(weights))
        maximum[:n] = peak
    return weighted / total.unsqueeze(-1)
