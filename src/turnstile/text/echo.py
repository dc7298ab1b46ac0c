"""A prompt given back with the answer (``echo``), with its log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from turnstile.text.detokenizer import Detokenizer
from turnstile.text.logprobs import LogprobEntry, TokenLogprobs, make_entry
from turnstile.text.tokenizer import Tokenizer


class Echo(NamedTuple):
    """The prompt's text and, token by token, how likely the model found it."""

    text: str
    entries: list[LogprobEntry]


def echo_prompt(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None = None
) -> Echo:
    """Decode a prompt as it was written, with an entry for every token.

    ``logprobs`` are those of tokens 1, 2, …; the first token has none, nothing came before it.
    A begin-of-sequence token in first place is no part of the text (the tokenizer put it there);
    other control tokens are, since the client wrote them.
    """
    vocabulary = tokenizer.vocabulary
    detokenizer = Detokenizer(
        vocabulary, skip_special_tokens=False, strip_first_space=tokenizer.strip_first_space
    )
    pieces: list[str] = []
    entries: list[LogprobEntry] = []
    length = 0
    for place, token_id in enumerate(token_ids):
        known = logprobs[place - 1] if logprobs is not None and place else None
        entries.append(make_entry(vocabulary, token_id, known, length))
        if place == 0 and token_id == tokenizer.bos_id:
            continue
        piece = detokenizer.push(token_id)
        pieces.append(piece)
        length += len(piece)
    pieces.append(detokenizer.flush())
    return Echo("".join(pieces), entries)
