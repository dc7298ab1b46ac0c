"""Pages and slots as the engine's pictures tell of them: :class:`LiveMap`.

The engine sends differences (:mod:`turnstile.engine.painter`); this is their sum. It knows nothing
of HTTP, nor who may see what: that is :mod:`turnstile.server.watch.live_view`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from turnstile.core.pages import PageState
from turnstile.engine.protocol import Occupant, Picture


@dataclass(slots=True)
class Occupied:
    """A slot: who is in it, how far they are, and their page table."""

    who: Occupant
    computed: int = 0
    total: int = 0
    pages: list[int] = field(default_factory=list)


class LiveMap:
    """The pool and the slots of the engine that runs now.

    Attributes
    ----------
    states
        A byte a page: its :class:`PageState`.
    cached
        The cached pages, the one that goes first at the front.
    slots
        Who has a slot, by the name the pictures give them, in order of admission.
    before
        Of the pages that the newest picture told of: their states in the one before.
    released
        The pages that each tenant's sequences have let go with the newest picture.
    """

    def __init__(self) -> None:
        self.states = bytearray()
        self.cached: dict[int, None] = {}
        self.slots: dict[int, Occupied] = {}
        self.before: dict[int, int] = {}
        self.released: dict[str, set[int]] = {}

    def clear(self, num_pages: int = 0) -> None:
        """Nobody holds anything: a new engine, or none."""
        self.states = bytearray(num_pages)
        self.cached.clear()
        self.slots.clear()

    def take(self, picture: Picture) -> None:
        """Add a picture. O(what it tells + running)."""
        if picture.whole:
            self.clear(len(picture.pages))
        self.before = {page: self.states[page] for page in picture.pages}
        self.released = {}
        for name in picture.left:
            self._release(name)
        for who in picture.entered:
            self.slots[who.name] = Occupied(who)
        # Who was preempted and let in again since has gone to the end.
        self.slots = {name: self.slots[name] for name in picture.running}
        told = zip(picture.running, picture.computed, picture.totals, strict=True)
        for name, computed, total in told:
            slot = self.slots[name]
            slot.computed, slot.total = computed, total
        for name, anew, pages in picture.tables:
            if anew:
                self._release(name)
                self.slots[name].pages = list(pages)
            else:
                self.slots[name].pages += pages
        for page, state in zip(picture.pages, picture.states, strict=True):
            self.states[page] = state
            self.cached.pop(page, None)
            if state == PageState.CACHED:
                self.cached[page] = None

    def _release(self, name: int) -> None:
        slot = self.slots.get(name)
        if slot is not None:
            self.released.setdefault(slot.who.tenant, set()).update(slot.pages)

    def count(self, state: PageState) -> int:
        """How many pages are in a state. O(pages)."""
        return self.states.count(state)

    def pages_of(self, tenant: str) -> set[int]:
        """The pages that sequences of a tenant hold."""
        return {
            page for slot in self.slots.values() if slot.who.tenant == tenant for page in slot.pages
        }
