"""The prompt's own log-probabilities, as vLLM's clients want them."""

from __future__ import annotations

from turnstile.server.answer.choices import Job
from turnstile.text.vocabulary import Vocabulary


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
