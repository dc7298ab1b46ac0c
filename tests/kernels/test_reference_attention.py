"""Paged attention of the reference equals attention written down plainly."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from budget import examples
from turnstile.kernels import paged_attention
from turnstile.kernels.base import AttentionShape, FlatBatch
from turnstile.kernels.paged_attention import LayerPages, attend, plan_attention


def scattered(
    lengths: list[tuple[int, int]], shape: AttentionShape, page_size: int, seed: int
) -> tuple[FlatBatch, LayerPages, list[torch.Tensor], list[torch.Tensor]]:
    """Random K and V of sequences of ``(earlier, new)`` tokens, scattered over pages."""
    random = torch.Generator().manual_seed(seed)
    needed = [-(-(a + b) // page_size) for a, b in lengths]
    num_pages = sum(needed) + 3
    order = torch.randperm(num_pages, generator=random).tolist()
    size = (num_pages + 1, shape.num_kv_heads, page_size, shape.head_dim)
    pages = LayerPages(torch.randn(size, generator=random), torch.randn(size, generator=random))
    pages.k[-1] = pages.v[-1] = 0
    tables = np.full((len(lengths), max(needed) + 2), -7, np.int32)
    keys, values = [], []
    for row, (earlier, new) in enumerate(lengths):
        own = [order.pop() for _ in range(needed[row])]
        tables[row, : len(own)] = own
        for stored, seen in ((pages.k, keys), (pages.v, values)):
            seen.append(stored[own].transpose(1, 2).flatten(0, 1)[: earlier + new])
    new_tokens = [new for _, new in lengths]
    offsets = np.concatenate([[0], np.cumsum(new_tokens)]).astype(np.int32)
    positions = np.concatenate([np.arange(a, a + b) for a, b in lengths]).astype(np.int32)
    batch = FlatBatch(
        page_size,
        np.zeros(len(positions), np.int32),
        positions,
        np.repeat(np.arange(len(lengths)), new_tokens).astype(np.int32),
        tables,
        offsets,
        np.asarray([a + b for a, b in lengths], np.int32),
        np.zeros(0, np.int32),
    )
    return batch, pages, keys, values


def plainly(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, shape: AttentionShape
) -> torch.Tensor:
    """One sequence's attention as the formula says, in float64."""
    shared = shape.num_heads // shape.num_kv_heads
    k, v = (each.double().repeat_interleave(shared, dim=1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * shape.scale
    query = torch.arange(first, first + len(q))[:, None]
    key = torch.arange(len(k))[None, :]
    hidden = key > query
    if shape.sliding_window is not None:
        hidden |= key <= query - shape.sliding_window
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).float()


@given(
    lengths=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), min_size=1, max_size=5),
    heads=st.sampled_from([(4, 4, 8), (6, 2, 16), (5, 1, 12)]),
    page_size=st.sampled_from([1, 4, 16, 24, 256]),
    window=st.sampled_from([None, 1, 5, 130, 1000]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=examples(60))
def test_attention_over_pages_is_attention(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int, int],
    page_size: int,
    window: int | None,
    seed: int,
) -> None:
    shape = AttentionShape(*heads, scale=heads[2] ** -0.5, sliding_window=window)
    batch, pages, keys, values = scattered(lengths, shape, page_size, seed)
    q = torch.randn(batch.num_tokens, shape.num_heads, shape.head_dim)
    plan = plan_attention(batch, shape, len(pages.k) - 1, torch.device("cpu"))
    ours = attend(q, pages, plan, shape)
    for row, (earlier, _) in enumerate(lengths):
        mine = slice(batch.query_offsets[row], batch.query_offsets[row + 1])
        expected = plainly(q[mine], keys[row], values[row], earlier, shape)
        torch.testing.assert_close(ours[mine], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 50])
def test_long_chunks_are_worked_off_in_groups_of_bounded_size(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = AttentionShape(4, 2, 8, 0.3, window)
    batch, pages, _, _ = scattered([(100, 200), (0, 31), (257, 1)], shape, 16, seed=1)
    q = torch.randn(batch.num_tokens, 4, 8)

    def result() -> tuple[torch.Tensor, int, int]:
        plan = plan_attention(batch, shape, len(pages.k) - 1, torch.device("cpu"))
        rows = max(each.rows.numel() for group in plan.groups for each in group.rounds)
        return attend(q, pages, plan, shape), len(plan.groups), rows * pages.k[0, 0].numel()

    whole, groups, _ = result()
    assert groups == 1
    monkeypatch.setattr(paged_attention, "GROUP_ELEMENTS", 10_000)
    cut, groups, gathered = result()
    assert groups > 10
    assert gathered <= 10_000
    assert torch.equal(whole, cut)


def test_a_window_skips_the_blocks_before_it() -> None:
    def gathered(window: int | None) -> int:
        shape = AttentionShape(2, 2, 8, 0.3, window)
        batch, pages, _, _ = scattered([(2000, 1)], shape, 16, seed=1)
        plan = plan_attention(batch, shape, len(pages.k) - 1, torch.device("cpu"))
        return sum(each.rows.numel() for group in plan.groups for each in group.rounds)

    assert gathered(100) * 7 < gathered(None)
