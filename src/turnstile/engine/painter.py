"""The pool and the slots as pictures, for whoever watches the live map: :class:`Painter`.

There is one only while somebody looks. The pool then notes which pages have changed
(:class:`~turnstile.core.pages.PageChanges`), and every ``interval`` a picture says what became of
them: O(changes + running), however large the pool is.
"""

from __future__ import annotations

from itertools import islice

from turnstile.core.pages import PageChanges, PageState, PageTable
from turnstile.core.request import Sequence
from turnstile.core.scheduler import Scheduler
from turnstile.engine.protocol import Occupant, Picture


class _Drawn:
    """What the last picture knows of a sequence."""

    __slots__ = ("length", "name", "table")

    def __init__(self, name: int, table: PageTable) -> None:
        self.name = name
        self.table = table
        self.length = 0


class Painter:
    """Draws a scheduler's pool by difference. The first picture is whole.

    Parameters
    ----------
    interval
        Least seconds between two pictures. What changes in between is in the next one; the one
        drawn at rest is never put off, because none would follow.
    """

    def __init__(self, scheduler: Scheduler, interval: float) -> None:
        self.interval = interval
        self._scheduler = scheduler
        self._changes: PageChanges | None = None
        self._drawn: dict[Sequence, _Drawn] = {}
        self._names = 0
        self._due = 0.0

    def close(self) -> None:
        """Nobody watches any more: the pool need not note anything."""
        self._scheduler.pool.changes = None

    def paint(self, now: float, *, at_rest: bool = False) -> Picture | None:
        """The next picture; None where it is not time for one, or nothing is new at rest."""
        pool, changes = self._scheduler.pool, self._changes
        whole = changes is None
        if not (whole or at_rest or now >= self._due):
            return None
        if changes is None:
            changes = PageChanges()
            changes.pages.update(range(pool.num_pages))
        self._due = now + self.interval
        self._changes = pool.changes = PageChanges()
        running = self._scheduler.running
        left, entered = self._come_and_go(running)
        drawn = [self._drawn[sequence] for sequence in running]
        pages, states = self._pages(changes.pages)
        if at_rest and not (whole or left or entered or pages or running):
            return None
        return Picture(
            whole,
            entered,
            left,
            [each.name for each in drawn],
            [sequence.computed for sequence in running],
            [sequence.total for sequence in running],
            self._tables(running, changes.cleared),
            pages,
            states,
        )

    def _come_and_go(self, running: list[Sequence]) -> tuple[list[int], list[Occupant]]:
        """Names of those that have left their slots, and those that are new in theirs."""
        drawn = self._drawn
        entered = []
        for sequence in running:
            if sequence not in drawn:
                self._names += 1
                drawn[sequence] = _Drawn(self._names, sequence.table)
                request = sequence.request
                entered.append(
                    Occupant(
                        self._names,
                        request.id,
                        sequence.index,
                        request.tenant,
                        sequence.num_prompt,
                        request.max_tokens,
                    )
                )
        if len(drawn) == len(running):
            return [], entered
        staying = set(running)
        gone = [sequence for sequence in drawn if sequence not in staying]
        return [drawn.pop(sequence).name for sequence in gone], entered

    def _tables(
        self, running: list[Sequence], cleared: set[PageTable]
    ) -> list[tuple[int, bool, list[int]]]:
        tables = []
        for sequence in running:
            drawn, table = self._drawn[sequence], sequence.table
            anew = table is not drawn.table or table in cleared or not drawn.length
            if anew:
                drawn.table, drawn.length = table, 0
            if anew or len(table.pages) != drawn.length:
                tables.append((drawn.name, anew, table.pages[drawn.length :]))
                drawn.length = len(table.pages)
        return tables

    def _pages(self, changed: set[int]) -> tuple[list[int], bytes]:
        """Changed pages and their states. Whatever was cached since the last picture stands at the
        end of the pool's list: from there backwards, that is its order.
        """
        pool = self._scheduler.pool
        states = {page: pool.state(page) for page in changed}
        cached = []
        for page in islice(pool.cached_latest_first(), pool.num_cached):
            if page not in changed:
                break
            cached.append(page)
        pages = [page for page, state in states.items() if state is not PageState.CACHED]
        pages += reversed(cached)
        return pages, bytes([states[page] for page in pages])
