"""Who waits, and why: those in the queue and those parked on a prefix, with their books."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from turnstile.core import events
from turnstile.core.events import AnyEvent, WaitReason
from turnstile.core.fairness import QueuePolicy
from turnstile.core.pages import AuditError
from turnstile.core.request import Sequence, State


class Waiting:
    """Every sequence without a slot.

    Most stand in the queue. One that waits for a prefix which another sequence is computing is
    *parked* beside the queue, and not looked at before the prefix is there.

    Parameters
    ----------
    log
        Changes of reason are appended to it.
    """

    def __init__(self, queue: QueuePolicy, log: list[AnyEvent]) -> None:
        self.queue = queue
        self.tokens = 0
        """Tokens they have still to compute before their next output."""
        self._log = log
        self.parked: set[Sequence] = set()
        """Those for whom somebody is computing a prefix."""
        self._reasons: Counter[WaitReason] = Counter()

    def __len__(self) -> int:
        return len(self.queue) + len(self.parked)

    def __iter__(self) -> Iterator[Sequence]:
        """In the order they would start, the parked last. For people: O(n log n)."""
        yield from self.queue
        yield from sorted(self.parked, key=lambda s: s.place)

    def by_reason(self) -> dict[str, int]:
        """How many wait, by why."""
        return {str(reason): count for reason, count in self._reasons.items() if count}

    # -- in and out -------------------------------------------------------------------------------

    def enter(self, sequence: Sequence, reason: WaitReason) -> None:
        """Somebody new waits, or somebody who lost its slot."""
        sequence.state = State.WAITING
        sequence.wait_reason = reason
        self._reasons[reason] += 1
        self.tokens += sequence.total
        self.queue.push(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Somebody gets a slot, or ends without one."""
        self._reasons[sequence.wait_reason] -= 1
        self.tokens -= sequence.total
        if sequence in self.parked:
            self.parked.discard(sequence)
        else:
            self.queue.remove(sequence)

    # -- reasons ----------------------------------------------------------------------------------

    def explain(self, sequence: Sequence, reason: WaitReason, now: float) -> None:
        """Record why somebody in here still waits."""
        if sequence.wait_reason is not reason:
            self._reasons[sequence.wait_reason] -= 1
            self._reasons[reason] += 1
            sequence.wait_reason = reason
            self._log.append(events.Waiting(now, sequence.request.id, sequence.index, reason))

    def park(self, sequence: Sequence, now: float) -> None:
        """Take somebody out of the queue until :meth:`wake`."""
        self.queue.remove(sequence)
        self.parked.add(sequence)
        self.explain(sequence, WaitReason.PREFIX, now)

    def wake(self, sequences: Iterable[Sequence], now: float) -> None:
        """Those who are parked go back to their places in the queue; others are left alone."""
        for sequence in sequences:
            if sequence in self.parked:
                self.parked.discard(sequence)
                self.explain(sequence, WaitReason.QUEUED, now)
                self.queue.push(sequence)

    # -- the books --------------------------------------------------------------------------------

    def rebuild(self, sequences: Iterable[Sequence], now: float) -> None:
        """Write the books anew: these wait, and all of them stand in the queue, which has been
        rebuilt too.
        """
        self.tokens = 0
        self.parked.clear()
        self._reasons.clear()
        for sequence in sequences:
            self.enter(sequence, sequence.wait_reason)
            if sequence.wait_reason is WaitReason.PREFIX:
                self.explain(sequence, WaitReason.QUEUED, now)

    def audit(self, alive: Iterable[Sequence]) -> None:
        """Check the books against all who are alive; raises :class:`AuditError`."""
        waiting = [s for s in alive if s.state is State.WAITING]
        if len(waiting) != len(self) or set(waiting) != set(self):
            raise AuditError(f"{len(waiting)} sequences wait, but {len(self)} stand in line.")
        tokens = sum(s.total for s in waiting)
        if tokens != self.tokens:
            raise AuditError(f"Those waiting have {tokens} tokens, counted {self.tokens}.")
        reasons = Counter(str(s.wait_reason) for s in waiting)
        if reasons != self.by_reason():
            raise AuditError(f"They wait for {dict(reasons)}, counted {self.by_reason()}.")
        for sequence in self.parked:
            if sequence.wait_reason is not WaitReason.PREFIX:
                raise AuditError(f"{sequence} is parked for {sequence.wait_reason}.")
