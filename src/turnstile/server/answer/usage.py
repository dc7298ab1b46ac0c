"""What an answer cost: ``usage``, and where its time went: ``metrics`` and ``timings``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from turnstile.server.answer.choices import Choice, Job


@dataclass(slots=True)
class Record:
    """The times of one HTTP request, on ``time.monotonic()``'s clock.

    ``queued`` is when it got a slot, as far as is known.
    """

    arrived: float
    accepted: float | None = None
    queued: float | None = None
    first_token: float | None = None
    jobs: list[Job] = field(default_factory=list)

    @property
    def last_token(self) -> float | None:
        """When the newest token came."""
        return max((choice.last_time for choice in self._begun()), default=None)

    @property
    def gaps(self) -> int:
        """Tokens that came after others of their sample."""
        return sum(choice.text.num_tokens - choice.first_tokens for choice in self._begun())

    @property
    def gap_sum(self) -> float:
        """Seconds that they waited for the ones before them, in all."""
        return sum(choice.last_time - choice.first_time for choice in self._begun())

    def _begun(self) -> Iterator[Choice]:
        return (choice for job in self.jobs for choice in job.choices if choice.first_tokens)

    @property
    def num_prompt(self) -> int:
        """Prompt tokens, each prompt once."""
        return sum(job.num_prompt for job in self.jobs)

    @property
    def num_output(self) -> int:
        """Output tokens of all choices."""
        return sum(job.num_output for job in self.jobs)

    @property
    def num_cached(self) -> int:
        """Prompt tokens that came from the prefix cache."""
        return sum(job.cached_tokens for job in self.jobs)


def usage_of(jobs: Sequence[Job]) -> dict[str, object]:
    """The ``usage`` object of an answer, finished or not."""
    prompt = sum(job.num_prompt for job in jobs)
    output = sum(job.num_output for job in jobs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(job.cached_tokens for job in jobs)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(c.reasoning_tokens for job in jobs for c in job.choices),
            "accepted_prediction_tokens": sum(job.accepted_drafts for job in jobs),
            "rejected_prediction_tokens": sum(job.rejected_drafts for job in jobs),
        },
    }


def metrics_of(record: Record) -> dict[str, object] | None:
    """Give vLLM's per-request ``metrics``; None where several samples blur the times."""
    if len(record.jobs) != 1 or len(record.jobs[0].choices) != 1:
        return None
    if record.first_token is None or record.last_token is None:
        return None
    decode = record.last_token - record.first_token
    started = record.queued if record.queued is not None else record.accepted
    return {
        "time_to_first_token_ms": _ms(record.first_token - record.arrived),
        "generation_time_ms": _ms(decode),
        "queue_time_ms": None if started is None else _ms(started - record.arrived),
        "mean_itl_ms": _ms(record.gap_sum / record.gaps) if record.gaps else None,
        "tokens_per_second": round(record.gaps / decode, 2) if decode > 0 else None,
    }


def timings_of(record: Record) -> dict[str, object] | None:
    """llama-server's ``timings``: the same times in its words."""
    if record.first_token is None or record.last_token is None:
        return None
    prompt_ms = _ms(record.first_token - record.arrived)
    predicted_ms = _ms(record.last_token - record.first_token)
    computed = record.num_prompt - record.num_cached
    return {
        "cache_n": record.num_cached,
        "prompt_n": computed,
        "prompt_ms": prompt_ms,
        "prompt_per_second": round(computed / prompt_ms * 1000, 2) if prompt_ms else None,
        "predicted_n": record.num_output,
        "predicted_ms": predicted_ms,
        "predicted_per_second": round(record.gaps / predicted_ms * 1000, 2)
        if predicted_ms
        else None,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
