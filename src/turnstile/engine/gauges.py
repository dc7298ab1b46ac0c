"""What a step loop measures of itself, and the snapshot that every message carries."""

from __future__ import annotations

from turnstile.core.cost import CostModel
from turnstile.core.forecast import prefill_left
from turnstile.core.scheduler import Scheduler
from turnstile.core.speculation import DraftCounts
from turnstile.engine.protocol import FittedCost, Snapshot


class Gauges:
    """Seconds and tokens of steps, and the cost of whole turns of the loop."""

    def __init__(self) -> None:
        self.turns = CostModel(fine=True)
        """What a simulator needs to foretell a step's end: the pass and all that is around it."""
        self._busy_seconds = 0.0
        self._step_seconds = 0.0
        self._step_tokens = 0
        self._told_tenants: list[str] = []

    def stepped(self, tokens: int, seconds: float) -> None:
        """A pass over so many tokens took so long."""
        self._step_tokens, self._step_seconds = tokens, seconds
        self._busy_seconds += seconds

    def told(self, snapshot: Snapshot) -> None:
        """A snapshot has gone out: the next one says which of its tenants have departed."""
        self._told_tenants = list(snapshot.tenants)

    def snapshot(self, scheduler: Scheduler, drafts: DraftCounts, now: float) -> Snapshot:
        """All that is told at the end of a step. ``departed`` are tenants that the snapshot told
        last still had.
        """
        pool, counts = scheduler.pool, scheduler.statistics
        tenants = scheduler.queue.counters()
        departed = [tenant for tenant in self._told_tenants if tenant not in tenants]
        return Snapshot(
            time=now,
            step=counts.steps,
            step_seconds=self._step_seconds,
            busy_seconds=self._busy_seconds,
            running=len(scheduler.running),
            waiting=scheduler.num_waiting,
            waiting_tokens=scheduler.waiting_tokens,
            pages_total=pool.num_pages,
            pages_free=pool.num_free,
            pages_held=pool.num_held,
            pages_cached=pool.num_cached,
            prompt_tokens=counts.prompt_tokens,
            cached_tokens=counts.cached_tokens,
            generated_tokens=counts.generated_tokens,
            recomputed_tokens=counts.recomputed_tokens,
            preemptions=counts.preemptions,
            evictions=pool.evictions,
            prefix_queries=scheduler.cache.queries,
            prefix_hits=scheduler.cache.hits,
            bad_rows=counts.failed_rows,
            repairs=counts.repairs,
            step_tokens=self._step_tokens,
            waiting_by_reason=scheduler.waiting_by_reason,
            tenants=tenants,
            departed={tenant: scheduler.queue.served(tenant) for tenant in departed},
            tenant_level=scheduler.queue.level,
            cost=_fitted(scheduler.cost),
            turn=_fitted(self.turns),
            prefill_tokens=prefill_left(scheduler.running),
            unused_tokens=pool.num_entries * pool.page_size
            - sum([s.computed for s in scheduler.running]),
            drafts=drafts.drafts,
            draft_tokens=drafts.tokens,
            accepted_tokens=drafts.accepted,
            accepted_by_place=list(drafts.by_place),
        )


def _fitted(model: CostModel) -> FittedCost:
    fit = model.coefficients
    return FittedCost(
        fit.alpha, fit.beta, fit.gamma, fit.delta, model.samples, model.largest_batch, fit.epsilon,
        fit.knee, fit.zeta,
    )  # fmt: skip
