"""Log-probabilities as clients want them: what a token was, and how likely, in both API shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from turnstile.text.vocabulary import Vocabulary

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot carry (the value OpenAI sends)."""


class TokenLogprobs(Protocol):
    """What the engine says of one token: its log-probability, and ``(id, logprob)`` of the
    likeliest ones.
    """

    @property
    def logprob(self) -> float: ...

    @property
    def top(self) -> Sequence[tuple[int, float]]: ...


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token and its log-probability; None for a prompt's first token, which has none."""

    token_id: int
    text: str
    data: bytes
    logprob: float | None


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """One place in the text: the token that stands there, and the likeliest ones for it.

    ``offset`` is where the token's text begins, in characters of the choice's ``text``.
    """

    chosen: Candidate
    top: tuple[Candidate, ...]
    offset: int


def make_entry(
    vocabulary: Vocabulary, token_id: int, logprobs: TokenLogprobs | None, offset: int
) -> LogprobEntry:
    """Put the engine's numbers and the vocabulary's words together."""
    if logprobs is None:
        return LogprobEntry(_candidate(vocabulary, token_id, None), (), offset)
    return LogprobEntry(
        _candidate(vocabulary, token_id, logprobs.logprob),
        tuple([_candidate(vocabulary, i, value) for i, value in logprobs.top]),
        offset,
    )


def _candidate(vocabulary: Vocabulary, token_id: int, logprob: float | None) -> Candidate:
    if logprob is not None and not math.isfinite(logprob):
        logprob = LOWEST
    return Candidate(
        token_id, vocabulary.token_text(token_id), vocabulary.token_bytes(token_id), logprob
    )


def chat_logprobs(
    entries: Iterable[LogprobEntry], *, as_token_ids: bool = False
) -> dict[str, object]:
    """Write ``choices[].logprobs`` of a chat completion.

    ``as_token_ids`` writes tokens as ``token_id:N`` (``return_tokens_as_token_ids``).
    """

    def write(candidate: Candidate) -> dict[str, object]:
        return {
            "token": _name(candidate, as_token_ids),
            "logprob": candidate.logprob,
            "bytes": list(candidate.data),
        }

    return {
        "content": [
            {**write(entry.chosen), "top_logprobs": [write(other) for other in entry.top]}
            for entry in entries
        ],
        "refusal": None,
    }


def completion_logprobs(
    entries: Iterable[LogprobEntry], *, as_token_ids: bool = False
) -> dict[str, object]:
    """Write ``choices[].logprobs`` of a completion: four parallel arrays.

    ``top_logprobs`` maps names to values; two tokens that read alike keep apart because the less
    likely one is written ``token_id:N``. Without alternatives its element is null.
    """
    entries = list(entries)
    return {
        "tokens": [_name(entry.chosen, as_token_ids) for entry in entries],
        "token_logprobs": [entry.chosen.logprob for entry in entries],
        "top_logprobs": [_top_by_name(entry, as_token_ids) for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def _top_by_name(entry: LogprobEntry, as_token_ids: bool) -> dict[str, float | None] | None:
    if not entry.top:
        return None
    named: dict[str, float | None] = {}
    for candidate in entry.top:
        name = _name(candidate, as_token_ids)
        named[f"token_id:{candidate.token_id}" if name in named else name] = candidate.logprob
    return named


def _name(candidate: Candidate, as_token_ids: bool) -> str:
    return f"token_id:{candidate.token_id}" if as_token_ids else candidate.text
