"""Where every sequence is, from its arrival to its end, and all that is written down of it.

    enter ──▶ waiting ──start──▶ running ──finish──▶ gone
                 ▲                │   │
                 └────preempt─────┘   └──fork──▶ siblings: running, or waiting for a page

Several books say where a sequence is: who is alive, who waits and why, who has a slot, whose time
is up when, which pages each holds, what the prefix cache knows, what its tenant was served. Each
change of state is one method here, which writes it into all of them. :meth:`Books.audit` checks
that they agree; :meth:`Books.repair` is for when they do not.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from turnstile.core import events
from turnstile.core.admission import Candidate
from turnstile.core.alive import Alive
from turnstile.core.attendance import Attendance
from turnstile.core.deadlines import Deadlines
from turnstile.core.events import AnyEvent, WaitReason
from turnstile.core.fairness import QueuePolicy
from turnstile.core.pages import PagePool
from turnstile.core.plan import Chunk, Progress
from turnstile.core.prefix_cache import PrefixCache
from turnstile.core.repair import believable, start_anew
from turnstile.core.request import FinishReason, Request, Sequence, State
from turnstile.core.settings import SchedulerConfig, Statistics
from turnstile.core.slots import Slots
from turnstile.core.waiting import Waiting


class Books:
    """See the module. Between two calls every book says the same."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: PagePool,
        queue: QueuePolicy,
        attendance: Attendance,
        *,
        prefix_caching: bool,
    ) -> None:
        self.pool = pool
        self.queue = queue
        self.attendance = attendance
        self.statistics = Statistics()
        self.cache = PrefixCache(pool, enabled=prefix_caching)
        self.slots = Slots(config.max_num_seqs, pool.page_size)
        self.events: list[AnyEvent] = []
        self.waiting = Waiting(queue, self.events)
        self.deadlines = Deadlines()
        self.alive = Alive()
        self.copies: list[tuple[int, int]] = []
        """Page copies of forks, to be made before the next step computes anything."""
        self.ended: list[Progress] = []
        """What ended outside of a commit, not told yet."""
        attendance.bind(self)

    # -- changes of state -------------------------------------------------------------------------

    def enter(
        self,
        request: Request,
        sample_index: int,
        outputs: Seq[int],
        *,
        fork_width: int,
        charged: float,
        served: float | None,
        now: float,
    ) -> Sequence:
        """A sequence comes to life, and waits."""
        sequence = self.alive.add(request, sample_index, outputs, charged)
        sequence.fork_width = fork_width
        sequence.waiting_since = now
        self.deadlines.watch(sequence)
        try:
            self.queue.arrive(sequence, served)
            self.waiting.enter(sequence, WaitReason.QUEUED)
        except Exception:
            # The queue may be anybody's code. Were the sequence left alive, a repair would put it
            # into the queue once more, and fail of the same.
            self.alive.remove(sequence)
            raise
        self.events.append(
            events.Queued(now, request.id, sequence.index, request.tenant, sequence.total)
        )
        return sequence

    def start(self, candidate: Candidate, now: float) -> None:
        """A sequence gets a slot, and the pages that the prefix cache has for it. The first time
        its tenant pays for the rest of its prompt, unless that was paid elsewhere.
        """
        sequence, pages = candidate.sequence, candidate.matched
        self.waiting.leave(sequence)
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
        if sequence.started is None:
            sequence.started = now
            sequence.num_cached = min(cached, sequence.num_prompt)
            if sequence.charged == 0.0:
                self.statistics.prompt_tokens += sequence.num_prompt
                self.statistics.cached_tokens += sequence.num_cached
                self.queue.charge(sequence, sequence.num_prompt - sequence.num_cached)
        self.events.append(
            events.Admitted(
                now, sequence.request.id, sequence.index, sequence.request.tenant, cached,
                len(pages), now - sequence.waiting_since,
            )
        )  # fmt: skip
        self.attendance.started(sequence)

    def preempt(self, sequence: Sequence, now: float) -> None:
        """A sequence gives slot and pages to others, and waits to be computed again."""
        self._give_up_slot(sequence, now)
        self._lose(sequence, now)
        self.waiting.enter(sequence, WaitReason.PREEMPTED)

    def fork(self, leader: Sequence, now: float) -> list[Sequence]:
        """Make the siblings of a leader whose prompt is computed. They share its full pages and
        get a copy of the last partial one; a sibling for which no page is left waits, as if
        preempted. Copies are made before the next step computes anything.
        """
        request, shared = leader.request, leader.computed // self.pool.page_size
        partial = leader.computed % self.pool.page_size > 0
        siblings = []
        for index in range(1, 1 + self.slots.fork(leader)):
            sibling = self.alive.add(request, index)
            sibling.num_cached = leader.num_cached
            sibling.started = leader.started
            sibling.keys = leader.keys[:shared]
            self.queue.arrive(sibling)
            self.deadlines.watch(sibling)
            if partial and not self.pool.num_available:
                sibling.waiting_since = now
                self.waiting.enter(sibling, WaitReason.PREEMPTED)
            else:
                self.copies += self.pool.fork(leader.table, sibling.table, leader.computed)
                sibling.computed = leader.computed
                sibling.state = State.RUNNING
                self.slots.take(sibling)
                self.queue.start(sibling)
                self.attendance.started(sibling)
            self.events.append(
                events.Forked(now, request.id, index, leader.index, len(sibling.table))
            )
            siblings.append(sibling)
        return siblings

    def publish(self, sequence: Sequence, before: int, now: float) -> None:
        """Let others find the pages that became full since ``before`` tokens were computed."""
        self.waiting.wake(self.cache.publish(sequence, before), now)

    def finish(
        self, sequence: Sequence, reason: FinishReason, now: float, error: str | None = None
    ) -> list[Progress]:
        """Take a sequence out. One progress for it, and one for each sample it never forked into:
        until then it stood for them.
        """
        request = sequence.request
        if sequence.state is State.RUNNING:
            self._give_up_slot(sequence, now)
        else:
            self.waiting.leave(sequence)
        sequence.state = State.FINISHED
        self.queue.leave(sequence)
        self.alive.remove(sequence)
        self.events.append(
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

    def fail(self, sequence: Sequence, error: str, now: float) -> list[Progress]:
        """End it because of its own fault, and whatever it was still to fork into."""
        self.statistics.failed_rows += 1
        return self.finish(sequence, FinishReason.ERROR, now, error)

    def take_back(self, chunk: Chunk, charged: float) -> None:
        """Undo what a commit did with a chunk before it broke off.

        The sequence is alive again, with its tokens, ``computed`` and ``charged`` as they were. The
        other books (slots, pages, waiting …) are not restored: :meth:`repair` must follow.
        """
        sequence, request_id = chunk.sequence, chunk.sequence.request.id
        self.queue.charge(sequence, charged - sequence.charged)
        sequence.computed = chunk.start
        sequence.state = State.RUNNING
        if chunk.samples:
            del sequence.tokens[chunk.end - len(chunk.drafts) :]
        family, undone = self.alive.of(request_id), [sequence.index]
        if chunk.samples > 1 and not chunk.drafts:
            # The chunk was to fork: before that only the leader of this request is alive.
            sequence.fork_width = chunk.samples
            family, undone = [], list(range(chunk.samples))
        if sequence not in family:
            family.append(sequence)
        self.events[:] = [
            event
            for event in self.events
            if not isinstance(event, events.Finished | events.Forked)
            or event.request_id != request_id
            or event.index not in undone
        ]
        self.alive.replace(request_id, family)

    def _give_up_slot(self, sequence: Sequence, now: float) -> None:
        self.attendance.stopping(sequence)
        self.slots.give_up(sequence)
        self.queue.stop(sequence)
        woken = self.cache.stop_writing(sequence)
        self.pool.clear(sequence.table)
        self.waiting.wake(woken, now)

    def _lose(self, sequence: Sequence, now: float) -> None:
        """What was computed for a sequence is gone."""
        lost = sequence.computed
        sequence.preemptions += 1
        self.statistics.preemptions += 1
        self.statistics.recomputed_tokens += lost
        sequence.computed = 0
        sequence.drafts = ()
        sequence.waiting_since = now
        self.events.append(
            events.Preempted(now, sequence.request.id, sequence.index, lost, sequence.preemptions)
        )

    # -- do they agree? ---------------------------------------------------------------------------

    def audit(self) -> None:
        """Check all books against every live sequence; raises :class:`AuditError`. O(pages)."""
        alive = list(self.alive)
        self.slots.audit(alive)
        self.pool.audit(s.table for s in alive)
        self.waiting.audit(alive)
        self.cache.audit(self.waiting.parked)
        self.queue.audit(alive)

    def repair(self, now: float) -> tuple[list[Sequence], list[Sequence]]:
        """Write all books anew, so that they agree. O(pages + tokens): after a fault.

        What is believed is that a sequence is alive, what it has drawn and what its tenant was
        served. Who runs keeps the pages about which no book says otherwise
        (:func:`~turnstile.core.repair.believable`); all others are computed again, which is always
        right. Cached pages that nobody holds are forgotten: who wrote to them nobody knows.

        Returns
        -------
        Those that ran and are computed again, and those of them whose own tables were wrong.
        """
        self.attendance.look()
        alive = [s for s in self.alive if s.state is not State.FINISHED]
        kept, wrong = believable(alive, self.slots.running, self.pool, self.copies)
        keeping = set(kept)
        ran = set(self.slots.running)
        lost = [s for s in alive if s not in keeping and (s in ran or s.state is State.RUNNING)]
        for sequence in lost:
            if sequence in ran:
                self.attendance.stopping(sequence)
            self._lose(sequence, now)
            sequence.wait_reason = WaitReason.PREEMPTED
        waiting = [s for s in alive if s not in keeping]
        for sequence in waiting:
            start_anew(sequence)
        self.copies.clear()
        self.alive.rebuild(alive)
        self.slots.rebuild(kept)
        self.pool.rebuild([s.table for s in kept])
        self.cache.rebuild(kept)
        self.queue.rebuild(alive)
        self.waiting.rebuild(waiting, now)
        self.deadlines.rebuild(alive)
        self.statistics.repairs += 1
        self.events.append(events.Repaired(now, len(lost), sum(map(len, (s.table for s in kept)))))
        return lost, wrong
