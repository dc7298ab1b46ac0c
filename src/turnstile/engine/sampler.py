"""From logits to tokens, each row by itself.

Every row is drawn from its own logits, its own parameters and its own counter-based random number,
by operations on that row alone: what else is in the batch cannot show in the result. Greedy rows,
the common case, cost one pass over the batch and nothing per row.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from turnstile.engine.constraints import Job, Logits
from turnstile.engine.protocol import TokenLogprobs
from turnstile.engine.randomness import uniform
from turnstile.kernels.base import Backend
from turnstile.text.errors import TextError

BAD_LOGITS = "The model's output for this request is not a number."
NOTHING_ALLOWED = "No token is allowed here: the request's constraints contradict each other."
HEAD = 256
"""Most likely tokens looked at before a row is sorted whole (top-p and min-p rarely need more)."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One draw to make: from row ``row`` of the logits, for ``job``."""

    job: Job
    row: int
    sample: int
    position: int


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token, or why there is none; its log-probability where it was asked for."""

    token: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


class Sampler:
    """Draws tokens with a backend's row-wise helpers."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def draw(self, logits: Tensor, draws: Seq[Draw]) -> list[Drawn]:
        """Draw from ``logits`` ``[R, vocab]`` (float32, left as it is)."""
        if not draws:
            return []
        rows = logits.cpu().numpy() if logits.device.type != "cpu" else logits.numpy()
        likeliest = self._backend.argmax(logits).tolist()
        tokens: list[int] = []
        errors: dict[int, str] = {}
        for i, draw in enumerate(draws):
            token = likeliest[draw.row]
            if not np.isfinite(rows[draw.row, token]):
                errors[i] = BAD_LOGITS
            elif draw.job.constrained or not draw.job.params.greedy:
                try:
                    token = self._draw_one(rows[draw.row], draw)
                except TextError as error:
                    errors[i] = str(error)
                if token < 0:
                    errors[i] = NOTHING_ALLOWED
            tokens.append(token)
        return self._with_logprobs(logits, draws, tokens, errors)

    def score(self, logits: Tensor, targets: Seq[int], top: int) -> list[TokenLogprobs]:
        """Log-probabilities of ``targets``, one for each row of ``logits``, and of ``top`` more."""
        if not len(targets):
            return []
        index = torch.arange(len(targets))
        normalizer = self._backend.log_normalizer(logits).cpu()
        chosen = logits[index, torch.as_tensor(list(targets))].cpu() - normalizer
        if not top:
            return [TokenLogprobs(value) for value in chosen.tolist()]
        values, ids = self._backend.top_k(logits, top)
        values = values.cpu() - normalizer[:, None]
        return [
            TokenLogprobs(value, list(zip(token_ids, logprobs, strict=True)))
            for value, token_ids, logprobs in zip(
                chosen.tolist(), ids.tolist(), values.tolist(), strict=True
            )
        ]

    def _with_logprobs(
        self, logits: Tensor, draws: Seq[Draw], tokens: list[int], errors: dict[int, str]
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
        u = uniform(job.seed, draw.sample, draw.position)
        largest = row.max()
        if not np.isfinite(largest):
            return -1
        # The largest is subtracted before scaling: a tiny temperature cannot overflow.
        weights = np.exp((row - largest) / np.float32(params.temperature), dtype=np.float32)
        if 0 < params.top_k < len(row) or params.top_p < 1.0 or params.min_p > 0.0:
            return self._draw_filtered(weights, job, u)
        return _pick(weights, u)

    def _draw_filtered(self, weights: Logits, job: Job, u: float) -> int:
        """Draw after top-k, then top-p, then min-p, as transformers orders them."""
        params = job.params
        top_k = params.top_k if 0 < params.top_k < len(weights) else len(weights)
        total = None if top_k <= HEAD else float(weights.sum(dtype=np.float64))
        head = min(HEAD, len(weights))
        while True:
            values, ids = self._backend.top_k(torch.from_numpy(weights)[None], min(head, top_k))
            sorted_weights, sorted_ids = values[0].numpy(), ids[0].numpy()
            if total is None or len(sorted_weights) == top_k:
                total = float(sorted_weights.sum(dtype=np.float64))
            kept = _keep(sorted_weights, total, params.top_p, params.min_p)
            if kept < len(sorted_weights) or len(sorted_weights) == top_k:
                return int(sorted_ids[_pick(sorted_weights[:kept], u)])
            head = len(weights)


def _keep(weights: Logits, total: float, top_p: float, min_p: float) -> int:
    """How many of the descending ``weights`` survive: the fewest that reach ``top_p`` of
    ``total``, and of those the ones of at least ``min_p`` times the largest. At least one.
    """
    before = np.cumsum(weights, dtype=np.float64) - weights
    keep = before < top_p * total
    keep &= weights >= min_p * weights[0]
    return max(1, int(np.count_nonzero(keep)))


def _pick(weights: npt.NDArray[np.float32], u: float) -> int:
    """Invert the cumulative distribution at ``u``; never an index of weight zero."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return min(index, int(np.flatnonzero(weights)[-1])) if index >= len(weights) else index
