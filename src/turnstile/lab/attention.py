"""Attention over pages in three forms: one to read, one to define, one to serve with.

A sequence's K and V lie in pages that are anywhere; its page table says where. For a query at
position t all three compute, over the positions p up to t::

    page, place = table[p // page_size], p % page_size
    out = Σ softmax(q · k[page, head, place]) · v[page, head, place]

The layer around it is as plain as can be (norms of weight one, no rotation, no MLP), so that the
fast kernels, which run whole layers only, can be compared with the other two.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from turnstile.kernels import BackendError, create_backend
from turnstile.kernels.base import (
    AttentionShape,
    Backend,
    FlatBatch,
    FloatArray,
    HeadWeights,
    KvShape,
    LayerWeights,
)
from turnstile.kernels.paged_attention import LayerPages, attend, plan_attention

EPS = 1e-6
PAGE_SIZE = 16
REPEATS = 5
"""The quicker forms are timed so often, and the best counts."""


def attend_by_loop(
    q: Tensor, pages: LayerPages, tables: list[list[int]], lengths: list[int], scale: float
) -> Tensor:
    """One query a sequence, ``q[sequences, heads, head_dim]``, token by token: for reading."""
    heads, kv_heads = q.shape[1], pages.k.shape[1]
    page_size = pages.k.shape[2]
    out = torch.zeros_like(q)
    for sequence, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        for head in range(heads):
            kv_head = head * kv_heads // heads
            scores = []
            for position in range(length):
                page, place = table[position // page_size], position % page_size
                k = pages.k[page, kv_head, place]
                scores.append(scale * float(q[sequence, head] @ k))
            largest = max(scores)
            weights = [math.exp(score - largest) for score in scores]
            total = sum(weights)
            for position, weight in enumerate(weights):
                page, place = table[position // page_size], position % page_size
                out[sequence, head] += weight / total * pages.v[page, kv_head, place]
    return out


@dataclass(frozen=True, slots=True)
class Problem:
    """Sequences that each draw one token: their tokens, and pages for them in random order."""

    lengths: list[int]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    seed: int = 0

    @property
    def shape(self) -> AttentionShape:
        """The numbers attention needs."""
        return AttentionShape(self.heads, self.kv_heads, self.head_dim, self.head_dim**-0.5)

    @property
    def num_pages(self) -> int:
        """Pages of the pool: just enough."""
        return sum(-(-length // PAGE_SIZE) for length in self.lengths)

    @property
    def width(self) -> int:
        """Hidden size: heads side by side, so that the output needs no projection."""
        return self.heads * self.head_dim

    def tables(self, *, shuffled: bool = True) -> list[list[int]]:
        """Each sequence's pages."""
        order = np.arange(self.num_pages)
        if shuffled:
            order = np.random.default_rng(self.seed).permutation(order)
        free = order.tolist()
        tables = []
        for length in self.lengths:
            count = -(-length // PAGE_SIZE)
            tables.append(free[:count])
            free = free[count:]
        return tables

    def batch(self, tables: list[list[int]], *, last_only: bool) -> FlatBatch:
        """A step that computes all tokens, or everybody's last one."""
        counts = [1 if last_only else length for length in self.lengths]
        wide = np.zeros((len(tables), max(map(len, tables))), np.int32)
        for row, table in enumerate(tables):
            wide[row, : len(table)] = table
        starts = np.concatenate(([0], np.cumsum(self.lengths)[:-1]))
        ids = [
            np.arange(start + length - count, start + length)
            for start, length, count in zip(starts, self.lengths, counts, strict=True)
        ]
        positions = [
            np.arange(length - count, length)
            for length, count in zip(self.lengths, counts, strict=True)
        ]
        offsets = np.concatenate(([0], np.cumsum(counts)))
        rows = np.arange(len(counts))
        return FlatBatch(
            page_size=PAGE_SIZE,
            ids=_int32(np.concatenate(ids)),
            positions=_int32(np.concatenate(positions)),
            sequence_of=_int32(np.repeat(rows, counts)),
            page_tables=wide,
            query_offsets=_int32(offsets),
            context_lengths=_int32(np.asarray(self.lengths)),
            logit_rows=_int32(offsets[1:] - 1),
        )

    def weights(self) -> tuple[FloatArray, LayerWeights, HeadWeights]:
        """An embedding of one row a token of the problem, the layer and the head."""
        random = torch.Generator().manual_seed(self.seed)
        kv, width = self.kv_heads * self.head_dim, self.width

        def matrix(outputs: int) -> FloatArray:
            values: FloatArray = torch.randn(outputs, width, generator=random).numpy()
            return values * np.float32(width**-0.5)

        one, identity = np.ones(width, np.float32), np.eye(width, dtype=np.float32)
        nothing = np.zeros((width, width), np.float32)
        embedding: FloatArray = torch.randn(sum(self.lengths), width, generator=random).numpy()
        layer = LayerWeights(
            attention=self.shape,
            input_norm=one,
            q=2 * matrix(width),
            k=2 * matrix(kv),
            v=matrix(kv),
            o=identity,
            post_attention_norm=one,
            gate=nothing,
            up=nothing,
            down=nothing,
            norm_eps=EPS,
        )
        return embedding, layer, HeadWeights(one, identity, EPS)


@dataclass(frozen=True, slots=True)
class Result:
    """The hidden state after the layer, normed, ``[sequences, width]``; seconds of attention."""

    rows: Tensor
    seconds: float


def by_loop(problem: Problem) -> Result:
    """The first form: plain Python over tokens."""
    hidden, q, pages, tables = _by_hand(problem)
    began = time.perf_counter()
    out = attend_by_loop(q, pages, tables, problem.lengths, problem.shape.scale)
    seconds = time.perf_counter() - began
    return Result(_normed(hidden + out.flatten(1)), seconds)


def by_reference(problem: Problem) -> Result:
    """The second form: plain torch, all rows at once, in blocks of whole pages."""
    hidden, q, pages, tables = _by_hand(problem)
    plan = plan_attention(
        problem.batch(tables, last_only=True), problem.shape, problem.num_pages, q.device
    )
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        out = attend(q, pages, plan, problem.shape)
        times.append(time.perf_counter() - began)
    return Result(_normed(hidden + out.flatten(1)), min(times))


def by_native(problem: Problem, *, shuffled: bool = True) -> Result | None:
    """The third form: the kernels that serve; None where they are not built."""
    try:
        backend = create_backend("cpu", "float32", None, True, 1, name="native")
    except BackendError:
        return None
    tables = problem.tables(shuffled=shuffled)
    embedding, layer, head = problem.weights()
    table = backend.prepare_embedding(embedding)
    prepared = backend.prepare_layer(layer, np.zeros(problem.head_dim // 2, np.float32), 1.0)
    last = backend.prepare_head(head)
    kv = backend.allocate_kv(
        KvShape(1, problem.kv_heads, problem.head_dim, PAGE_SIZE, problem.num_pages)
    )

    def step(batch: FlatBatch) -> Tensor:
        workspace = backend.begin(batch)
        backend.embed(table, workspace)
        backend.attention_input(prepared, workspace, kv, 0)
        backend.attend(prepared, workspace, kv, 0)
        backend.attention_output(prepared, workspace)
        return torch.from_numpy(backend.head(last, workspace).copy())

    step(problem.batch(tables, last_only=False))
    last_tokens = problem.batch(tables, last_only=True)
    times = []
    for _ in range(REPEATS):
        before = _attention_seconds(backend)
        rows = step(last_tokens)
        times.append(_attention_seconds(backend) - before)
    return Result(rows, min(times))


def _by_hand(problem: Problem) -> tuple[Tensor, Tensor, LayerPages, list[list[int]]]:
    """The last tokens' hidden states and queries, and K and V of all tokens in their pages."""
    rows, layer, _ = problem.weights()
    tables = problem.tables()
    embedding = torch.from_numpy(rows)
    normed = _normed(embedding)
    q, k, v = (normed @ torch.from_numpy(each).T for each in (layer.q, layer.k, layer.v))
    size = (problem.num_pages + 1, problem.kv_heads, PAGE_SIZE, problem.head_dim)
    pages = LayerPages(torch.zeros(size), torch.zeros(size))
    start = 0
    for table, length in zip(tables, problem.lengths, strict=True):
        for position in range(length):
            page, place = table[position // PAGE_SIZE], position % PAGE_SIZE
            pages.k[page, :, place] = k[start + position].view(problem.kv_heads, -1)
            pages.v[page, :, place] = v[start + position].view(problem.kv_heads, -1)
        start += length
    last = torch.tensor(problem.lengths).cumsum(0) - 1
    q = q[last].view(len(last), problem.heads, problem.head_dim)
    return embedding[last], q, pages, tables


def _normed(rows: Tensor) -> Tensor:
    result: Tensor = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + EPS)
    return result


def _attention_seconds(backend: Backend) -> float:
    from turnstile.kernels.native import NativeBackend

    assert isinstance(backend, NativeBackend)
    return backend.laps()["attention"]


def _int32(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    return values.astype(np.int32)
