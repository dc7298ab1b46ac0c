"""Who of those that run a step looks at: an extension point of the scheduler.

:class:`Attendance` is what serves: everybody is present in every step. A subclass may leave out
sequences for which a step changes nothing but their length, as long as nobody can tell the
difference (:mod:`turnstile.simulate.fast_forward` does). The scheduler calls, in a step,

    begin        before anything is planned
    present      once the newcomers are in: for whom to plan; it takes the pages of the absent
    absent       what those left out add to the step
    look         before anybody's length or pages are compared with others'
    committed    once the outcomes of those present are true

and ``started`` and ``stopping`` whenever a sequence gets a slot, or is about to lose it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from turnstile.core.cost import NOTHING, StepCost
from turnstile.core.plan import Plan
from turnstile.core.request import Sequence

if TYPE_CHECKING:
    from turnstile.core.books import Books


class Attendance:
    """Everybody is present. See the module for when each method is called."""

    books: Books

    def bind(self, books: Books) -> None:
        """The books of the scheduler this belongs to, told once, before anything else."""
        self.books = books

    def begin(self) -> None:
        """A step is about to be planned: whoever must be in it has to be present."""

    def present(self) -> list[Sequence]:
        """Those to plan for, in order of admission. Pages of the others are taken here."""
        return list(self.books.slots.running)

    @property
    def absent(self) -> StepCost:
        """What those left out add to the step: a token each, with its context."""
        return NOTHING

    def absent_tenants(self) -> Collection[str]:
        """Whose they are."""
        return ()

    def look(self) -> None:
        """Bring the absent up to date: somebody is about to look at all who run."""

    def committed(self, plan: Plan, now: float) -> None:
        """The step is over: what ``plan`` said is true, and the absent have a token more too."""

    def started(self, sequence: Sequence) -> None:
        """A sequence has got a slot."""

    def stopping(self, sequence: Sequence) -> None:
        """A sequence is about to lose its slot, and must be up to date by the end of the call."""
