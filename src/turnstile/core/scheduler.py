"""The turnstile: at every step finished sequences leave, waiting ones enter, one plan comes out.

There is no prefill phase and no decode phase (Orca, OSDI 2022; chunked prefill after Sarathi,
OSDI 2024): every running sequence has ``computed`` tokens of ``total``, and a step moves
``computed`` forward by a chunk. A chunk that reaches the newest token is sampled.

A step, from the caller's side::

    plan = scheduler.plan(now)                      takes pages; advances nothing
    outcomes = run(plan)                            may be repeated: a plan is a value
    progress = scheduler.commit(plan, outcomes, now, seconds)

The work of a step is O(tokens scheduled + membership changes): never O(context), never O(waiting).
The parts are in their own modules: who is next (:mod:`fairness`), who fits (:mod:`admission`), who
must go (:mod:`preemption`), how the budget is shared among prompts (:mod:`chunking`).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Seq

from turnstile.core import events
from turnstile.core.admission import AdmissionPolicy, Candidate, NeverFitsError, check_fits
from turnstile.core.chunking import share_budget
from turnstile.core.cost import CostModel, StepCost
from turnstile.core.events import AnyEvent, WaitReason
from turnstile.core.fairness import QueuePolicy
from turnstile.core.pages import PagePool
from turnstile.core.plan import Chunk, Outcome, Plan, Progress
from turnstile.core.preemption import VictimPolicy, choose_victim
from turnstile.core.prefix_cache import PrefixCache
from turnstile.core.request import FinishReason, Request, Sequence, State
from turnstile.core.settings import SchedulerConfig as SchedulerConfig
from turnstile.core.settings import Statistics as Statistics

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
        self.running: list[Sequence] = []
        """In order of admission: the oldest first."""
        self.waiting_tokens = 0
        """Tokens that those waiting have still to compute before their next output."""
        self._alive: dict[str, list[Sequence]] = {}
        self._parked: set[Sequence] = set()
        self._reserved_forks = 0
        self._copies: list[tuple[int, int]] = []
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._ended: list[Progress] = []
        self._events: list[AnyEvent] = []
        self._wait_reasons: Counter[WaitReason] = Counter()
        self._arrivals = 0
        self._num_alive = 0
        self._typical_pages = 0.0

    # -- queries ----------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether anything is waiting or running (or has ended without being reported)."""
        return bool(self.running or self._ended or self.num_waiting)

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return len(self.queue) + len(self._parked)

    @property
    def _free_slots(self) -> int:
        return self.config.max_num_seqs - len(self.running) - self._reserved_forks

    @property
    def waiting_by_reason(self) -> dict[str, int]:
        """How many wait, by why (of those never looked at yet: ``queued``)."""
        return {str(reason): count for reason, count in self._wait_reasons.items() if count}

    def sequences(self, request_id: str) -> list[Sequence]:
        """The live samples of a request, empty if there is none."""
        return list(self._alive.get(request_id, ()))

    def waiting(self) -> Iterator[Sequence]:
        """Those waiting in the order they would start. For people: O(n log n)."""
        yield from self.queue
        yield from sorted(self._parked, key=lambda s: s.place)

    def audit(self) -> None:
        """Check the pool's books against every live sequence; raises :class:`AuditError`."""
        self.pool.audit(s.table for group in self._alive.values() for s in group)

    # -- commands: arrivals and departures --------------------------------------------------------

    def submit(
        self,
        request: Request,
        *,
        outputs: Seq[int] = (),
        sample_index: int = 0,
        charged: float = 0.0,
        now: float,
    ) -> Sequence:
        """Queue a request, or one sample of it with the ``outputs`` it has already.

        Raises
        ------
        NeverFitsError
            It could not run even on an empty machine.
        """
        check_fits(request, self.config.max_model_len, self.pool.num_pages, self.pool.page_size)
        if request.n > self.config.max_num_seqs:
            raise NeverFitsError(
                f"n is {request.n} but the server runs at most {self.config.max_num_seqs} "
                "sequences at once.",
                "max_num_seqs",
            )
        sequence = self._new_sequence(request, sample_index, outputs, charged)
        sequence.fork_width = 1 if outputs or sample_index else request.n
        sequence.waiting_since = now
        self._watch_deadline(sequence)
        self.queue.arrive(sequence)
        self._enqueue(sequence, WaitReason.QUEUED)
        self._events.append(
            events.Queued(now, request.id, sequence.index, request.tenant, sequence.total)
        )
        if outputs and sequence.remaining <= 0:
            self._finish(sequence, FinishReason.LENGTH, now)
            self._ended.append(Progress(sequence, sequence.num_outputs, (), FinishReason.LENGTH))
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

        Only between steps: never between a plan and its commit. Unknown ids are ignored.
        """
        ended = []
        for sequence in self.sequences(request_id):
            if sample_index is None or sequence.index == sample_index:
                self._finish(sequence, reason, now)
                ended.append(Progress(sequence, sequence.num_outputs, (), reason))
        return ended

    def fail(self, sequence: Sequence, error: str, now: float) -> Progress:
        """End a sequence because of its own fault."""
        self.statistics.failed_rows += 1
        self._finish(sequence, FinishReason.ERROR, now)
        return Progress(sequence, sequence.num_outputs, (), FinishReason.ERROR, error)

    def take_ended(self) -> list[Progress]:
        """What ended outside a commit since the last call: deadlines, and rows without pages."""
        ended, self._ended = self._ended, []
        return ended

    def take_events(self) -> list[AnyEvent]:
        """Everything that happened since the last call."""
        taken, self._events = self._events, []
        return taken

    # -- the step: plan ---------------------------------------------------------------------------

    def plan(self, now: float) -> Plan:
        """Decide the next step and take the pages it needs. Empty when nothing can run."""
        self._expire(now)
        self._admit(now)
        prompts_alone = self.config.separate_prefill and any(not s.decoding for s in self.running)
        chunks = [] if prompts_alone else self._decode_chunks(now)
        chunks += self._prompt_chunks(chunks, now)
        planned = tuple(c for c in chunks if c.sequence.state is State.RUNNING)
        copies, self._copies = tuple(self._copies), []
        return Plan(self.statistics.steps, planned, copies)

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            *_, sequence = heapq.heappop(self._deadlines)
            if sequence.state is not State.FINISHED:
                self._finish(sequence, FinishReason.TIMEOUT, now)
                self._ended.append(
                    Progress(sequence, sequence.num_outputs, (), FinishReason.TIMEOUT)
                )

    def _admit(self, now: float) -> None:
        """Let waiting sequences in, in the queue's order, while slots and pages last."""
        aside: list[Sequence] = []
        while (sequence := self.queue.next()) is not None:
            reason = self._try_admit(sequence, now)
            if reason is None:
                for other in aside:
                    other.skipped += 1
            elif reason is WaitReason.TENANT_TURN:
                # What is kept free is for other tenants: who takes it overtakes nobody here.
                self._set_reason(sequence, reason, now)
                self.queue.set_tenant_aside(sequence)
            elif reason is not WaitReason.PREFIX:
                self._set_reason(sequence, reason, now)
                self.queue.set_aside(sequence)
                aside.append(sequence)
                if reason is WaitReason.SLOTS and not self._free_slots:
                    break
            if len(aside) > self.config.max_skips or any(
                s.skipped >= self.config.max_skips for s in aside
            ):
                break
        self.queue.end_round()

    def _try_admit(self, sequence: Sequence, now: float) -> WaitReason | None:
        """Start the sequence; or say why not, having changed nothing but (PREFIX) parked it."""
        free_slots = self._free_slots
        if sequence.fork_width > free_slots:
            return WaitReason.SLOTS
        reserve = self._reserve_against(sequence)
        if reserve and sequence.fork_width + self.config.reserved_slots > free_slots:
            return WaitReason.TENANT_TURN
        pages = self.cache.match(sequence)
        key = self.cache.awaited_key(sequence, len(pages))
        if key is not None:
            self.queue.take(sequence)
            self._parked.add(sequence)
            self.cache.wait(sequence, key)
            self._set_reason(sequence, WaitReason.PREFIX, now)
            return WaitReason.PREFIX
        if not self.admission.fits(Candidate(sequence, pages), self.running, self.pool, reserve):
            return WaitReason.PAGES
        self._start(sequence, pages, now)
        return None

    def _reserve_against(self, sequence: Sequence) -> int:
        """Pages this sequence must leave for tenants that run nothing; 0 also means no slots."""
        config = self.config
        if self.queue.num_tenants < 2 or config.max_num_seqs < 8 * config.reserved_slots:
            return 0
        if not config.reserved_slots or not self.queue.num_running(sequence.request.tenant):
            return 0
        pages = config.reserved_slots * round(self._typical_pages)
        return max(1, min(pages, self.pool.num_pages // 8))

    def _start(self, sequence: Sequence, pages: list[int], now: float) -> None:
        self.queue.take(sequence)
        self._drop_wait(sequence)
        self.pool.hold(sequence.table, pages)
        cached = len(pages) * self.pool.page_size
        sequence.computed = cached
        self.cache.count(sequence, cached)
        self.cache.start_writing(sequence)
        sequence.state = State.RUNNING
        sequence.catching_up = True
        sequence.skipped = 0
        self.running.append(sequence)
        self._reserved_forks += sequence.fork_width - 1
        self.queue.start(sequence)
        first = sequence.started is None
        if first:
            sequence.started = now
            sequence.num_cached = min(cached, sequence.num_prompt)
            self._typical_pages += 0.05 * (
                self.pool.pages_for(sequence.total + self.admission.remaining(sequence))
                - self._typical_pages
            )
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

    def _prompt_chunks(self, decodes: list[Chunk], now: float) -> list[Chunk]:
        """Share what is left of the budget among those with more to compute."""
        behind = [s for s in self.running if not s.decoding]
        if not behind:
            return []
        config = self.config
        spent = StepCost.of(Plan(0, tuple(decodes)))
        budget = config.max_num_batched_tokens
        if config.target_itl is not None and decodes:
            budget = self.cost.budget(config.target_itl, spent, budget)
        left = min(
            max(budget - spent.tokens, config.min_chunk),
            config.max_num_batched_tokens - spent.tokens,
        )
        if left <= 0:
            return []
        if not config.chunked_prefill:
            left = max(left, max(s.total - s.computed for s in behind))
        chunks = []
        for sequence, tokens in share_budget(behind, left, whole=not config.chunked_prefill):
            if sequence.state is not State.RUNNING:
                continue
            end = sequence.computed + tokens
            if self._take_pages(sequence, end, now):
                drawn = end == sequence.total and sequence.request.max_tokens > 0
                samples = sequence.fork_width if drawn else 0
                score = sequence.request.score_prompt and not sequence.num_outputs
                chunks.append(Chunk(sequence, sequence.computed, tokens, samples, (), score))
        return chunks

    # -- the step: pages --------------------------------------------------------------------------

    def _take_pages(self, sequence: Sequence, tokens: int, now: float) -> bool:
        """Give the sequence pages for ``tokens`` tokens, preempting others if need be.

        False where it must sit this step out (or was itself the one to go).
        """
        missing = self.pool.pages_for(tokens) - len(sequence.table)
        while self.pool.num_available < missing:
            if not self.admission.preempts:
                self._finish(sequence, FinishReason.ERROR, now)
                self.statistics.failed_rows += 1
                self._ended.append(
                    Progress(sequence, sequence.num_outputs, (), FinishReason.ERROR,
                             "The KV cache ran out of pages.")
                )  # fmt: skip
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
        self._enqueue(sequence, WaitReason.PREEMPTED)
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
        _check_outcomes(plan, outcomes)
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
            return [self.fail(sequence, outcome.error, now)]
        before = sequence.computed
        rejected = len(chunk.drafts) + 1 - len(outcome.tokens) if chunk.drafts else 0
        sequence.computed = chunk.end - rejected
        sequence.drafts = ()
        if chunk.drafts:
            # Accepted drafts are tokens now, but the last draw is not computed yet.
            return [self._extend(sequence, outcome.tokens, before, now)]
        self._wake(self.cache.publish(sequence, before), now)
        if chunk.end == sequence.total and sequence.request.max_tokens == 0:
            self._finish(sequence, FinishReason.LENGTH, now)
            return [Progress(sequence, 0, (), FinishReason.LENGTH)]
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
            step = self._extend(member, (token,), member.computed, now)
            step.sample = sample
            progress.append(step)
        return progress

    def _extend(
        self, sequence: Sequence, tokens: tuple[int, ...], before: int, now: float
    ) -> Progress:
        """Append draws, up to the one that ends the sequence; publish; finish if it is the end."""
        request = sequence.request
        first = sequence.num_outputs
        taken: list[int] = []
        finish = None
        for token in tokens:
            sequence.tokens.append(token)
            taken.append(token)
            if token in request.stop_ids and sequence.num_outputs > request.min_tokens:
                finish = FinishReason.STOP
            elif sequence.remaining == 0 or sequence.total >= self.config.max_model_len:
                finish = FinishReason.LENGTH
            if finish:
                break
        sequence.computed = min(sequence.computed, sequence.total - 1)
        self.queue.charge(sequence, OUTPUT_CHARGE * len(taken))
        if sequence.state is State.RUNNING:
            self._wake(self.cache.publish(sequence, before), now)
        else:
            self.waiting_tokens += len(taken)
        if finish:
            self._finish(sequence, finish, now)
            self.admission.finished(sequence)
        return Progress(sequence, first, tuple(taken), finish)

    def _fork(self, leader: Sequence, now: float) -> list[Sequence]:
        """Make the siblings of a leader whose prompt is computed. They share its full pages and
        get a copy of the last partial one; a sibling for which no page is left waits, as if
        preempted. Copies are made before the next step computes anything.
        """
        request, page_size = leader.request, self.pool.page_size
        full = leader.computed // page_size
        partial = leader.computed % page_size
        width, leader.fork_width = leader.fork_width, 1
        self._reserved_forks -= width - 1
        siblings = []
        for index in range(1, width):
            sibling = self._new_sequence(request, index, (), 0.0)
            sibling.num_cached = leader.num_cached
            sibling.started = leader.started
            sibling.keys = leader.keys[:full]
            self.queue.arrive(sibling)
            self._watch_deadline(sibling)
            if partial and not self.pool.num_available:
                sibling.waiting_since = now
                self._enqueue(sibling, WaitReason.PREEMPTED)
            else:
                self.pool.hold(sibling.table, leader.table.pages[:full])
                if partial:
                    target = self.pool.append(sibling.table)
                    self._copies.append((leader.table.pages[full], target))
                sibling.computed = leader.computed
                sibling.state = State.RUNNING
                self.running.append(sibling)
                self.queue.start(sibling)
            self._events.append(
                events.Forked(now, request.id, index, leader.index, len(sibling.table))
            )
            siblings.append(sibling)
        return siblings

    # -- inside -----------------------------------------------------------------------------------

    def _new_sequence(
        self, request: Request, index: int, outputs: Seq[int], charged: float
    ) -> Sequence:
        self._arrivals += 1
        self._num_alive += 1
        sequence = Sequence(request, index, outputs, charged=charged, arrival_order=self._arrivals)
        self._alive.setdefault(request.id, []).append(sequence)
        return sequence

    def _watch_deadline(self, sequence: Sequence) -> None:
        deadline = sequence.request.deadline
        if deadline is None:
            return
        heapq.heappush(self._deadlines, (deadline, sequence.arrival_order, sequence))
        if len(self._deadlines) > 2 * self._num_alive + 256:
            # Most of them have ended long before their time: let go of them.
            self._deadlines = [d for d in self._deadlines if d[2].state is not State.FINISHED]
            heapq.heapify(self._deadlines)

    def _enqueue(self, sequence: Sequence, reason: WaitReason) -> None:
        sequence.state = State.WAITING
        sequence.wait_reason = reason
        self._wait_reasons[reason] += 1
        self.waiting_tokens += sequence.total
        self.queue.push(sequence)

    def _drop_wait(self, sequence: Sequence) -> None:
        self._wait_reasons[sequence.wait_reason] -= 1
        self.waiting_tokens -= sequence.total

    def _set_reason(self, sequence: Sequence, reason: WaitReason, now: float) -> None:
        if sequence.wait_reason is not reason:
            self._wait_reasons[sequence.wait_reason] -= 1
            self._wait_reasons[reason] += 1
            sequence.wait_reason = reason
            self._events.append(events.Waiting(now, sequence.request.id, sequence.index, reason))

    def _wake(self, sequences: list[Sequence], now: float) -> None:
        """Those who waited for a prefix go back to their place in the queue."""
        for sequence in sequences:
            if sequence in self._parked:
                self._parked.discard(sequence)
                self._set_reason(sequence, WaitReason.QUEUED, now)
                self.queue.push(sequence)

    def _give_up_slot(self, sequence: Sequence, now: float) -> None:
        self.running.remove(sequence)
        self._reserved_forks -= sequence.fork_width - 1
        self.queue.stop(sequence)
        woken = self.cache.stop_writing(sequence)
        self.pool.clear(sequence.table)
        self._wake(woken, now)

    def _finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        request = sequence.request
        if sequence.state is State.RUNNING:
            self._give_up_slot(sequence, now)
        else:
            self._drop_wait(sequence)
            if sequence in self._parked:
                self._parked.discard(sequence)
            else:
                self.queue.remove(sequence)
        sequence.state = State.FINISHED
        self.queue.leave(sequence)
        group = self._alive[request.id]
        group.remove(sequence)
        self._num_alive -= 1
        if not group:
            del self._alive[request.id]
        self._events.append(
            events.Finished(
                now, request.id, sequence.index, request.tenant, str(reason),
                sequence.num_prompt, sequence.num_outputs, sequence.num_cached,
                sequence.preemptions,
            )
        )  # fmt: skip


def _check_outcomes(plan: Plan, outcomes: Seq[Outcome]) -> None:
    if len(outcomes) != len(plan.chunks):
        raise ValueError(f"{len(plan.chunks)} chunks but {len(outcomes)} outcomes.")
    for chunk, outcome in zip(plan.chunks, outcomes, strict=True):
        if outcome.error is not None:
            continue
        draws = len(outcome.tokens)
        if not (1 <= draws <= chunk.samples if chunk.drafts else draws == chunk.samples):
            raise ValueError(
                f"{chunk.samples} draws were asked for, not {draws}, of {chunk.sequence}."
            )
