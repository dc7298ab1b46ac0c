"""The step loop: commands in, a plan, one forward pass, one message out.

    commands ──▶ apply          plan ──▶ emit ──▶ execute ──▶ commit
                                          │
                 rows of the last step, members of the one about to run

Announcing the members before executing them is what lets a supervisor know whom to suspect when
the engine dies in a step. Torch-free: what computes is behind :class:`Executor`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from turnstile.core.admission import NeverFitsError
from turnstile.core.cost import CostModel as StepCostModel
from turnstile.core.cost import StepCost
from turnstile.core.events import Admitted, encode
from turnstile.core.forecast import prefill_left
from turnstile.core.plan import Outcome, Plan, Progress
from turnstile.core.request import DuplicateRequestError, FinishReason, Request, Sequence
from turnstile.core.scheduler import Scheduler
from turnstile.engine.executor import ChunkResult, Executor
from turnstile.engine.params import SamplingParams
from turnstile.engine.protocol import (
    Cancel,
    Command,
    Control,
    CostModel,
    Row,
    Snapshot,
    StepResult,
    Submit,
)
from turnstile.text.errors import TextError

logger = logging.getLogger(__name__)


class StepLoop:
    """Drives a scheduler and an executor; the same in a process, in a thread and in tests.

    Parameters
    ----------
    emit
        Called with every :class:`StepResult`, from within :meth:`step`.
    clock
        Seconds; the one the API process uses for arrivals and deadlines.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        epoch: int,
        emit: Callable[[StepResult], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.epoch = epoch
        self._emit = emit
        self._clock = clock
        self._rows: list[Row] = []
        self._untold = True
        """The last snapshot is out of date: a new engine, or one that was commanded."""
        self._drawing: dict[str, tuple[SamplingParams, int]] = {}
        self._busy = 0.0
        self._step_seconds = 0.0
        self._step_tokens = 0
        # What a simulator needs to foretell a step's end: the pass and all that is around it.
        self._turns = StepCostModel(fine=True)
        self._turn_began: float | None = None

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` would do anything: something runs, or is to be told."""
        return self._untold or bool(self._rows) or self.scheduler.has_work

    # -- commands ---------------------------------------------------------------------------------

    def apply(self, command: Command) -> None:
        """Take one command, between steps."""
        self._untold = True
        match command:
            case Submit():
                self._submit(command)
            case Cancel():
                self._cancel(command)
            case Control(action="reset_prefix_cache"):
                self.scheduler.cache.clear()
            case Control():
                pass

    def _submit(self, command: Submit) -> None:
        params = command.params
        request = Request(
            id=command.request_id,
            prompt=tuple(command.prompt),
            max_tokens=command.max_tokens,
            n=command.n,
            tenant=command.tenant,
            weight=command.weight,
            priority=command.priority,
            arrival=command.arrival,
            deadline=command.deadline,
            min_tokens=params.min_tokens,
            stop_ids=frozenset(params.stop_token_ids),
            salt=command.salt,
            score_prompt=params.prompt_logprobs is not None and not command.outputs,
        )
        try:
            sequence = self.scheduler.submit(
                request,
                outputs=command.outputs,
                sample_index=command.sample_index,
                charged=command.charged,
                served=command.served,
                now=self._clock(),
            )
        except (NeverFitsError, DuplicateRequestError) as error:
            self._refuse(command, str(error))
            return
        try:
            self.executor.add(sequence, params, command.seed)
        except Exception as error:
            # Most often a grammar that does not compile. What nobody foresaw, out of a grammar
            # library say, must not end the other requests either.
            message = str(error)
            if not isinstance(error, TextError):
                logger.exception("Request %s could not be set up", command.request_id)
                message = f"The request could not be set up ({type(error).__name__})."
            self.scheduler.fail(sequence, message, self._clock())
            self._refuse(command, message)
            return
        self._drawing[command.request_id] = (params, command.seed)

    def _refuse(self, command: Submit, message: str) -> None:
        first = len(command.outputs)
        for index in range(command.sample_index, command.sample_index + command.n):
            self._rows.append(
                Row(command.request_id, index, first, [], finish="error", error=message)
            )

    def _cancel(self, command: Cancel) -> None:
        reason = FinishReason.STOP if command.reason == "stop" else FinishReason.ABORT
        for ended in self.scheduler.cancel(
            command.request_id, command.sample_index, now=self._clock(), reason=reason
        ):
            self._forget(ended.sequence)

    def _forget(self, sequence: Sequence) -> None:
        self.executor.remove(sequence)
        if not self.scheduler.sequences(sequence.request.id):
            self._drawing.pop(sequence.request.id, None)

    # -- the step ---------------------------------------------------------------------------------

    def step(self) -> None:
        """Plan, say what the last step did and who is in this one, compute it, commit it."""
        turn_began = self._turn_began if self._turn_began is not None else self._clock()
        self._turn_began = None
        plan = self.scheduler.plan(self._clock())
        for ended in self.scheduler.take_ended():
            self._add_row(ended, None)
        self._announce(plan)
        if plan.copies:
            self.executor.copy_pages(plan.copies)
        if not plan:
            return
        cost = StepCost.of(plan).sharing(self._read_again())
        began = self._clock()
        results, whole = self._execute(plan)
        ended_at = self._clock()
        self._step_seconds = ended_at - began
        self._step_tokens = plan.num_tokens
        self._busy += self._step_seconds
        outcomes = [result.outcome for result in results]
        # A step that had to be tried again says nothing of what steps cost.
        seconds = self._step_seconds if whole else 0.0
        for progress in self.scheduler.commit(plan, outcomes, ended_at, seconds):
            self._add_row(progress, results[progress.chunk])
        now = self._clock()
        self._turns.observe(cost, now - turn_began)
        if self.scheduler.has_work:
            self._turn_began = now

    def _read_again(self) -> int:
        """Tokens in the pages of those running, beyond those in pages: shared ones come again."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        return (sum(len(s.table) for s in scheduler.running) - pool.num_held) * pool.page_size

    def _announce(self, plan: Plan) -> None:
        rows, self._rows = self._rows, []
        members = [(c.sequence.request.id, c.sequence.index) for c in plan.chunks]
        happened = self.scheduler.take_events()
        for event in happened:
            if isinstance(event, Admitted):
                rows += self._charges(event)
        events = [encode(event) for event in happened]
        if rows or members or events or self._untold:
            self._untold = False
            snapshot = self._snapshot()
            self._emit(StepResult(self.epoch, plan.step, rows, members, snapshot, events))

    def _charges(self, event: Admitted) -> list[Row]:
        """Say what a prompt cost its tenant before it is computed: should the engine die in that,
        it is not charged again.
        """
        return [
            Row(
                event.request_id,
                event.index,
                sequence.num_outputs,
                [],
                cached_tokens=sequence.num_cached,
                charged=sequence.charged,
            )
            for sequence in self.scheduler.sequences(event.request_id)
            if sequence.index == event.index and not sequence.preemptions
        ]

    def _execute(self, plan: Plan) -> tuple[list[ChunkResult], bool]:
        """Run a plan; also whether it ran as a whole. Where that fails, its rows are tried again
        in halves, and what cannot run alone has failed alone.

        Raises :class:`~turnstile.core.pages.AuditError` where the failure left the books wrong: no
        page can be trusted then, and a new engine computes them again from the journal.
        """
        try:
            return self.executor.execute(plan), True
        except Exception as error:
            # Whatever it was, it must not end the other requests: that is this method's purpose.
            logger.exception("Step %d failed with %d rows", plan.step, len(plan.chunks))
            results = self._halve(plan, error)
            self.scheduler.audit()
            return results, False

    def _halve(self, plan: Plan, error: Exception) -> list[ChunkResult]:
        """The results of a plan that failed, from what of it can run."""
        chunks = plan.chunks
        if len(chunks) == 1:
            request_id = chunks[0].sequence.request.id
            logger.error("Request %s fails alone: %s", request_id, type(error).__name__)
            message = f"The request failed in the model ({type(error).__name__})."
            return [ChunkResult(Outcome(error=message))]
        results = []
        middle = len(chunks) // 2
        for part in (Plan(plan.step, chunks[:middle]), Plan(plan.step, chunks[middle:])):
            try:
                results += self.executor.execute(part)
            except Exception as again:  # as above
                results += self._halve(part, again)
        return results

    def _add_row(self, progress: Progress, result: ChunkResult | None) -> None:
        sequence = progress.sequence
        tokens = list(progress.tokens)
        logprobs = prompt_logprobs = None
        if result is not None:
            if result.logprobs is not None and tokens:
                at = progress.sample
                logprobs = result.logprobs[at : at + len(tokens)]
            if progress.sample == 0:
                prompt_logprobs = result.prompt_logprobs
        finish = str(progress.finish) if progress.finish else None
        self._rows.append(
            Row(
                sequence.request.id,
                sequence.index,
                progress.first,
                tokens,
                logprobs,
                finish,
                progress.error,
                tokens[-1] if progress.finish is FinishReason.STOP and tokens else None,
                sequence.num_cached,
                prompt_logprobs,
                sequence.charged,
            )
        )
        if progress.finish:
            self._forget(sequence)
        elif progress.sample:
            # A sibling that came to be in this step.
            self.executor.add(sequence, *self._drawing[sequence.request.id])

    # -- the snapshot -----------------------------------------------------------------------------

    def _snapshot(self) -> Snapshot:
        scheduler, pool, counted = self.scheduler, self.scheduler.pool, self.scheduler.statistics
        return Snapshot(
            time=self._clock(),
            step=counted.steps,
            step_seconds=self._step_seconds,
            busy_seconds=self._busy,
            running=len(scheduler.running),
            waiting=scheduler.num_waiting,
            waiting_tokens=scheduler.waiting_tokens,
            pages_total=pool.num_pages,
            pages_free=pool.num_free,
            pages_held=pool.num_held,
            pages_cached=pool.num_cached,
            prompt_tokens=counted.prompt_tokens,
            cached_tokens=counted.cached_tokens,
            generated_tokens=counted.generated_tokens,
            recomputed_tokens=counted.recomputed_tokens,
            preemptions=counted.preemptions,
            evictions=pool.evictions,
            prefix_queries=scheduler.cache.queries,
            prefix_hits=scheduler.cache.hits,
            bad_rows=counted.failed_rows,
            step_tokens=self._step_tokens,
            waiting_by_reason=scheduler.waiting_by_reason,
            tenants=scheduler.queue.counters(),
            cost=_fitted(scheduler.cost),
            turn=_fitted(self._turns),
            prefill_tokens=prefill_left(scheduler.running),
            unused_tokens=sum(
                len(s.table) * pool.page_size - s.computed for s in scheduler.running
            ),
        )


def _fitted(model: StepCostModel) -> CostModel:
    fit = model.coefficients
    return CostModel(
        fit.alpha, fit.beta, fit.gamma, fit.delta, model.samples, model.largest_batch, fit.epsilon,
        fit.knee,
    )  # fmt: skip
