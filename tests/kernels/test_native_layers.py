"""Random layers on the native backend against the reference: head sizes, groups of query heads,
windows, biases, norms of q and k, ragged contexts from 1 to 4,096 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from budget import examples
from turnstile.kernels import create_backend
from turnstile.kernels.base import (
    AttentionShape,
    Backend,
    FlatBatch,
    FloatArray,
    HeadWeights,
    KvShape,
    LayerWeights,
)
from turnstile.kernels.native import NativeBackend, available

if not available()[0]:
    pytest.skip(available()[1], allow_module_level=True)

import turnstile_kernels

LEVELS = turnstile_kernels.levels()
VOCAB = 97


@dataclass
class Case:
    """A one-layer model and the sequences to run through it, as ``(earlier, new)`` tokens."""

    head_dim: int = 64
    kv_heads: int = 1
    group: int = 1
    window: int | None = None
    biased: bool = False
    normed: bool = False
    hidden: int = 64
    inner: int = 80
    page_size: int = 16
    seed: int = 0
    sequences: list[tuple[int, int]] = field(default_factory=lambda: [(0, 20)])

    def layer(self) -> LayerWeights:
        random = torch.Generator().manual_seed(self.seed)
        q, kv = self.kv_heads * self.group * self.head_dim, self.kv_heads * self.head_dim

        def matrix(rows: int, columns: int) -> FloatArray:
            values = torch.randn(rows, columns, generator=random) * 1.5 / columns**0.5
            return values.numpy()

        def norm(size: int) -> FloatArray:
            return (1 + 0.2 * torch.randn(size, generator=random)).numpy()

        def bias(size: int) -> FloatArray | None:
            return torch.randn(size, generator=random).numpy() if self.biased else None

        return LayerWeights(
            AttentionShape(
                self.kv_heads * self.group,
                self.kv_heads,
                self.head_dim,
                self.head_dim**-0.5,
                self.window,
            ),
            norm(self.hidden),
            matrix(q, self.hidden),
            matrix(kv, self.hidden),
            matrix(kv, self.hidden),
            matrix(self.hidden, q),
            norm(self.hidden),
            matrix(self.inner, self.hidden),
            matrix(self.inner, self.hidden),
            matrix(self.hidden, self.inner),
            1e-5,
            bias(q),
            bias(kv),
            bias(kv),
            bias(self.hidden),
            norm(self.head_dim) if self.normed else None,
            norm(self.head_dim) if self.normed else None,
        )

    def batches(self) -> list[FlatBatch]:
        """What the sequences have already, and what is new."""
        random = np.random.default_rng(self.seed)
        needed = [-(-(a + b) // self.page_size) for a, b in self.sequences]
        order = random.permutation(sum(needed) + 2).astype(np.int32)
        tables = np.full((len(needed), max(needed) + 1), 2**30, np.int32)
        start = 0
        for row, count in enumerate(needed):
            tables[row, :count] = order[start : start + count]
            start += count
        old = [row for row, (earlier, _) in enumerate(self.sequences) if earlier]
        parts = [(0, self.sequences[row][0]) for row in old]
        batches = [self._batch(random, tables[old], parts)] if old else []
        return [*batches, self._batch(random, tables, self.sequences)]

    def _batch(
        self, random: np.random.Generator, tables: np.ndarray, parts: list[tuple[int, int]]
    ) -> FlatBatch:
        counts = [new for _, new in parts]
        total = sum(counts)
        return FlatBatch(
            self.page_size,
            random.integers(0, VOCAB, total).astype(np.int32),
            np.concatenate([np.arange(a, a + b, dtype=np.int32) for a, b in parts]),
            np.repeat(np.arange(len(parts), dtype=np.int32), counts),
            tables,
            np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
            np.array([a + b for a, b in parts], np.int32),
            np.arange(total, dtype=np.int32),
        )

    def run(self, backend: Backend) -> Tensor:
        """Logits of every new token."""
        random = torch.Generator().manual_seed(self.seed + 1)
        table = torch.randn(VOCAB, self.hidden, generator=random).numpy()
        inv_freq = 10000.0 ** (-np.arange(0, self.head_dim, 2, dtype=np.float32) / self.head_dim)
        embedding = backend.prepare_embedding(table)
        layer = backend.prepare_layer(self.layer(), inv_freq, 1.0)
        head = backend.prepare_head(HeadWeights(np.ones(self.hidden, np.float32), table, 1e-5))
        pages = sum(-(-(a + b) // self.page_size) for a, b in self.sequences) + 2
        kv = backend.allocate_kv(KvShape(1, self.kv_heads, self.head_dim, self.page_size, pages))
        if isinstance(backend, NativeBackend):
            kv.bytes()[:] = 0xFF  # type: ignore[attr-defined]
        logits = np.empty(0, np.float32)
        for batch in self.batches():
            step = backend.begin(batch)
            backend.embed(embedding, step)
            backend.attention_input(layer, step, kv, 0)
            backend.attend(layer, step, kv, 0)
            backend.attention_output(layer, step)
            backend.mlp_input(layer, step)
            backend.mlp_output(layer, step)
            logits = backend.head(head, step)
        return torch.from_numpy(logits.copy())


def error(got: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference, over that of the values; the worst row."""
    worst = (got - expected).pow(2).mean(1).sqrt().max() / expected.pow(2).mean().sqrt()
    return float(worst) if torch.isfinite(got).all() else float("inf")


TOLERANCE = {
    ("float32", "float32"): 1e-5,
    ("float32", "bfloat16"): 0.03,
    ("float32", "int8"): 0.06,
    ("bfloat16", "bfloat16"): 0.06,
    ("int8", "int8"): 0.15,
}

cases = st.builds(
    Case,
    head_dim=st.sampled_from([16, 20, 48, 64, 80, 96, 128, 256]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 8),
    window=st.sampled_from([None, None, 1, 5, 16, 33]),
    biased=st.booleans(),
    normed=st.booleans(),
    hidden=st.sampled_from([16, 40, 64, 100]),
    inner=st.sampled_from([16, 56, 96, 130]),
    page_size=st.sampled_from([16, 16, 32, 48]),
    seed=st.integers(0, 1000),
    sequences=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=6),
)


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=examples(15))
@given(case=cases, formats=st.sampled_from(list(TOLERANCE)))
def test_random_layers_equal_the_reference(
    level: str, case: Case, formats: tuple[str, str]
) -> None:
    expected = case.run(create_backend("cpu", "float32", name="reference"))
    got = case.run(NativeBackend(*formats, 1, level=level))
    assert error(got, expected) < TOLERANCE[formats]


@pytest.mark.parametrize("formats", list(TOLERANCE), ids="-".join)
@pytest.mark.parametrize("level", LEVELS)
def test_contexts_of_one_and_of_4096_tokens(level: str, formats: tuple[str, str]) -> None:
    case = Case(kv_heads=2, group=3, sequences=[(0, 1), (4095, 1), (511, 1), (512, 1), (1500, 30)])
    expected = case.run(create_backend("cpu", "float32", name="reference"))
    got = case.run(NativeBackend(*formats, 1, level=level))
    assert error(got, expected) < TOLERANCE[formats]


@pytest.mark.parametrize("formats", list(TOLERANCE), ids="-".join)
def test_more_rows_than_any_tile_and_more_threads_than_pieces(formats: tuple[str, str]) -> None:
    case = Case(sequences=[(0, 301), (3, 1), (0, 97)])
    one = case.run(NativeBackend(*formats, 1))
    assert torch.equal(case.run(NativeBackend(*formats, 7)), one)
    assert (
        error(one, case.run(create_backend("cpu", "float32", name="reference")))
        < (TOLERANCE[formats])
    )


def test_a_head_whose_scores_would_not_fit_their_integers_is_refused() -> None:
    backend = NativeBackend("int8", "int8", 1)
    assert backend.kv_page_bytes(KvShape(1, 1, 512, 16, 1))
    with pytest.raises(ValueError, match="up to 512, not 544"):
        backend.kv_page_bytes(KvShape(1, 1, 544, 16, 1))


def test_an_outlier_channel_costs_int8_little() -> None:
    """One norm weight of 60 among ones: without rotation a scale a row would leave 1 of 127 steps
    to the others.
    """
    case = Case(hidden=128, inner=128, sequences=[(0, 60)])
    weights = case.layer()
    weights.input_norm[17] = weights.post_attention_norm[17] = 60.0
    weights.q[:, 17] = weights.k[:, 17] = weights.v[:, 17] = 0.0
    weights.gate[:, 17] = weights.up[:, 17] = 0.0
    case.layer = lambda: weights  # type: ignore[method-assign]
    expected = case.run(create_backend("cpu", "float32", name="reference"))
    assert error(case.run(NativeBackend("int8", "float32", 1)), expected) < 0.25
