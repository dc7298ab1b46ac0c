"""Drives a decoder by hand, without an engine: sequences, pages and flat batches for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from turnstile.kernels.base import FlatBatch
from turnstile.models.decoder import Decoder


class Stepper:
    """Sequences by name, each with pages taken at random, so that order never helps.

    ``poison`` fills the pool with NaN first: what nobody wrote must not be read.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        page_size: int = 16,
        num_pages: int = 128,
        seed: int = 0,
        poison: bool = False,
    ) -> None:
        self.decoder = decoder
        self.page_size = page_size
        self.kv = decoder.backend.allocate_kv(decoder.kv_shape(page_size, num_pages))
        self.free = np.random.default_rng(seed).permutation(num_pages).tolist()
        self.pages: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        if poison:
            for layer in self.kv.layers:  # type: ignore[attr-defined]
                layer.k[:num_pages] = torch.nan
                layer.v[:num_pages] = torch.nan

    def batch(self, chunks: Mapping[str, Sequence[int]], every: bool) -> FlatBatch:
        """A step that computes ``chunks`` after what each sequence has; takes the pages."""
        ids: list[int] = []
        positions: list[int] = []
        owners: list[int] = []
        offsets, contexts = [0], []
        for row, (name, chunk) in enumerate(chunks.items()):
            start = self.lengths.get(name, 0)
            end = start + len(chunk)
            table = self.pages.setdefault(name, [])
            while len(table) * self.page_size < end:
                table.append(self.free.pop())
            ids += chunk
            positions += range(start, end)
            owners += [row] * len(chunk)
            offsets.append(len(ids))
            contexts.append(end)
            self.lengths[name] = end
        width = max(len(self.pages[name]) for name in chunks) + 1
        tables = np.full((len(chunks), width), 2**30, np.int32)  # invalid where nothing belongs
        for row, name in enumerate(chunks):
            tables[row, : len(self.pages[name])] = self.pages[name]
        rows = range(len(ids)) if every else [end - 1 for end in offsets[1:]]
        return FlatBatch(
            self.page_size,
            *(np.asarray(each, np.int32) for each in (ids, positions, owners)),
            tables,
            *(np.asarray(each, np.int32) for each in (offsets, contexts, list(rows))),
        )

    def step(self, chunks: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
        """Logits ``[tokens, vocab]`` of every token of every chunk."""
        logits = self.decoder.forward(self.batch(chunks, every=True), self.kv).copy()
        parts = torch.from_numpy(logits).split([len(chunk) for chunk in chunks.values()])
        return dict(zip(chunks, parts, strict=True))

    def run(self, name: str, ids: Sequence[int], chunk: int = 1 << 30) -> Tensor:
        """Logits of one sequence computed alone, ``chunk`` tokens a step."""
        parts = [self.step({name: ids[i : i + chunk]})[name] for i in range(0, len(ids), chunk)]
        return torch.cat(parts)

    def leave(self, name: str) -> None:
        """Forget a sequence; its pages are the next to be taken, with what they hold."""
        self.free += self.pages.pop(name)
        del self.lengths[name]
