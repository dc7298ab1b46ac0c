"""What a weight format and a KV format cost in quality: perplexity and greedy agreement.

    PYTHONPATH=src python scripts/measure_quality.py [--model NAME] [--windows 60]

Windows of 512 tokens of the benchmark's prose, each computed as one prompt chunk through the
native backend, every token scored after the first. The first line is what the others are held
against. Agreement is the share of positions whose most probable next token is the same.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import Tensor

from turnstile.bench.corpus import prose_words
from turnstile.kernels.base import FlatBatch
from turnstile.kernels.native import NativeBackend
from turnstile.models import default_model
from turnstile.models.decoder import Decoder
from turnstile.models.source import resolve
from turnstile.text.tokenizer import Tokenizer

WINDOW, PAGE = 512, 16
FORMATS = (
    ("float32", "float32"),
    ("float32", "int8"),
    ("bfloat16", "bfloat16"),
    ("int8", "bfloat16"),
    ("int8", "int8"),
)


def window_batch(ids: np.ndarray) -> FlatBatch:
    """One sequence, all of it new, a logit row for every token."""
    places = np.arange(WINDOW, dtype=np.int32)
    return FlatBatch(
        PAGE,
        ids.astype(np.int32),
        places,
        np.zeros(WINDOW, np.int32),
        np.arange(WINDOW // PAGE, dtype=np.int32)[None],
        np.array([0, WINDOW], np.int32),
        np.array([WINDOW], np.int32),
        places,
    )


def score(decoder: Decoder, ids: np.ndarray, windows: int) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood of every token that has one before it, and the likeliest tokens."""
    kv = decoder.backend.allocate_kv(decoder.kv_shape(PAGE, WINDOW // PAGE))
    losses, best = [], []
    for window in range(windows):
        piece = ids[window * WINDOW : (window + 1) * WINDOW]
        logits = decoder.forward(window_batch(piece), kv)
        targets = torch.from_numpy(piece[1:].astype(np.int64))
        normalizer = decoder.backend.log_normalizer(logits)[:-1]
        chosen = logits[:-1].gather(1, targets[:, None])[:, 0]
        losses.append((normalizer - chosen).double())
        best.append(decoder.backend.argmax(logits))
    return torch.cat(losses), torch.cat(best)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=default_model.NAME)
    parser.add_argument("--windows", type=int, default=60)
    options = parser.parse_args()
    source = resolve(options.model)
    words = prose_words()[: options.windows * WINDOW]
    ids = np.array(Tokenizer.from_path(source.path).encode(" ".join(words)))
    first: tuple[Tensor, Tensor] | None = None
    for weights, cache in FORMATS:
        decoder = Decoder.load(source, NativeBackend(weights, cache))
        losses, best = score(decoder, ids, options.windows)
        first = first or (losses, best)
        difference = losses - first[0]
        ratio = difference.mean().exp() - 1
        error = difference.std() / len(difference) ** 0.5
        same = (best == first[1]).double().mean()
        print(
            f"{weights:8} weights, {cache:8} K and V: perplexity {losses.mean().exp():.3f} "
            f"({ratio:+.2%} ± {error:.2%}), same greedy token {same:.2%} of {len(best):,}",
            flush=True,
        )


if __name__ == "__main__":
    main()
