"""The turnstile: at every step finished sequences leave, waiting ones enter, one plan comes out.

There is no prefill phase and no decode phase (Orca, OSDI 2022; chunked prefill after Sarathi,
OSDI 2024): every running sequence has ``computed`` tokens of ``total``, and a step moves
``computed`` forward by a chunk. A chunk that reaches the newest token is sampled.

A step, from the caller's side::

    plan = scheduler.plan(now)                      takes pages; advances nothing
    outcomes = run(plan)                            may be repeated: a plan is a value
    progress = scheduler.commit(plan, outcomes, now, seconds)

The work of a step is O(tokens scheduled + membership changes): never O(context), never O(waiting).
Here is what a step does, in what order; the parts are in their own modules. Where everybody is, and
what a start, a fork or an end changes, is in :mod:`books`: who waits (:mod:`waiting`), in which
place (:mod:`slots`), whose time is up (:mod:`deadlines`). What is decided: who is next
(:mod:`fairness`), who fits (:mod:`admission`), who of them starts (:mod:`entrance`), who must go
(:mod:`preemption`), how the budget is shared among prompts (:mod:`chunking`). What came of the step
is written down by :mod:`commit`.

What can be put in from outside: the page pool, the two policies, the choice of the victim, the cost
model, and who of those that run a step looks at (:mod:`attendance`).
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from turnstile.core import events
from turnstile.core.admission import AdmissionPolicy, check_fits, check_slots
from turnstile.core.attendance import Attendance
from turnstile.core.books import Books
from turnstile.core.chunking import STRANGERS_LINGER, need, prompt_budget, share_budget
from turnstile.core.commit import Commit, CommitError
from turnstile.core.cost import CostModel, StepCost
from turnstile.core.entrance import Entrance
from turnstile.core.events import AnyEvent
from turnstile.core.fairness import QueuePolicy
from turnstile.core.pages import PagePool
from turnstile.core.plan import Chunk, Outcome, Plan, Progress
from turnstile.core.preemption import VictimPolicy, choose_victim
from turnstile.core.request import FinishReason, Request, Sequence, State
from turnstile.core.settings import SchedulerConfig as SchedulerConfig
from turnstile.core.settings import Statistics as Statistics

MOST_MISTAKES = 3
"""How often a sequence may leave the books wrong before it fails."""


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
        attendance: Attendance | None = None,
    ) -> None:
        self.config = config
        self.pool = pool
        self.admission = admission
        admission.lockstep = not config.speculation
        self.queue = queue
        self.cost = cost or CostModel()
        self.choose_victim = victim
        self.attendance = attendance or Attendance()
        self.books = Books(config, pool, queue, self.attendance, prefix_caching=prefix_caching)
        self.cache = self.books.cache
        self.statistics = self.books.statistics
        self.slots = self.books.slots
        self.running = self.slots.running
        """In order of admission: the oldest first."""
        self.entrance = Entrance(config, self.slots, self.books.waiting, self.cache, admission)
        self._commit = Commit(self.books, admission, config.max_model_len)
        self._strangers_until = 0

    # -- queries ----------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether anything is waiting or running (or has ended without being reported)."""
        return bool(self.running or self.books.ended or self.num_waiting)

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return len(self.books.waiting)

    @property
    def waiting_tokens(self) -> int:
        """Tokens that those waiting have still to compute before their next output."""
        return self.books.waiting.tokens

    @property
    def waiting_by_reason(self) -> dict[str, int]:
        """How many wait, by why (of those never looked at yet: ``queued``)."""
        return self.books.waiting.by_reason()

    def sequences(self, request_id: str) -> list[Sequence]:
        """The live samples of a request, empty if there is none."""
        return self.books.alive.of(request_id)

    def waiting(self) -> Iterator[Sequence]:
        """Those waiting in the order they would start. For people: O(n log n)."""
        yield from self.books.waiting

    def audit(self) -> None:
        """Check all books against every live sequence; raises :class:`AuditError`. O(pages)."""
        self.books.audit()

    def repair(self, now: float) -> int:
        """Write all books anew from what cannot be doubted, and go on: after a fault. O(pages +
        tokens). Only between a plan and its commit, or between steps.

        Whose pages are in doubt is computed again; of a plan that was made before, its commit
        leaves those out. Whose own page table was found wrong, or whose outcome could not be
        committed, for the ``MOST_MISTAKES``-th time fails: something about it does that. Returns
        how many are computed again.
        """
        lost, wrong = self.books.repair(now)
        for sequence in wrong:
            sequence.mistakes += 1
        for sequence in list(self.books.alive):
            if sequence.mistakes >= MOST_MISTAKES:
                self.books.ended += self.fail(sequence, _MISTAKEN, now)
        return len(lost)

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
            Service its tenant has paid for it already, in an engine before this one. Above 0 the
            prompt counts as paid for.
        served
            The tenant's virtual counter in that engine: it goes on from there, and is not lifted
            to the others' level as a tenant that was idle would be. None for a new request.

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
        samples = range(sample_index, sample_index + fork_width)
        self.books.alive.check_new(request.id, samples)
        sequence = self.books.enter(
            request, sample_index, outputs,
            fork_width=fork_width, charged=charged, served=served, now=now,
        )  # fmt: skip
        if outputs and sequence.remaining <= 0:
            self.books.ended += self.books.finish(sequence, FinishReason.LENGTH, now)
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
                ended += self.books.finish(sequence, reason, now)
                if reason is FinishReason.STOP:
                    self.admission.learn(sequence.request.tenant, sequence.num_outputs)
        return ended

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Give up what was computed for a running sequence: it waits to be computed again. For
        pages whose content is lost; what runs out of pages is preempted in :meth:`plan`.
        """
        self.books.preempt(sequence, now)

    def fail(self, sequence: Sequence, error: str, now: float) -> list[Progress]:
        """End a sequence because of its own fault, and whatever it was still to fork into."""
        return self.books.fail(sequence, error, now)

    def take_ended(self) -> list[Progress]:
        """What ended outside a commit since the last call: deadlines, and rows without pages."""
        ended, self.books.ended = self.books.ended, []
        return ended

    def take_events(self) -> list[AnyEvent]:
        """Everything that happened since the last call."""
        taken = self.books.events.copy()
        self.books.events.clear()
        return taken

    # -- the step: plan ---------------------------------------------------------------------------

    def plan(self, now: float) -> Plan:
        """Decide the next step and take the pages it needs. Empty when nothing can run."""
        books = self.books
        self.attendance.begin()
        for late in books.deadlines.due(now):
            self.books.ended += books.finish(late, FinishReason.TIMEOUT, now)
        for candidate in self.entrance.admit(now):
            if candidate.sequence.started is None:
                self.entrance.learn(candidate.sequence)
            books.start(candidate, now)
        present = self.attendance.present()
        decoding = [s for s in present if s.decoding]
        behind = [s for s in present if not s.decoding] if len(decoding) < len(present) else []
        changes = self.slots.changes
        if self.config.separate_prefill and behind:
            decoding = []
        spare = self.config.max_num_batched_tokens - len(present)
        chunks = self._decode_chunks(decoding, spare, now)
        if behind:
            chunks += self._prompt_chunks(behind, chunks, now)
        if self.slots.changes != changes:  # somebody had to go after it was planned for
            chunks = [c for c in chunks if c.sequence.state is State.RUNNING]
        copies = tuple(books.copies)
        books.copies.clear()
        return Plan(self.statistics.steps, tuple(chunks), copies)

    def _decode_chunks(self, decoding: list[Sequence], spare: int, now: float) -> list[Chunk]:
        """A chunk for each sequence that has only its newest token left to compute.

        Sequences with drafts to verify, or a prompt to score, come last; the drafts of all of them
        together are at most ``spare`` tokens.
        """
        chunks: list[Chunk] = []
        special: list[Sequence] = []
        page_size = self.pool.page_size
        for sequence in decoding:
            if sequence.drafts or sequence.request.score_prompt:
                special.append(sequence)
                continue
            start, room = sequence.computed, len(sequence.table.pages) * page_size
            if sequence.state is State.RUNNING and (
                start < room or self._take_pages(sequence, start + 1, now)
            ):
                chunks.append(Chunk(sequence, start, 1, 1))
        if special:
            chunks += self._special_chunks(special, spare, now)
        return chunks

    def _special_chunks(self, special: list[Sequence], spare: int, now: float) -> list[Chunk]:
        """The newest token and drafts to verify; or the last token of a prompt to be scored."""
        chunks = []
        for sequence in special:
            if sequence.state is not State.RUNNING:
                continue
            if sequence.drafts and not self.config.speculation:
                raise ValueError("Drafts need a scheduler with speculation=True.")
            room = len(sequence.table) + self.pool.num_available  # nobody has to go for a draft
            most = min(spare, sequence.remaining, room * self.pool.page_size - sequence.computed)
            drafts = sequence.drafts[: max(0, most - 1)]
            spare -= len(drafts)
            count = 1 + len(drafts)
            if self._take_pages(sequence, sequence.computed + count, now):
                samples = count if sequence.request.max_tokens else 0
                score = sequence.request.score_prompt and not sequence.num_outputs
                chunks.append(Chunk(sequence, sequence.computed, count, samples, drafts, score))
        return chunks

    def _prompt_chunks(
        self, behind: list[Sequence], decodes: list[Chunk], now: float
    ) -> list[Chunk]:
        """Share what is left of the budget among those with more to compute."""
        behind = [s for s in behind if s.state is State.RUNNING]
        if not behind:
            return []
        whole = not self.config.chunked_prefill
        spent = StepCost.of(Plan(0, tuple(decodes))) + self.attendance.absent
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
        """Whether one tenant decodes beside another's prompts in this step, or did lately.

        The memory is for a tenant that pauses between two requests: it should not come back into
        the middle of a long step that was planned while it was away.
        """
        tenants = {s.request.tenant for s in behind}
        decoding = {c.sequence.request.tenant for c in decodes}
        decoding.update(self.attendance.absent_tenants())
        if any({tenant} != tenants for tenant in decoding):
            self._strangers_until = self.statistics.steps + STRANGERS_LINGER
        return self.statistics.steps < self._strangers_until

    # -- the step: pages --------------------------------------------------------------------------

    def _take_pages(self, sequence: Sequence, tokens: int, now: float) -> bool:
        """Give the sequence pages for ``tokens`` tokens, preempting others if need be.

        False where it must sit this step out (or was itself the one to go).
        """
        missing = self.pool.pages_for(tokens) - len(sequence.table)
        while self.pool.num_available < missing:
            if not self.admission.preempts:
                self.books.ended += self.fail(sequence, "The KV cache ran out of pages.", now)
                return False
            self.attendance.look()
            victim = self.choose_victim(self.running, self.queue, self.config.pin_after)
            if victim is None and sequence is self.running[0]:
                # Whoever chooses may spare everybody. Then all would wait for ever for pages that
                # they themselves hold; so the oldest, which waits for nobody, always gets them.
                victim = choose_victim(self.running, self.queue, self.config.pin_after)
            if victim is None:
                return False
            self.books.preempt(victim, now)
            if victim is sequence:
                return False
        for _ in range(missing):
            self.pool.append(sequence.table)
        return True

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
        CommitError
            Something else went wrong in the middle. What came before it is true and told in the
            error; what was being done, and whatever came after, is as if it had not been computed,
            and will be again. The books must be mended by :meth:`repair` before they are used.
        """
        plan.check(outcomes)
        progress: list[Progress] = []
        absent = self.attendance.absent
        self.statistics.steps += 1
        try:
            prefill = self._commit.write(plan, outcomes, now, progress)
            self.attendance.committed(plan, now)
            cost = StepCost.of(plan) + absent
            self.cost.observe(cost, seconds)
        except Exception as error:
            raise CommitError(progress) from error
        draws = absent.batch + sum([len(step.tokens) for step in progress])
        self.statistics.generated_tokens += draws
        self.statistics.computed_tokens += cost.tokens
        self.books.events.append(
            events.Stepped(now, plan.step, cost.tokens, prefill, cost.batch, draws, seconds)
        )
        return progress


_MISTAKEN = "The request left the books of the engine wrong each time it was computed."
