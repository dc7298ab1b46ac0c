"""What is counted of a request when it has ended: :class:`EndedRequests`."""

from __future__ import annotations

from typing import Literal

from turnstile.server.answer.usage import Record
from turnstile.server.watch.histogram import ITL_BOUNDS, LATENCY_BOUNDS, Histogram, token_bounds
from turnstile.server.watch.trails import Part, RequestTrail

MAX_TENANTS = 100
"""Tenants with series of their own; the rest are counted together."""
OTHER_TENANTS = "_other"
"""No tenant can be called this."""
_MOST_TOKENS = 100_000
_TIMES = (0, 1, 2, 5, 10, 20)


class EndedRequests:
    """How large they were, how long they took, and on whose account they ran.

    Attributes
    ----------
    tpot
        Mean gap between the tokens of each.
    e2e, queue_time, prefill_time, decode_time, inference_time
        Seconds: arrival to last token, arrival to slot, slot to first token, first token to last,
        and all that it had a slot for.
    prompt_tokens, output_tokens, largest_output, max_tokens, computed_tokens
        Its prompt, all its samples, the longest of them, the most that might have been, and what of
        the prompt no cache had.
    samples, preemptions
        How many it asked for, and how often they were preempted.
    part_seconds
        Where their time went.
    recoveries
        Those that had outlived an engine.
    tenants
        What ran on whose account.
    """

    def __init__(self) -> None:
        self.tpot = Histogram(ITL_BOUNDS)
        self.e2e = Histogram(LATENCY_BOUNDS)
        self.queue_time = Histogram(LATENCY_BOUNDS)
        self.prefill_time = Histogram(LATENCY_BOUNDS)
        self.decode_time = Histogram(LATENCY_BOUNDS)
        self.inference_time = Histogram(LATENCY_BOUNDS)
        tokens = token_bounds(_MOST_TOKENS)
        self.prompt_tokens = Histogram(tokens)
        self.output_tokens = Histogram(tokens)
        self.largest_output = Histogram(tokens)
        self.max_tokens = Histogram(tokens)
        self.computed_tokens = Histogram(tokens)
        self.samples = Histogram(_TIMES[1:])
        self.preemptions = Histogram(_TIMES)
        self.part_seconds = dict.fromkeys(Part, 0.0)
        self.recoveries = 0
        self.tenants = TenantBooks()

    def answered(self, record: Record, outcome: str) -> None:
        """A request that was let in has had its answer, or as much of it as there will be."""
        assert record.accepted is not None
        if record.queued is not None:
            self.queue_time.observe(max(0.0, record.queued - record.arrived))
        first, last, gaps = record.first_token, record.last_token, record.gaps
        if first is None or last is None:
            return
        self.prefill_time.observe(first - (record.queued or record.accepted))
        self.decode_time.observe(last - first)
        if gaps:
            self.tpot.observe(record.gap_sum / gaps)
        if outcome in ("stop", "length", "timeout"):
            self.e2e.observe(last - record.arrived)
            self.prompt_tokens.observe(record.num_prompt)
            self.output_tokens.observe(record.num_output)

    def closed(self, trail: RequestTrail) -> None:
        """Its trail is complete: book where its time went, and on whose account."""
        counts, samples = trail.counts, trail.samples.values()
        leading = trail.leading()
        assert trail.ended is not None
        times = leading.times(trail.ended)
        for part, seconds in times.items():
            self.part_seconds[part] += seconds
        self.recoveries += any(sample.crashes for sample in samples)
        self.preemptions.observe(sum(sample.preemptions for sample in samples))
        self.samples.observe(counts["choices"])
        self.max_tokens.observe(counts["max_tokens"])
        if leading.slotted:
            self.inference_time.observe(
                times[Part.PREFILL] + times[Part.RECOMPUTE] + times[Part.DECODE]
            )
            self.largest_output.observe(counts["largest_output"])
            self.computed_tokens.observe(counts["prompt_tokens"] - counts["cached_tokens"])
        self.tenants.book(
            trail.tenant, counts["prompt_tokens"], counts["output_tokens"], times[Part.QUEUE]
        )


Use = Literal["requests", "prompt_tokens", "output_tokens", "queue_seconds"]


class TenantBooks:
    """What tenants have used: a page for each of the first ``MAX_TENANTS``, one for all others."""

    def __init__(self) -> None:
        self._pages: dict[str, dict[Use, float]] = {OTHER_TENANTS: _blank_page()}

    def copy(self) -> TenantBooks:
        """Books with the same entries, in which more can be booked without changing these."""
        books = TenantBooks()
        books._pages = {tenant: page.copy() for tenant, page in self._pages.items()}
        return books

    def book(
        self, tenant: str, prompt_tokens: int, output_tokens: int, queue_seconds: float = 0.0
    ) -> None:
        """Write down a request."""
        if tenant not in self._pages and len(self._pages) > MAX_TENANTS:
            tenant = OTHER_TENANTS
        page = self._pages.setdefault(tenant, _blank_page())
        page["requests"] += 1
        page["prompt_tokens"] += prompt_tokens
        page["output_tokens"] += output_tokens
        page["queue_seconds"] += queue_seconds

    def column(self, use: Use) -> dict[str, float]:
        """How much of one thing each tenant has used."""
        return {tenant: page[use] for tenant, page in self._pages.items()}


def _blank_page() -> dict[Use, float]:
    return {"requests": 0.0, "prompt_tokens": 0.0, "output_tokens": 0.0, "queue_seconds": 0.0}
