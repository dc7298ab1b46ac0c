"""The prompt's own log-probabilities, as echoed completions and scoring tools want them."""

from __future__ import annotations

from turnstile.server.choices import Job
from turnstile.text.detokenizer import Detokenizer
from turnstile.text.logprobs import LogprobEntry, make_entry
from turnstile.text.vocabulary import Vocabulary


def echo_entries(job: Job, vocabulary: Vocabulary) -> list[LogprobEntry]:
    """One entry a prompt token; the first has no log-probability, for nothing comes before it."""
    detokenizer = Detokenizer(vocabulary)
    values = [None, *job.prompt_logprobs]
    offset = 0
    entries = []
    for place, token in enumerate(job.generation.prompt):
        value = values[place] if place < len(values) else None
        entries.append(make_entry(vocabulary, token, value, offset))
        offset += len(detokenizer.push(token))
    return entries


def prompt_logprobs_of(job: Job, vocabulary: Vocabulary) -> list[dict[str, object] | None]:
    """Write vLLM's ``prompt_logprobs``: per prompt token, ids to values; null for the first.

    ``rank`` is given where the token is among the alternatives reported, else null.
    """
    result: list[dict[str, object] | None] = [None]
    for token, value in zip(job.generation.prompt[1:], job.prompt_logprobs, strict=False):
        ranks = {other: rank for rank, (other, _) in enumerate(value.top, 1)}
        values = dict(value.top)
        values.setdefault(token, value.logprob)
        result.append(
            {
                str(other): {
                    "logprob": logprob,
                    "rank": ranks.get(other),
                    "decoded_token": vocabulary.token_text(other),
                }
                for other, logprob in values.items()
            }
        )
    return result
