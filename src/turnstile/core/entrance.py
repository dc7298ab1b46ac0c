"""A round of admission: who of those waiting may start now, and why the others may not.

The queue says who is next (:mod:`fairness`), the admission policy who fits (:mod:`admission`); the
rules here are how far down the queue to look. Somebody who does not fit may be overtaken by those
behind, but by no more than ``max_skips`` of them; and a tenant that runs already leaves a slot,
with pages, to the tenants that run nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from turnstile.core.admission import AdmissionPolicy, Candidate, Outlook
from turnstile.core.events import WaitReason
from turnstile.core.prefix_cache import PrefixCache
from turnstile.core.request import Sequence
from turnstile.core.settings import SchedulerConfig
from turnstile.core.slots import Slots
from turnstile.core.waiting import Waiting


class Entrance:
    """Decides who of ``waiting`` gets one of the ``slots``."""

    def __init__(
        self,
        config: SchedulerConfig,
        slots: Slots,
        waiting: Waiting,
        cache: PrefixCache,
        admission: AdmissionPolicy,
    ) -> None:
        self.config = config
        self.slots = slots
        self.waiting = waiting
        self.queue = waiting.queue
        self.cache = cache
        self.pool = cache.pool
        self.admission = admission
        self._typical_pages = 0.0
        self._outlook = Outlook(0)

    def admit(self, now: float) -> Iterator[Candidate]:
        """Yield who may start, in the queue's order, while slots and pages last.

        The caller starts each before it asks for the next: the next one must fit beside it.
        """
        max_skips = self.config.max_skips
        aside: list[Sequence] = []
        self._outlook = Outlook(self.slots.most_pages)
        while (sequence := self.queue.next()) is not None:
            found = self._look_at(sequence)
            if isinstance(found, Candidate):
                yield found
                self._outlook = Outlook(self.slots.most_pages)
                for other in aside:
                    other.skipped += 1
            elif isinstance(found, bytes):
                self.waiting.park(sequence, now)
                self.cache.wait(sequence, found)
            elif found is WaitReason.TENANT_TURN:
                # What is kept free is for other tenants: who takes it overtakes nobody here.
                self.waiting.explain(sequence, found, now)
                self.queue.set_tenant_aside(sequence)
            else:
                self.waiting.explain(sequence, found, now)
                self.queue.set_aside(sequence)
                aside.append(sequence)
                if found is WaitReason.SLOTS and not self.slots.free:
                    break
            if len(aside) > max_skips or any(s.skipped >= max_skips for s in aside):
                break
        self.queue.end_round()

    def learn(self, sequence: Sequence) -> None:
        """Learn from an admission how many pages a typical request takes."""
        pages = self.pool.pages_for(sequence.total + self.admission.remaining(sequence))
        self._typical_pages += 0.05 * (pages - self._typical_pages)

    def _look_at(self, sequence: Sequence) -> Candidate | bytes | WaitReason:
        """The candidate that may start; or the page key that it should wait for; or why it waits.
        Nothing changes but what is remembered of those who do not fit.
        """
        free_slots = self.slots.free
        if sequence.fork_width > free_slots:
            return WaitReason.SLOTS
        reserve = self._reserve_against(sequence)
        if reserve and sequence.fork_width + self.config.reserved_slots > free_slots:
            return WaitReason.TENANT_TURN
        if self._still_blocked(sequence):
            return WaitReason.PAGES
        candidate = Candidate(sequence, self.cache.match(sequence))
        key = self.cache.awaited_key(sequence, len(candidate.matched))
        if key is not None:
            return key
        slots = self.slots
        if not self.admission.fits(candidate, slots.running, self.pool, reserve, self._outlook):
            sequence.blocked = (self.slots.changes, len(candidate.matched))
            return WaitReason.PAGES
        return candidate

    def _still_blocked(self, sequence: Sequence) -> bool:
        """Whether it cannot fit because it did not, and nothing has happened since. O(1), so that
        a long prompt at the head costs nothing while it waits.

        Decoding makes no room: what a sequence takes now it needed in the end already, and a
        forecast that was too short only grows. Evictions make none either. Room comes with a
        change in the slots, or when somebody publishes the next page of this very prompt.
        """
        changes, matched = sequence.blocked
        return changes == self.slots.changes and not self.cache.has_page(sequence, matched)

    def _reserve_against(self, sequence: Sequence) -> int:
        """Pages this sequence must leave for tenants that run nothing; 0 also means no slots."""
        config = self.config
        if self.queue.num_tenants < 2 or config.max_num_seqs < 8 * config.reserved_slots:
            return 0
        if not config.reserved_slots or not self.queue.num_running(sequence.request.tenant):
            return 0
        pages = config.reserved_slots * round(self._typical_pages)
        return max(1, min(pages, self.pool.num_pages // 8))
