"""From logits to tokens, each row by itself.

Every row is drawn from its own logits, its own parameters and its own counter-based random number,
by operations on that row alone: what else is in the batch cannot show in the result. Greedy rows,
the common case, cost one pass over the batch and nothing per row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from turnstile.engine.constraints import Job, Logits
from turnstile.engine.protocol import NOTHING_ALLOWED as NOTHING_ALLOWED
from turnstile.engine.protocol import TokenLogprobs
from turnstile.engine.randomness import uniform
from turnstile.kernels.base import Backend
from turnstile.text.errors import TextError

BAD_LOGITS = "The model's output for this request is not a number."
BLOCK = 256
"""Tokens summed up at once when a draw looks for its place."""


class Draw(NamedTuple):
    """One draw to make: from row ``row`` of the logits, for ``job``."""

    job: Job
    row: int
    sample: int
    position: int


class Drawn(NamedTuple):
    """A token, or why there is none; its log-probability where it was asked for."""

    token: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


class Likeliest(NamedTuple):
    """For each row of the logits its likeliest token, and whether that is a number at all."""

    tokens: list[int]
    sound: list[bool]


class Sampler:
    """Draws tokens with a backend's row-wise helpers."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._scratch = np.empty(0, dtype=np.float32)

    def likeliest(self, logits: Logits) -> Likeliest:
        """Look at all rows of ``logits`` ``[R, vocab]`` (float32) in one pass."""
        if not len(logits):
            return Likeliest([], [])
        ids = self._backend.argmax(logits)
        values = logits[np.arange(len(ids)), ids]
        return Likeliest(ids.tolist(), np.isfinite(values).tolist())

    def draw(self, logits: Logits, likeliest: Likeliest, draws: Seq[Draw]) -> list[Drawn]:
        """Draw from ``logits`` ``[R, vocab]`` (float32, left as it is), whose :meth:`likeliest`
        tokens are known.
        """
        if not draws:
            return []
        tokens: list[int] = []
        errors: dict[int, str] = {}
        for i, draw in enumerate(draws):
            token = likeliest.tokens[draw.row]
            if not likeliest.sound[draw.row]:
                errors[i] = BAD_LOGITS
            elif draw.job.constrained or not draw.job.params.greedy:
                try:
                    token = self._draw_one(logits[draw.row], draw)
                except TextError as error:
                    errors[i] = str(error)
                if token < 0:
                    errors[i] = NOTHING_ALLOWED
            tokens.append(token)
        return self._with_logprobs(logits, draws, tokens, errors)

    def score(self, logits: Logits, targets: Seq[int], top: int) -> list[TokenLogprobs]:
        """Log-probabilities of ``targets``, one for each row of ``logits``, and of ``top`` more."""
        if not len(targets):
            return []
        normalizer = self._backend.log_normalizer(logits)
        chosen = logits[np.arange(len(targets)), targets] - normalizer
        if not top:
            return [TokenLogprobs(value) for value in chosen.tolist()]
        values, ids = self._backend.top_k(logits, top)
        values = values - normalizer[:, None]
        return [
            TokenLogprobs(value, list(zip(token_ids, logprobs, strict=True)))
            for value, token_ids, logprobs in zip(
                chosen.tolist(), ids.tolist(), values.tolist(), strict=True
            )
        ]

    def _with_logprobs(
        self, logits: Logits, draws: Seq[Draw], tokens: list[int], errors: dict[int, str]
    ) -> list[Drawn]:
        wanted: dict[int, list[int]] = {}
        for i, draw in enumerate(draws):
            if draw.job.params.logprobs is not None and i not in errors:
                wanted.setdefault(draw.job.params.logprobs, []).append(i)
        logprobs: dict[int, TokenLogprobs] = {}
        for top, group in wanted.items():
            rows = logits[[draws[i].row for i in group]]
            scored = self.score(rows, [tokens[i] for i in group], top)
            logprobs.update(zip(group, scored, strict=True))
        return [Drawn(token, logprobs.get(i), errors.get(i)) for i, token in enumerate(tokens)]

    def _draw_one(self, row: Logits, draw: Draw) -> int:
        """Draw from one row; -1 where nothing is allowed."""
        job = draw.job
        if job.constrained:
            row = row.copy()
            job.constrain(row)
        params = job.params
        if params.greedy:
            token = int(row.argmax())
            return token if np.isfinite(row[token]) else -1
        largest = row.max()
        if not np.isfinite(largest):
            return -1
        ids: npt.NDArray[np.int64] | None = None
        if 0 < params.top_k < len(row):
            top, top_ids = self._backend.top_k(row[None], params.top_k)
            row, ids = top[0], top_ids[0]
        weights = self._weights(row, largest, params.temperature)
        if params.top_p < 1.0 or params.min_p > 0.0:
            weights, ids = _filter(weights, ids, params.top_p, params.min_p)
        index = _pick(weights, uniform(job.seed, draw.sample, draw.position))
        return index if ids is None else int(ids[index])

    def _weights(self, row: Logits, largest: np.float32, temperature: float) -> Logits:
        """``exp((row - largest) / temperature)``, in memory that the next call overwrites."""
        if len(self._scratch) < len(row):
            self._scratch = np.empty(len(row), dtype=np.float32)
        weights = self._scratch[: len(row)]
        # The largest is subtracted before scaling: a tiny temperature cannot overflow.
        np.subtract(row, largest, out=weights)
        np.divide(weights, np.float32(temperature), out=weights)
        return np.exp(weights, out=weights)


def _filter(
    weights: Logits, ids: npt.NDArray[np.int64] | None, top_p: float, min_p: float
) -> tuple[Logits, npt.NDArray[np.int64]]:
    """What top-p, then min-p leave of ``weights``, descending, and the ids.

    ``ids`` are those of weights that are descending already, None for weights by token id. There
    only the tokens that can be in the nucleus are sorted: all below ``(1 - top_p) · total /
    vocabulary`` together do not make up ``1 - top_p`` of the total.
    """
    total = float(weights.sum(dtype=np.float32))
    if ids is None:
        # Rounding must not drop what belongs: hence half the bound.
        least = max((1.0 - top_p) * total / len(weights) / 2, min_p * float(weights.max()) / 2)
        ids = np.flatnonzero(weights >= np.float32(least))
        # Bits of positive floats sort as they do; equal weights are in the order of their ids.
        keys = (weights[ids].view(np.uint32) ^ np.uint32(0xFFFFFFFF)).astype(np.uint64)
        keys = np.sort((keys << np.uint64(32)) | ids.astype(np.uint64))
        ids = (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)
        weights = weights[ids]
    kept = _keep(weights, total, top_p, min_p)
    return weights[:kept], ids[:kept]


def _keep(weights: Logits, total: float, top_p: float, min_p: float) -> int:
    """How many of the descending ``weights`` survive: the fewest that reach ``top_p`` of
    ``total``, and of those the ones of at least ``min_p`` times the largest. At least one.
    """
    before = np.cumsum(weights, dtype=np.float64) - weights
    keep = before < top_p * total
    keep &= weights >= min_p * weights[0]
    return max(1, int(np.count_nonzero(keep)))


def _pick(weights: Logits, u: float) -> int:
    """Invert the cumulative distribution at ``u``; never an index of weight zero.

    In two levels, blocks first: a sum of blocks costs a tenth of a cumulative sum of everything.
    """
    whole = len(weights) // BLOCK * BLOCK
    sums = weights[:whole].reshape(-1, BLOCK).sum(axis=1)
    bounds = np.cumsum(np.append(sums, weights[whole:].sum()), dtype=np.float64)
    # Below the total even where the product rounds up to it.
    target = min(u * bounds[-1], math.nextafter(bounds[-1], 0.0))
    block = int(np.searchsorted(bounds[:-1], target, side="right"))
    start = block * BLOCK
    inside = weights[start : min(start + BLOCK, len(weights))]
    before = bounds[block - 1] if block else 0.0
    index = int(np.searchsorted(np.cumsum(inside, dtype=np.float64), target - before, side="right"))
    # The two sums of a block may differ by a rounding: then it is the block's last.
    return start + min(index, int(np.flatnonzero(inside)[-1]))
