"""Continuous batching: the scheduler and the runner that serve, a step at a time."""

from __future__ import annotations

import time

from turnstile.core.pages import PagePool
from turnstile.core.plan import Chunk, Outcome, Progress
from turnstile.core.scheduler import Scheduler, SchedulerConfig
from turnstile.engine.params import SamplingParams
from turnstile.lab.contiguous import ContiguousPool
from turnstile.lab.drive import Row, Step
from turnstile.lab.load import END, Ask
from turnstile.lab.model import LabModel
from turnstile.lab.policies import TURNSTILE, Policy


class ContinuousServer:
    """Requests join and leave at every step.

    Parameters
    ----------
    memory_tokens
        The KV cache; the same number means the same bytes under every policy.
    max_model_len
        Most tokens of a sequence: what a contiguous cache reserves.
    slots, budget
        Most sequences and tokens of a step.
    watched
        Account for the memory of every step, and check the pool's books after it (not where the
        policy breaks them). Costs time, so not where seconds are compared.
    """

    def __init__(
        self,
        model: LabModel,
        policy: Policy = TURNSTILE,
        *,
        memory_tokens: int,
        max_model_len: int,
        page_size: int = 16,
        slots: int = 64,
        budget: int = 256,
        watched: bool = False,
    ) -> None:
        self.policy = policy
        self.watched = watched
        self.pool: PagePool
        if policy.contiguous:
            self.pool = ContiguousPool(memory_tokens, max_model_len)
        else:
            self.pool = policy.pool(memory_tokens // page_size, page_size)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=slots,
                max_num_batched_tokens=max(budget, slots),
                max_model_len=max_model_len,
                chunked_prefill=policy.chunked_prefill,
                separate_prefill=policy.separate_prefill,
            ),
            self.pool,
            policy.admission(),
            policy.queue(),
            prefix_caching=policy.prefix_caching,
            victim=policy.victim,
        )
        self._runner = model.runner(
            num_pages=self.pool.num_pages,
            page_size=self.pool.page_size,
            max_tokens=max(budget, slots),
            max_sequences=slots,
        )
        self._lengths: dict[str, int] = {}
        self._last: dict[str, int] = {}

    def submit(self, ask: Ask, now: float) -> None:
        sequence = self.scheduler.submit(ask.request(), now=now)
        self._runner.add(sequence, SamplingParams(temperature=0.0), 0)
        self._lengths[ask.id] = ask.length

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self, now: float, more: bool) -> Step | None:
        scheduler = self.scheduler
        preempted = scheduler.statistics.preemptions
        plan = scheduler.plan(now)
        rows = [self._row(progress) for progress in scheduler.take_ended()]
        preempted = scheduler.statistics.preemptions - preempted
        if not plan:
            return Step(rows, 0, 0, 0, 0, 0, 0.0, preempted) if rows else None
        reserved, filled = self._memory() if self.watched else (0, 0)
        began = time.perf_counter()
        results = self._runner.execute(plan)
        seconds = time.perf_counter() - began
        outcomes = [
            self._ended_in_time(chunk, result)
            for chunk, result in zip(plan.chunks, results, strict=True)
        ]
        rows += [self._row(each) for each in scheduler.commit(plan, outcomes, now, seconds)]
        scheduler.take_events()
        if self.watched and self.policy.counts:
            scheduler.audit()
        return Step(
            rows, plan.num_tokens, plan.num_tokens, len(plan.chunks), reserved, filled, seconds,
            preempted,
        )  # fmt: skip

    def _ended_in_time(self, chunk: Chunk, outcome: Outcome) -> Outcome:
        """The outcome, with the end token in place of the draw that completes an answer."""
        sequence = chunk.sequence
        if not outcome.tokens or sequence.num_outputs + 1 < self._lengths[sequence.request.id]:
            return outcome
        self._last[sequence.request.id] = outcome.tokens[0]
        return Outcome((END,))

    def _row(self, progress: Progress) -> Row:
        name, tokens = progress.sequence.request.id, progress.tokens
        if tokens == (END,):
            tokens = (self._last.pop(name),)
        if progress.finish is None:
            return Row(name, tokens)
        self._runner.remove(progress.sequence)
        return Row(name, tokens, str(progress.finish), progress.error)

    def _memory(self) -> tuple[int, int]:
        """Tokens of memory taken, and how many of them hold something after this step; a shared
        page counts once.
        """
        size = self.pool.page_size
        filled: dict[int, int] = {}
        for sequence in self.scheduler.running:
            left = sequence.total
            for page in sequence.table.pages:
                filled[page] = max(filled.get(page, 0), min(size, left))
                left -= size
        return len(filled) * size, sum(max(0, count) for count in filled.values())
