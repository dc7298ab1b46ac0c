"""The step loop: commands in, a plan, one forward pass, one message out.

    commands ──▶ apply          plan ──▶ emit ──▶ execute ──▶ commit
                                          │
                 rows of the last step, members of the one about to run

Announcing the members before executing them is what lets a supervisor know whom to suspect when
the engine dies in a step. Torch-free: what computes is behind :class:`Executor`.

Whatever raises in a step costs its rows at most: a plan that cannot be executed is tried again in
halves, and what cannot run alone fails alone. Where the books of the scheduler do not balance
afterwards they are written anew and the loop goes on; those whose pages are in doubt are computed
again. Only where that is needed over and over the error goes on to the caller: a new engine then
begins from the journal.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from turnstile.core.admission import NeverFitsError
from turnstile.core.commit import CommitError
from turnstile.core.cost import StepCost, read_again
from turnstile.core.events import Admitted, encode
from turnstile.core.plan import Plan, Progress
from turnstile.core.request import DuplicateRequestError, FinishReason, Request, Sequence, State
from turnstile.core.scheduler import Scheduler
from turnstile.core.speculation import NO_DRAFTS, Drafter
from turnstile.engine.executor import ChunkResult, Executor
from turnstile.engine.gauges import Gauges
from turnstile.engine.painter import Painter
from turnstile.engine.params import SamplingParams
from turnstile.engine.protocol import (
    Cancel,
    Command,
    Control,
    Draws,
    Picture,
    Resume,
    Row,
    Snapshot,
    StepResult,
    Submit,
    Watch,
)
from turnstile.engine.wording import counted
from turnstile.text.errors import TextError

logger = logging.getLogger(__name__)

MOST_REPAIRS, REPAIR_WINDOW = 16, 128
"""Repairs of the books within so many steps, after which they are given up."""


class StepLoop:
    """Drives a scheduler and an executor; the same in a process, in a thread and in tests.

    Parameters
    ----------
    emit
        Called with every :class:`StepResult`, from within :meth:`step`.
    clock
        Seconds; the one the API process uses for arrivals and deadlines.
    drafter
        Guesses tokens to be verified; the scheduler must have ``speculation`` on. None: no drafts.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        epoch: int,
        emit: Callable[[StepResult], None],
        clock: Callable[[], float] = time.monotonic,
        drafter: Drafter | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.drafter = drafter
        self.epoch = epoch
        self._emit = emit
        self._clock = clock
        self._rows: list[Row] = []
        self._draws: Draws | None = None
        self._untold = True
        """The last snapshot is out of date: a new engine, or one that was commanded."""
        self._drawing: dict[str, tuple[SamplingParams, int]] = {}
        self._numbers: dict[str, int] = {}
        """The number of each request's sample 0, where draws may be told by number."""
        self._repaired_at: list[int] = []
        self._gauges = Gauges()
        self._turn_began: float | None = None
        self._painter: Painter | None = None
        """Draws the pool for those who watch it, while somebody does."""

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` would do anything: something runs, or is to be told."""
        return self._untold or bool(self._rows or self._draws) or self.scheduler.has_work

    # -- commands ---------------------------------------------------------------------------------

    def apply(self, command: Command) -> None:
        """Take one command, between steps."""
        self._untold = True
        match command:
            case Submit():
                self._submit(command)
            case Cancel():
                self._cancel(command)
            case Resume():
                self.scheduler.queue.resume(command.tenants, command.level)
            case Control(action="reset_prefix_cache"):
                self.scheduler.cache.clear()
            case Watch():
                self._watch(command.interval)
            case Control():
                pass

    def _watch(self, interval: float | None) -> None:
        if self._painter is not None:
            self._painter.close()
        self._painter = None if interval is None else Painter(self.scheduler, interval)

    def _submit(self, command: Submit) -> None:
        try:
            sequence = self._enter(command)
        except (NeverFitsError, DuplicateRequestError) as error:
            self._refuse(command, str(error))
            return
        except Exception as error:
            # No door lets in what does this. Should one, it must not end the other requests.
            self._refuse(command, _not_set_up(command, error))
            self._mend()
            return
        try:
            self._let_draw(sequence, command.params, command.seed)
        except Exception as error:
            # Most often a grammar that does not compile. What nobody foresaw, out of a grammar
            # library say, must not end the other requests either.
            message = str(error) if isinstance(error, TextError) else _not_set_up(command, error)
            self.scheduler.fail(sequence, message, self._clock())
            self._refuse(command, message)
            return
        self._drawing[command.request_id] = (command.params, command.seed)
        if command.number is not None:
            self._numbers[command.request_id] = command.number - command.sample_index

    def _enter(self, command: Submit) -> Sequence:
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
        return self.scheduler.submit(
            request,
            outputs=command.outputs,
            sample_index=command.sample_index,
            charged=command.charged,
            served=command.served,
            now=self._clock(),
        )

    def _let_draw(self, sequence: Sequence, params: SamplingParams, seed: int) -> None:
        """Tell those who draw, and who guesses, of a sequence that has come to be."""
        self.executor.add(sequence, params, seed)
        if self.drafter is not None and params.forgetful:
            self.drafter.follow(sequence)

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
        if self.drafter is not None:
            self.drafter.forget(sequence)
        if not self.scheduler.sequences(sequence.request.id):
            self._drawing.pop(sequence.request.id, None)
            self._numbers.pop(sequence.request.id, None)

    # -- the step ---------------------------------------------------------------------------------

    def step(self) -> None:
        """Plan, say what the last step did and who is in this one, compute it, commit it."""
        turn_began = self._turn_began if self._turn_began is not None else self._clock()
        self._turn_began = None
        plan = self._plan()
        for ended in self.scheduler.take_ended():
            self._add_row(ended, None)
        self._announce(plan)
        if plan.copies:
            plan = self._copy_pages(plan)
        if not plan:
            self._check_rest()
            return
        scheduler = self.scheduler
        again = read_again(scheduler.pool, plan.num_decodes, len(scheduler.running))
        cost = StepCost.of(plan).sharing(again)
        began = self._clock()
        plan, results, whole = self._execute(plan)
        ended_at = self._clock()
        self._gauges.stepped(plan.num_tokens, ended_at - began)
        # A step that had to be tried again says nothing of what steps cost.
        seconds = ended_at - began if whole else 0.0
        if self.drafter is not None:
            self.drafter.learn(plan, results)
        for progress in self._commit(plan, results, ended_at, seconds):
            chunk = plan.chunks[progress.chunk]
            self._add_row(progress, results[progress.chunk], len(chunk.drafts))
        now = self._clock()
        self._gauges.turns.observe(cost, now - turn_began)
        if self.scheduler.has_work:
            self._turn_began = now
        else:
            self._check_rest()

    def _plan(self) -> Plan:
        if self.drafter is not None:
            running = self.scheduler.running
            shared = read_again(self.scheduler.pool, 1, len(running))
            self.drafter.draft(running, self._gauges.turns, shared)
        try:
            return self.scheduler.plan(self._clock())
        except Exception:
            # A plan that was not finished has advanced nothing: with books that balance it can be
            # made again. If not that either, the caller must know.
            logger.exception("Step %d cannot be planned", self.scheduler.statistics.steps)
            self._mend()
            return self.scheduler.plan(self._clock())

    def _announce(self, plan: Plan) -> None:
        rows, self._rows = self._rows, []
        draws, self._draws = self._draws, None
        members = [(c.sequence.request.id, c.sequence.index) for c in plan.chunks]
        happened = self.scheduler.take_events()
        for event in happened:
            if isinstance(event, Admitted):
                rows += self._charges(event)
        events = [encode(event) for event in happened]
        if rows or draws or members or events or self._untold:
            self._untold = False
            snapshot = self.snapshot()
            self._gauges.told(snapshot)
            picture = None if self._painter is None else self._paint(self._painter, plan)
            self._emit(
                StepResult(self.epoch, plan.step, rows, members, snapshot, events, draws, picture)
            )

    def _paint(self, painter: Painter, plan: Plan) -> Picture | None:
        try:
            return painter.paint(self._clock(), at_rest=not plan)
        except Exception:
            # Books that do not balance, most likely. Looking at them must not end a request.
            logger.exception("The pool cannot be drawn; whoever watches sees no more of it")
            self._watch(None)
            return None

    def snapshot(self) -> Snapshot:
        """Counters and gauges of now."""
        drafts = self.drafter.counts if self.drafter is not None else NO_DRAFTS
        return self._gauges.snapshot(self.scheduler, drafts, self._clock())

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

    def _copy_pages(self, plan: Plan) -> Plan:
        """Make a plan's page copies. Where that fails, who waits for one computes it instead, and
        the plan goes on without.
        """
        try:
            self.executor.copy_pages(plan.copies)
        except Exception:
            # As in :meth:`_execute`.
            logger.exception("Step %d cannot copy pages", plan.step)
            targets = {target for _, target in plan.copies}
            for sequence in list(self.scheduler.running):
                if not targets.isdisjoint(sequence.table.pages):
                    self.scheduler.preempt(sequence, self._clock())
        return _still_running(plan)

    def _execute(self, plan: Plan) -> tuple[Plan, list[ChunkResult], bool]:
        """Run a plan. Returns what of it is to be committed, with the results, and whether it ran
        as a whole. Where that fails, its rows are tried again in halves, and what cannot run alone
        has failed alone; those whose pages the failure left in doubt are not tried again.
        """
        try:
            return plan, self.executor.execute(plan), True
        except Exception as error:
            # Whatever it was, it must not end the other requests: that is this method's purpose.
            logger.exception("Step %d failed with %d rows", plan.step, len(plan.chunks))
            self._mend()
            sound = _still_running(plan)
            if len(sound.chunks) == len(plan.chunks):
                results = self._halve(plan, error)
            else:
                results = self._try_again(sound) if sound else []
            self._mend()
            return sound, results, False

    def _halve(self, plan: Plan, error: Exception) -> list[ChunkResult]:
        """The results of a plan that failed, from what of it can run."""
        chunks = plan.chunks
        if len(chunks) == 1:
            request_id = chunks[0].sequence.request.id
            logger.error("Request %s fails alone: %s", request_id, type(error).__name__)
            message = f"The request failed in the model ({type(error).__name__})."
            return [ChunkResult(error=message)]
        results = []
        middle = len(chunks) // 2
        for part in (Plan(plan.step, chunks[:middle]), Plan(plan.step, chunks[middle:])):
            results += self._try_again(part)
        return results

    def _try_again(self, plan: Plan) -> list[ChunkResult]:
        try:
            return self.executor.execute(plan)
        except Exception as error:  # as above
            return self._halve(plan, error)

    def _commit(
        self, plan: Plan, results: list[ChunkResult], now: float, seconds: float
    ) -> list[Progress]:
        """Commit a step. Where that breaks off, who has not been committed by then is computed
        again, and draws the same.
        """
        try:
            return self.scheduler.commit(plan, results, now, seconds)
        except CommitError as error:
            logger.exception("Step %d cannot be committed", plan.step)
            self._repair(error)
            return error.progress

    # -- the books --------------------------------------------------------------------------------

    def _mend(self) -> None:
        """Check the books of the scheduler, and write them anew where they do not balance."""
        try:
            self.scheduler.audit()
        except Exception as error:
            # Not AuditError alone: an audit can stumble over what it is to find.
            self._repair(error)

    def _repair(self, error: Exception) -> None:
        """Write the books anew because of ``error``; raises it where that has been needed too often
        lately, or whatever is still wrong then.
        """
        now = self.scheduler.statistics.steps
        self._repaired_at = [at for at in self._repaired_at if now - at < REPAIR_WINDOW]
        if len(self._repaired_at) >= MOST_REPAIRS:
            raise error
        self._repaired_at.append(now)
        self._untold = True
        again = counted(self.scheduler.repair(self._clock()), "sequence")
        logger.error("The books did not balance: %s Repaired; computed again: %s.", error, again)
        self.scheduler.audit()

    def _check_rest(self) -> None:
        """Nobody is alive: then nobody holds a page. What has leaked is found here, in O(1)."""
        scheduler = self.scheduler
        if not scheduler.has_work and (scheduler.pool.num_held or scheduler.waiting_tokens):
            self._mend()

    def _add_row(self, progress: Progress, result: ChunkResult | None, drafted: int = 0) -> None:
        sequence, tokens = progress.sequence, list(progress.tokens)
        number = self._numbers.get(sequence.request.id)
        if number is not None and not drafted and _is_plain(progress, result):  # nearly every row
            self._draws = self._draws or Draws([], [], [], [])
            self._draws.add(number + sequence.index, progress.first, tokens[0], sequence.charged)
            return
        row = Row(
            sequence.request.id,
            sequence.index,
            progress.first,
            tokens,
            cached_tokens=sequence.num_cached,
            charged=sequence.charged,
            drafted=drafted,
        )
        self._rows.append(row)
        if result is not None:
            if result.logprobs is not None and tokens:
                row.logprobs = result.logprobs[progress.sample : progress.sample + len(tokens)]
            if progress.sample == 0:
                row.prompt_logprobs = result.prompt_logprobs
        if progress.finish:
            row.finish, row.error = str(progress.finish), progress.error
            if progress.finish is FinishReason.STOP and tokens:
                row.stop_token = tokens[-1]
            self._forget(sequence)
        elif progress.sample:
            # A sibling that came to be in this step.
            self._let_draw(sequence, *self._drawing[sequence.request.id])


def _not_set_up(command: Submit, error: Exception) -> str:
    logger.exception("Request %s could not be set up", command.request_id)
    return f"The request could not be set up ({type(error).__name__})."


def _still_running(plan: Plan) -> Plan:
    """What of a plan can still be executed."""
    chunks = tuple(c for c in plan.chunks if c.sequence.state is State.RUNNING)
    return plan if len(chunks) == len(plan.chunks) else Plan(plan.step, chunks)


def _is_plain(progress: Progress, result: ChunkResult | None) -> bool:
    """Whether a row says nothing but one token, which is not the sample's first."""
    return (
        len(progress.tokens) == 1
        and progress.first > 0
        and not progress.finish
        and not progress.sample
        and result is not None
        and result.logprobs is None
        and result.prompt_logprobs is None
    )
