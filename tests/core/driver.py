"""Runs a scheduler without a model: a token is a hash of what came before it."""

from __future__ import annotations

import hashlib

from turnstile.core.admission import ADMISSION_POLICIES, AdmissionPolicy
from turnstile.core.fairness import QUEUE_POLICIES
from turnstile.core.pages import PagePool
from turnstile.core.plan import Chunk, Outcome, Plan, Progress
from turnstile.core.request import FinishReason, Request, Sequence
from turnstile.core.scheduler import Scheduler, SchedulerConfig

VOCABULARY = 50
STOP = 7


def token_after(tokens: tuple[int, ...], sample: int) -> int:
    """What the fake model says after ``tokens``: it depends on all of them, and on the sample."""
    digest = hashlib.blake2b(repr((tokens, sample)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % VOCABULARY


def solo(request: Request, sample: int) -> list[int]:
    """What an undisturbed run of one sample gives."""
    outputs: list[int] = []
    while len(outputs) < request.max_tokens:
        outputs.append(token_after((*request.prompt, *outputs), sample))
        if outputs[-1] in request.stop_ids and len(outputs) > request.min_tokens:
            break
    return outputs


def make_scheduler(
    *,
    pages: int = 64,
    page_size: int = 4,
    slots: int = 8,
    budget: int = 32,
    admission: str = "expected",
    queue: str = "fair",
    prefix_caching: bool = True,
    max_model_len: int = 4096,
    **limits: object,
) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        min_chunk=4,
        **limits,  # type: ignore[arg-type]
    )
    return Scheduler(
        config,
        PagePool(pages, page_size),
        (ADMISSION_POLICIES | {"optimistic": OptimisticAdmission})[admission](),
        QUEUE_POLICIES[queue](),
        prefix_caching=prefix_caching,
    )


class OptimisticAdmission(AdmissionPolicy):
    """Believes that everybody is about to end, and so runs out of pages."""

    name = "optimistic"

    def remaining(self, sequence: Sequence) -> int:
        return 1


class Driver:
    """Steps a scheduler, keeps what came out, and audits the pool at every turn.

    It has a KV cache of its own, page by page, so that reading a page somebody else wrote to, or
    one never written, is found out.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.now = 0.0
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.finished: dict[tuple[str, int], FinishReason] = {}
        self.largest_batch = 0
        self.hits = 0
        self._kv: dict[tuple[int, int], tuple[int, int]] = {}

    def submit(self, request: Request, **resumed: object) -> None:
        self.scheduler.submit(request, now=self.now, **resumed)  # type: ignore[arg-type]
        for index in range(request.n):
            self.outputs.setdefault((request.id, index), [])

    def step(self) -> Plan:
        scheduler = self.scheduler
        self.now += 1.0
        plan = scheduler.plan(self.now)
        self._take(scheduler.take_ended())
        scheduler.audit()
        self._check(plan)
        self._copy(plan)
        outcomes = [self.outcome(chunk) for chunk in plan.chunks]
        # A plan is a value: computing it again changes nothing.
        assert outcomes == [self.outcome(chunk) for chunk in plan.chunks]
        if plan:
            self._take(scheduler.commit(plan, outcomes, self.now))
        scheduler.audit()
        return plan

    def run(self, steps: int = 100_000) -> None:
        for _ in range(steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"still at work: {self.scheduler.running}")

    def outcome(self, chunk: Chunk) -> Outcome:
        sequence, page_size = chunk.sequence, self.scheduler.pool.page_size
        known = (*sequence.tokens, *chunk.drafts)
        for position in range(chunk.start, chunk.end):
            page = sequence.table.pages[position // page_size]
            self._kv[page, position % page_size] = (position, known[position])
        if not chunk.samples:
            return Outcome()
        for position in range(chunk.end):
            page = sequence.table.pages[position // page_size]
            assert self._kv[page, position % page_size] == (position, known[position])
        if chunk.drafts:
            return Outcome(self._accept(chunk, known))
        if chunk.samples > 1:
            return Outcome(tuple(token_after(known, s) for s in range(chunk.samples)))
        return Outcome((token_after(known, sequence.index),))

    def _accept(self, chunk: Chunk, known: tuple[int, ...]) -> tuple[int, ...]:
        drawn: list[int] = []
        total = chunk.sequence.total
        for i in range(chunk.samples):
            drawn.append(token_after(known[: total + i], chunk.sequence.index))
            if i < len(chunk.drafts) and drawn[-1] != chunk.drafts[i]:
                break
        return tuple(drawn)

    def _copy(self, plan: Plan) -> None:
        page_size = self.scheduler.pool.page_size
        for source, target in plan.copies:
            for place in range(page_size):
                if (source, place) in self._kv:
                    self._kv[target, place] = self._kv[source, place]

    def _check(self, plan: Plan) -> None:
        config = self.scheduler.config
        sequences = [chunk.sequence for chunk in plan.chunks]
        assert len(set(sequences)) == len(sequences)
        assert len(self.scheduler.running) <= config.max_num_seqs
        if config.chunked_prefill:
            assert plan.num_tokens <= config.max_num_batched_tokens
        if self.scheduler.running:
            oldest = self.scheduler.running[0]
            assert oldest in sequences, "the oldest always progresses"
        self.largest_batch = max(self.largest_batch, len(sequences))

    def _take(self, progress: list[Progress]) -> None:
        for step in progress:
            key = (step.sequence.request.id, step.sequence.index)
            assert key not in self.finished, "nothing comes after the end"
            assert step.first == len(self.outputs[key]), "in order, without gaps"
            self.outputs[key] += step.tokens
            if step.finish:
                self.finished[key] = step.finish
