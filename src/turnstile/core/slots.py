"""The places in the batch: who has one, and how many are promised to forks."""

from __future__ import annotations

from collections.abc import Iterable

from turnstile.core.admission import pages_at_most
from turnstile.core.pages import AuditError
from turnstile.core.request import Sequence, State


class Slots:
    """``limit`` places. A request with ``n > 1`` takes one, and reserves those of its siblings
    until they fork.
    """

    def __init__(self, limit: int, page_size: int) -> None:
        self.limit = limit
        self._page_size = page_size
        self.running: list[Sequence] = []
        """In order of admission: the oldest first."""
        self.reserved = 0
        """Places of siblings to come."""
        self.most_pages = 0
        """Pages that all who have a place, or were promised one, can come to hold."""
        self.changes = 0
        """Counts the changes that may make room: a sequence comes, leaves, forks or begins to
        decode. While this stands still, a sequence that did not fit still does not.
        """

    @property
    def free(self) -> int:
        """Places that nobody has and nobody was promised."""
        return self.limit - len(self.running) - self.reserved

    def take(self, sequence: Sequence) -> None:
        """Give a place to a sequence, and promise those of its siblings."""
        self.changes += 1
        self.running.append(sequence)
        self.reserved += sequence.fork_width - 1
        self.most_pages += pages_at_most(sequence, self._page_size)

    def give_up(self, sequence: Sequence) -> None:
        """A sequence leaves, and whoever it would have forked into."""
        self.changes += 1
        self.running.remove(sequence)
        self.reserved -= sequence.fork_width - 1
        self.most_pages -= pages_at_most(sequence, self._page_size)

    def fork(self, leader: Sequence) -> int:
        """The siblings of a leader come to be: give up the places promised to them, which they are
        about to take. Returns how many they are.
        """
        self.changes += 1
        siblings = leader.fork_width - 1
        self.most_pages -= pages_at_most(leader, self._page_size)
        leader.fork_width = 1
        self.most_pages += pages_at_most(leader, self._page_size)
        self.reserved -= siblings
        return siblings

    def rebuild(self, running: Iterable[Sequence]) -> None:
        """Write the books anew: these run, in order of admission."""
        self.running[:] = running
        self.reserved = sum(s.fork_width - 1 for s in self.running)
        self.most_pages = sum(pages_at_most(s, self._page_size) for s in self.running)
        self.changes += 1

    def audit(self, alive: Iterable[Sequence]) -> None:
        """Check the books against all who are alive; raises :class:`AuditError`."""
        running = {s for s in alive if s.state is State.RUNNING}
        if len(running) != len(self.running) or running != set(self.running):
            raise AuditError(f"{len(running)} sequences run, but {len(self.running)} have a slot.")
        promised = sum(s.fork_width - 1 for s in self.running)
        if promised != self.reserved:
            raise AuditError(f"{promised} slots are promised to forks, counted {self.reserved}.")
        most_pages = sum(pages_at_most(s, self._page_size) for s in self.running)
        if most_pages != self.most_pages:
            raise AuditError(f"They hold up to {most_pages} pages, counted {self.most_pages}.")
        if self.free < 0:
            raise AuditError(
                f"{len(self.running)} run and {self.reserved} are to, of {self.limit}."
            )
