"""The turnstile: at every step finished sequences leave, waiting ones enter, one plan comes out.

There is no prefill phase and no decode phase (Orca, OSDI 2022; chunked prefill after Sarathi,
OSDI 2024): every running sequence has ``computed`` tokens of ``total``, and a step moves
``computed`` forward by a chunk. A chunk that reaches the newest token is sampled.

A step, from the caller's side::

    plan = scheduler.plan(now)                      takes pages; advances nothing
    outcomes = run(plan)                            may be repeated: a plan is a value
    progress = scheduler.commit(plan, outcomes, now, seconds)

The work of a step is O(tokens scheduled + membership changes): never O(context), never O(waiting).
The parts are in their own modules: who waits (:mod:`waiting`) and whose time is up
(:mod:`deadlines`), who is next (:mod:`fairness`), who fits (:mod:`admission`), who of them starts
(:mod:`entrance`) in which place (:mod:`slots`), who must go (:mod:`preemption`), how the budget is
shared among prompts (:mod:`chunking`).
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from turnstile.core import events
from turnstile.core.admission import AdmissionPolicy, Candidate, check_fits, check_slots
from turnstile.core.alive import Alive
from turnstile.core.chunking import STRANGERS_LINGER, need, prompt_budget, share_budget
from turnstile.core.cost import CostModel, StepCost
from turnstile.core.deadlines import Deadlines
from turnstile.core.entrance import Entrance
from turnstile.core.events import AnyEvent, WaitReason
from turnstile.core.fairness import QueuePolicy
from turnstile.core.pages import PagePool
from turnstile.core.plan import Chunk, Outcome, Plan, Progress
from turnstile.core.preemption import VictimPolicy, choose_victim
from turnstile.core.prefix_cache import PrefixCache
from turnstile.core.request import FinishReason, Request, Sequence, State
from turnstile.core.settings import SchedulerConfig as SchedulerConfig
from turnstile.core.settings import Statistics as Statistics
from turnstile.core.slots import Slots
from turnstile.core.waiting import Waiting

OUTPUT_CHARGE = 2.0
"""Service of an output token, in units of an uncached prompt token."""


class Scheduler:
    """Plans steps and commits their outcomes. Owns every sequence that is alive.

    Not thread-safe; time is whatever the caller passes as ``now`` (seconds, never backwards).
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: PagePool,
        admission: AdmissionPolicy,
        queue: QueuePolicy,
        *,
        prefix_caching: bool = True,
        cost: CostModel | None = None,
        victim: VictimPolicy = choose_victim,
    ) -> None:
        self.config = config
        self.pool = pool
        self.admission = admission
        admission.lockstep = not config.speculation
        self.queue = queue
        self.cache = PrefixCache(pool, enabled=prefix_caching)
        self.cost = cost or CostModel()
        self.choose_victim = victim
        self.statistics = Statistics()
        self._strangers_until = 0
        self.slots = Slots(config.max_num_seqs)
        self.running = self.slots.running
        """In order of admission: the oldest first."""
        self._events: list[AnyEvent] = []
        self._waiting = Waiting(queue, self._events)
        self._entrance = Entrance(config, self.slots, self._waiting, self.cache, admission)
        self._deadlines = Deadlines()
        self._alive = Alive()
        self._ended: list[Progress] = []
        self._copies: list[tuple[int, int]] = []

    # -- queries ----------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether anything is waiting or running (or has ended without being reported)."""
        return bool(self.running or self._ended or self.num_waiting)

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """Tokens that those waiting have still to compute before their next output."""
        return self._waiting.tokens

    @property
    def waiting_by_reason(self) -> dict[str, int]:
        """How many wait, by why (of those never looked at yet: ``queued``)."""
        return self._waiting.by_reason()

    def sequences(self, request_id: str) -> list[Sequence]:
        """The live samples of a request, empty if there is none."""
        return self._alive.of(request_id)

    def waiting(self) -> Iterator[Sequence]:
        """Those waiting in the order they would start. For people: O(n log n)."""
        yield from self._waiting

    def audit(self) -> None:
        """Check all books against every live sequence; raises :class:`AuditError`. O(pages)."""
        alive = list(self._alive)
        self.pool.audit(s.table for s in alive)
        self._waiting.audit(alive)
        self.cache.audit(self._waiting.parked)
        self.slots.audit()

    # -- commands: arrivals and departures --------------------------------------------------------

    def submit(
        self,
        request: Request,
        *,
        outputs: Seq[int] = (),
        sample_index: int = 0,
        charged: float = 0.0,
        served: float | None = None,
        now: float,
    ) -> Sequence:
        """Queue a request, or one sample of it with the ``outputs`` it has already.

        Parameters
        ----------
        charged
            What its tenant has paid for it elsewhere. More than 0: the prompt is paid for.
        served
            For what ran elsewhere: the tenant's virtual counter there, from which it goes on. The
            tenant never was idle, so it is not lifted. None: like everybody who arrives.

        Raises
        ------
        NeverFitsError
            It could not run even on an empty machine.
        DuplicateRequestError
            The id is that of a request, or the id and index those of a sample, that is alive.
        """
        check_fits(request, self.config.max_model_len, self.pool.num_pages, self.pool.page_size)
        check_slots(request.n, self.config.max_num_seqs)
        fork_width = 1 if outputs or sample_index else request.n
        self._alive.check_new(request.id, range(sample_index, sample_index + fork_width))
        sequence = self._alive.add(request, sample_index, outputs, charged)
        sequence.fork_width = fork_width
        sequence.waiting_since = now
        self._deadlines.watch(sequence)
        self.queue.arrive(sequence, served)
        self._waiting.enter(sequence, WaitReason.QUEUED)
        self._events.append(
            events.Queued(now, request.id, sequence.index, request.tenant, sequence.total)
        )
        if outputs and sequence.remaining <= 0:
            self._ended += self._finish(sequence, FinishReason.LENGTH, now)
        return sequence

    def cancel(
        self,
        request_id: str,
        sample_index: int | None = None,
        *,
        now: float,
        reason: FinishReason = FinishReason.ABORT,
    ) -> list[Progress]:
        """End one sample, or all of a request, whatever their state; their pages are free at once.

        Only between steps: never between a plan and its commit. Unknown ids are ignored. Samples
        that have not forked yet are one: to end sample 0 is to end them all, and the others cannot
        be ended alone. With ``STOP`` the answer is complete: its length is one to learn from.
        """
        ended: list[Progress] = []
        for sequence in self.sequences(request_id):
            if sample_index is None or sequence.index == sample_index:
                ended += self._finish(sequence, reason, now)
                if reason is FinishReason.STOP:
                    self.admission.finished(sequence)
        return ended

    def fail(self, sequence: Sequence, error: str, now: float) -> list[Progress]:
        """End a sequence because of its own fault, and whatever it was still to fork into."""
        self.statistics.failed_rows += 1
        return self._finish(sequence, FinishReason.ERROR, now, error)

    def take_ended(self) -> list[Progress]:
        """What ended outside a commit since the last call: deadlines, and rows without pages."""
        ended, self._ended = self._ended, []
        return ended

    def take_events(self) -> list[AnyEvent]:
        """Everything that happened since the last call."""
        taken = self._events.copy()
        self._events.clear()
        return taken

    # -- the step: plan ---------------------------------------------------------------------------

    def plan(self, now: float) -> Plan:
        """Decide the next step and take the pages it needs. Empty when nothing can run."""
        for late in self._deadlines.due(now):
            self._ended += self._finish(late, FinishReason.TIMEOUT, now)
        for candidate in self._entrance.admit(now):
            self._start(candidate, now)
        prompts_alone = self.config.separate_prefill and any(not s.decoding for s in self.running)
        chunks = [] if prompts_alone else self._decode_chunks(now)
        chunks += self._prompt_chunks(chunks, now)
        planned = tuple(c for c in chunks if c.sequence.state is State.RUNNING)
        copies, self._copies = tuple(self._copies), []
        return Plan(self.statistics.steps, planned, copies)

    def _start(self, candidate: Candidate, now: float) -> None:
        sequence, pages = candidate.sequence, candidate.matched
        self._waiting.leave(sequence)
        self.pool.hold(sequence.table, pages)
        cached = len(pages) * self.pool.page_size
        sequence.computed = cached
        self.cache.count(sequence, cached)
        self.cache.start_writing(sequence)
        sequence.state = State.RUNNING
        sequence.catching_up = True
        sequence.skipped = 0
        self.slots.take(sequence)
        self.queue.start(sequence)
        first = sequence.started is None
        if first:
            sequence.started = now
            sequence.num_cached = min(cached, sequence.num_prompt)
            self._entrance.started(sequence)
        if first and sequence.charged == 0.0:
            self.statistics.prompt_tokens += sequence.num_prompt
            self.statistics.cached_tokens += sequence.num_cached
            self.queue.charge(sequence, sequence.num_prompt - sequence.num_cached)
        self._events.append(
            events.Admitted(
                now, sequence.request.id, sequence.index, sequence.request.tenant, cached,
                len(pages), now - sequence.waiting_since,
            )
        )  # fmt: skip

    def _decode_chunks(self, now: float) -> list[Chunk]:
        """One token (and drafts) for everybody who has only the newest left to compute."""
        chunks = []
        spare = self.config.max_num_batched_tokens - len(self.running)
        for sequence in list(self.running):
            if sequence.state is not State.RUNNING or not sequence.decoding:
                continue
            if sequence.drafts and not self.config.speculation:
                raise ValueError("Drafts need a scheduler with speculation=True.")
            drafts = sequence.drafts[: max(0, min(spare, sequence.remaining - 1))]
            spare -= len(drafts)
            count = 1 + len(drafts)
            if self._take_pages(sequence, sequence.computed + count, now):
                samples = count if sequence.request.max_tokens else 0
                score = sequence.request.score_prompt and not sequence.num_outputs
                chunks.append(Chunk(sequence, sequence.computed, count, samples, drafts, score))
        return chunks

    def _spent(self, decodes: list[Chunk]) -> StepCost:
        """What of the step is given before prompts get their share."""
        return StepCost.of(Plan(0, tuple(decodes)))

    def _prompt_chunks(self, decodes: list[Chunk], now: float) -> list[Chunk]:
        """Share what is left of the budget among those with more to compute."""
        behind = [s for s in self.running if not s.decoding]
        if not behind:
            return []
        whole = not self.config.chunked_prefill
        spent = self._spent(decodes)
        strangers = self.queue.num_tenants > 1 and self._strangers_lately(decodes, behind)
        budget = prompt_budget(self.config, self.cost, spent, behind, strangers=strangers)
        if budget <= 0:
            return []
        if whole:
            budget = max(budget, max(need(s) for s in behind))
        chunks = []
        for sequence, tokens in share_budget(behind, budget, whole=whole):
            if sequence.state is not State.RUNNING:
                continue
            end = sequence.computed + tokens
            if self._take_pages(sequence, end, now):
                drawn = end == sequence.total and sequence.request.max_tokens > 0
                samples = sequence.fork_width if drawn else 0
                score = sequence.request.score_prompt and not sequence.num_outputs
                chunks.append(Chunk(sequence, sequence.computed, tokens, samples, (), score))
        return chunks

    def _strangers_lately(self, decodes: list[Chunk], behind: list[Sequence]) -> bool:
        """Whether tenants meet in this step, or did a short while ago: who asks again is not to
        come upon a long step that was planned in their absence.
        """
        if self._strangers(decodes, behind):
            self._strangers_until = self.statistics.steps + STRANGERS_LINGER
        return self.statistics.steps < self._strangers_until

    def _strangers(self, decodes: list[Chunk], behind: list[Sequence]) -> bool:
        """Whether somebody decodes beside the prompts of another tenant."""
        tenants = {s.request.tenant for s in behind}
        return any({c.sequence.request.tenant} != tenants for c in decodes)

    # -- the step: pages --------------------------------------------------------------------------

    def _take_pages(self, sequence: Sequence, tokens: int, now: float) -> bool:
        """Give the sequence pages for ``tokens`` tokens, preempting others if need be.

        False where it must sit this step out (or was itself the one to go).
        """
        missing = self.pool.pages_for(tokens) - len(sequence.table)
        while self.pool.num_available < missing:
            if not self.admission.preempts:
                self._ended += self.fail(sequence, "The KV cache ran out of pages.", now)
                return False
            victim = self.choose_victim(self.running, self.queue, self.config.pin_after)
            if victim is None:
                return False
            self._preempt(victim, now)
            if victim is sequence:
                return False
        for _ in range(missing):
            self.pool.append(sequence.table)
        return True

    def _preempt(self, sequence: Sequence, now: float) -> None:
        lost = sequence.computed
        self._give_up_slot(sequence, now)
        sequence.preemptions += 1
        self.statistics.preemptions += 1
        self.statistics.recomputed_tokens += lost
        sequence.computed = 0
        sequence.drafts = ()
        sequence.waiting_since = now
        self._waiting.enter(sequence, WaitReason.PREEMPTED)
        self._events.append(
            events.Preempted(now, sequence.request.id, sequence.index, lost, sequence.preemptions)
        )

    # -- the step: commit -------------------------------------------------------------------------

    def commit(
        self, plan: Plan, outcomes: Seq[Outcome], now: float, seconds: float = 0.0
    ) -> list[Progress]:
        """Make a step's outcome true: one :class:`Outcome` for each chunk, in order.

        Parameters
        ----------
        seconds
            How long the step took, for the cost model; 0 teaches it nothing.

        Raises
        ------
        ValueError
            An outcome does not answer its chunk. Nothing has changed then.
        """
        plan.check(outcomes)
        progress: list[Progress] = []
        draws = prefill = 0
        for i, (chunk, outcome) in enumerate(zip(plan.chunks, outcomes, strict=True)):
            if chunk.sequence.state is not State.RUNNING:
                continue
            prefill += max(0, min(chunk.end, chunk.sequence.num_prompt) - chunk.start)
            for step in self._commit_chunk(chunk, outcome, now):
                step.chunk = i
                progress.append(step)
                draws += len(step.tokens)
        cost = StepCost.of(plan)
        self.cost.observe(cost, seconds)
        self.statistics.steps += 1
        self.statistics.generated_tokens += draws
        self.statistics.computed_tokens += cost.tokens
        self._events.append(
            events.Stepped(now, plan.step, cost.tokens, prefill, cost.batch, draws, seconds)
        )
        return progress

    def _commit_chunk(self, chunk: Chunk, outcome: Outcome, now: float) -> list[Progress]:
        sequence = chunk.sequence
        if outcome.error is not None:
            return self.fail(sequence, outcome.error, now)
        before = sequence.computed
        sequence.computed = chunk.end
        sequence.drafts = ()
        if sequence.catching_up and need(sequence) <= 1:
            self.slots.changes += 1
        if chunk.drafts:
            # What was rejected was computed in vain: the pages hold it until it is written over.
            return [self._extend(sequence, outcome.tokens, now, publish_from=before)]
        self._waiting.wake(self.cache.publish(sequence, before), now)
        if chunk.end == sequence.total and sequence.request.max_tokens == 0:
            return self._finish(sequence, FinishReason.LENGTH, now)
        if not chunk.samples:
            return [Progress(sequence, sequence.num_outputs, ())] if chunk.score else []
        if sequence.catching_up:
            sequence.catching_up = False
            self._events.append(
                events.Decoding(now, sequence.request.id, sequence.index, sequence.computed)
            )
        siblings = self._fork(sequence, now) if sequence.fork_width > 1 else []
        progress = []
        for sample, (member, token) in enumerate(
            zip([sequence, *siblings], outcome.tokens, strict=True)
        ):
            step = self._extend(member, (token,), now)
            step.sample = sample
            progress.append(step)
        return progress

    def _extend(
        self,
        sequence: Sequence,
        tokens: tuple[int, ...],
        now: float,
        publish_from: int | None = None,
    ) -> Progress:
        """Append draws, up to the one that ends the sequence; finish if it is the end. With drafts
        only now is known which of the tokens computed since ``publish_from`` can be published.
        """
        first = sequence.num_outputs
        tokens, finish = sequence.extend(tokens, self.config.max_model_len)
        sequence.computed = min(sequence.computed, sequence.total - 1)
        self.queue.charge(sequence, OUTPUT_CHARGE * len(tokens))
        if publish_from is not None:
            self._waiting.wake(self.cache.publish(sequence, publish_from), now)
        if sequence.state is State.WAITING:
            self._waiting.tokens += len(tokens)
        if finish:
            self._finish(sequence, finish, now)
            self.admission.finished(sequence)
        return Progress(sequence, first, tokens, finish)

    def _fork(self, leader: Sequence, now: float) -> list[Sequence]:
        """Make the siblings of a leader whose prompt is computed. They share its full pages and
        get a copy of the last partial one; a sibling for which no page is left waits, as if
        preempted. Copies are made before the next step computes anything.
        """
        request, shared = leader.request, leader.computed // self.pool.page_size
        partial = leader.computed % self.pool.page_size > 0
        siblings = []
        for index in range(1, 1 + self.slots.fork(leader)):
            sibling = self._alive.add(request, index)
            sibling.num_cached = leader.num_cached
            sibling.started = leader.started
            sibling.keys = leader.keys[:shared]
            self.queue.arrive(sibling)
            self._deadlines.watch(sibling)
            if partial and not self.pool.num_available:
                sibling.waiting_since = now
                self._waiting.enter(sibling, WaitReason.PREEMPTED)
            else:
                self._copies += self.pool.fork(leader.table, sibling.table, leader.computed)
                sibling.computed = leader.computed
                sibling.state = State.RUNNING
                self.slots.take(sibling)
                self.queue.start(sibling)
            self._events.append(
                events.Forked(now, request.id, index, leader.index, len(sibling.table))
            )
            siblings.append(sibling)
        return siblings

    # -- inside -----------------------------------------------------------------------------------

    def _give_up_slot(self, sequence: Sequence, now: float) -> None:
        self.slots.give_up(sequence)
        self.queue.stop(sequence)
        woken = self.cache.stop_writing(sequence)
        self.pool.clear(sequence.table)
        self._waiting.wake(woken, now)

    def _finish(
        self, sequence: Sequence, reason: FinishReason, now: float, error: str | None = None
    ) -> list[Progress]:
        """Take a sequence out. One progress for it, and one for each sample it never forked into:
        until then it stood for them.
        """
        request = sequence.request
        if sequence.state is State.RUNNING:
            self._give_up_slot(sequence, now)
        else:
            self._waiting.leave(sequence)
        sequence.state = State.FINISHED
        self.queue.leave(sequence)
        self._alive.remove(sequence)
        self._events.append(
            events.Finished(
                now, request.id, sequence.index, request.tenant, str(reason),
                sequence.num_prompt, sequence.num_outputs, sequence.num_cached,
                sequence.preemptions,
            )
        )  # fmt: skip
        ended = [Progress(sequence, sequence.num_outputs, (), reason, error)]
        for index in range(1, sequence.fork_width):
            unborn = Sequence(request, index)
            unborn.state = State.FINISHED
            ended.append(Progress(unborn, 0, (), reason, error, sample=index))
        return ended
