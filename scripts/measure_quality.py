"""What weight and KV formats cost in quality, through the engine that serves.

    PYTHONPATH=src python scripts/measure_quality.py [--model NAME] [--tokens 32768] [--window 2048]

Perplexity on a fixed text: windows of the benchmark's prose are prompts whose every token is scored
(`prompt_logprobs`), computed as any request is: in chunks, from pages, several in a step. Greedy
agreement with float32: at how many positions of that text the likeliest next token is the same, and
how long greedy continuations of prompts stay the same. Ends with 1 where int8 with int8 K and V has
a perplexity more than `--bound` above bfloat16's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from turnstile import LLM, SamplingParams
from turnstile.bench.corpus import prose_words
from turnstile.models import default_model
from turnstile.models.source import resolve
from turnstile.outputs import Logprob
from turnstile.text.tokenizer import Tokenizer

FORMATS = (
    ("float32", "float32"),
    ("float32", "int8"),
    ("bfloat16", "bfloat16"),
    ("int8", "bfloat16"),
    ("int8", "int8"),
)
"""Weights, then K and V; what comes first is what the others agree or disagree with."""
WHAT_IS_SERVED, WHAT_BOUNDS_IT = ("int8", "int8"), ("bfloat16", "bfloat16")
CONTINUATIONS, PROMPT, CONTINUATION = 64, 128, 64
"""Greedy continuations: how many, after how many tokens of prose, for how many."""


@dataclass(frozen=True, slots=True)
class Quality:
    """One pair of formats: losses in nats and likeliest tokens by position, and continuations."""

    losses: npt.NDArray[np.float64]
    likeliest: npt.NDArray[np.int64]
    continuations: npt.NDArray[np.int64]

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.losses.mean()))

    def above(self, other: Quality) -> tuple[float, float]:
        """By which share the perplexity is above another's, and the standard error of that."""
        difference = self.losses - other.losses
        return float(np.expm1(difference.mean())), float(difference.std() / len(difference) ** 0.5)

    def agreement(self, other: Quality) -> tuple[float, float]:
        """Shares of equal likeliest tokens, and of continuations up to the first other token."""
        same = self.continuations == other.continuations
        return (
            float((self.likeliest == other.likeliest).mean()),
            float(np.logical_and.accumulate(same, axis=1).mean()),
        )


def texts(tokenizer: Tokenizer, tokens: int, window: int) -> list[list[int]]:
    """The first `tokens` of the prose, in pieces of `window`.

    Raises
    ------
    ValueError
        If the prose is shorter, or there is not one piece.
    """
    # A word is a token or more: so many words are enough.
    ids = tokenizer.encode(" ".join(prose_words()[:tokens]))
    count = tokens // window if window > 0 else 0
    if not 0 < count * window <= len(ids):
        raise ValueError(f"--tokens must be at least one --window, and at most {len(ids):,}")
    return [ids[start : start + window] for start in range(0, count * window, window)]


Scores = Sequence[dict[int, Logprob] | None]


def scored(output: Scores, prompt: list[int]) -> Iterator[tuple[float, int]]:
    """Loss and likeliest token of every prompt token that has one before it."""
    for token, entry in zip(prompt[1:], output[1:], strict=True):
        assert entry is not None
        yield -entry[token].logprob, next(best for best, known in entry.items() if known.rank == 1)


def measure(llm: LLM, pieces: list[list[int]]) -> Quality:
    """Score every token of `pieces`; continue some parts of them."""
    scoring = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=1)
    outputs = llm.generate(pieces, scoring, use_tqdm=False)
    starts = [text[at : at + PROMPT] for text in pieces for at in range(0, len(text), PROMPT)]
    prompts = [start for start in starts if len(start) == PROMPT][:CONTINUATIONS]
    continuing = SamplingParams(temperature=0, max_tokens=CONTINUATION, ignore_eos=True)
    continued = llm.generate(prompts, continuing, use_tqdm=False)
    values = [
        value
        for output, text in zip(outputs, pieces, strict=True)
        for value in scored(output.prompt_logprobs or [], text)
    ]
    return Quality(
        np.array([loss for loss, _ in values]),
        np.array([token for _, token in values]),
        np.array([output.outputs[0].token_ids for output in continued]),
    )


def table(qualities: dict[tuple[str, str], Quality]) -> Iterator[str]:
    """Rows of Markdown, as they come."""
    columns = ("weights", "K and V", "perplexity", "against float32", "same likeliest next token",
               "same greedy continuation")  # fmt: skip
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    first = qualities[FORMATS[0]]
    for (weights, cache), quality in qualities.items():
        ratio, error = quality.above(first)
        likeliest, continued = quality.agreement(first)
        compared = f"{ratio:+.2%} ± {error:.2%} | {likeliest:.1%} | {continued:.1%}"
        yield (
            f"| {weights} | {cache} | {quality.perplexity:.3f} | "
            f"{compared if quality is not first else ' | | '} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=default_model.NAME)
    parser.add_argument("--tokens", type=int, default=32_768, help="of the text, in all")
    parser.add_argument("--window", type=int, default=2048, help="tokens that see each other")
    parser.add_argument("--bound", type=float, default=0.01, help="most that int8 may cost")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_path(resolve(options.model).tokenizer_path)
    try:
        pieces = texts(tokenizer, options.tokens, options.window)
    except ValueError as error:
        parser.error(str(error))
    qualities: dict[tuple[str, str], Quality] = {}
    for weights, cache in FORMATS:
        with LLM(options.model, dtype=weights, kv_cache_dtype=cache) as llm:
            qualities[weights, cache] = measure(llm, pieces)
        print(f"{weights}, {cache}: {qualities[weights, cache].perplexity:.3f}", file=sys.stderr)
    print("\n".join(table(qualities)))
    served, bound = qualities[WHAT_IS_SERVED], qualities[WHAT_BOUNDS_IT]
    ratio, error = served.above(bound)
    print(
        f"{len(served.losses):,} tokens scored in windows of {options.window}; int8 with int8 K "
        f"and V against bfloat16: perplexity {ratio:+.2%} ± {error:.2%} (bound {options.bound:.1%})"
    )
    return 0 if ratio <= options.bound else 1


if __name__ == "__main__":
    sys.exit(main())
