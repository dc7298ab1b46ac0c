"""The page pool and the page tables: who holds which page of the KV cache.

Every page is in exactly one state::

              allocate                    release, not published
      free ─────────────▶ held ─────────────────────────────────▶ free
                           ▲ │ release, published
           hold (a hit)    │ ▼
                          cached ── allocate, when nothing is free: least recently used ──▶ held

All operations are O(1). Cached pages are a doubly linked list threaded through two integer
arrays, so that a hit leaves the middle of the list as cheaply as an eviction leaves its end
(PagedAttention, SOSP 2023, section 4; the states are ours).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum

_NONE = -1


class OutOfPagesError(RuntimeError):
    """No page is free and none is cached. The scheduler asks first, so this is a bug there."""


class AuditError(AssertionError):
    """The pool's books do not balance."""


class PageState(IntEnum):
    """What a page is, for whoever draws the pool: the three states, and what is held finer."""

    FREE = 0
    CACHED = 1
    HELD = 2
    """By one table, and its content is nobody else's to find."""
    PUBLISHED = 3
    """By one table, and others may find it: it will be cached when it is released."""
    SHARED = 4
    """By several tables."""


class PageTable:
    """The pages of one sequence, in order of position; append-only but for :meth:`clear`.

    ``private`` counts the pages that this table took and nobody has shared since: what its owner
    would give back by leaving.
    """

    __slots__ = ("pages", "private")

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.private = 0

    def __len__(self) -> int:
        return len(self.pages)


class PageChanges:
    """What has happened to a pool since somebody began to note it: the ``pages`` that may be in
    another state than then, and the tables that were ``cleared`` (all others only grew).
    """

    __slots__ = ("cleared", "pages")

    def __init__(self) -> None:
        self.pages: set[int] = set()
        self.cleared: set[PageTable] = set()


class PagePool:
    """``num_pages`` pages of ``page_size`` tokens, with reference counts.

    A page counts as *shared* from its second holder until its last one leaves; ``num_shared`` is
    their number. Together with each table's ``private`` this says who would free what, without
    ever walking a table (admission needs it, see :mod:`turnstile.core.admission`).

    Parameters
    ----------
    num_pages, page_size
        The pool; it never grows.
    on_evict
        Called with a cached page that is about to be given to somebody else.
    """

    def __init__(
        self, num_pages: int, page_size: int, on_evict: Callable[[int], None] | None = None
    ) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(
                f"A pool needs at least one page of one token, not {num_pages} of {page_size}."
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self.on_evict = on_evict
        self.num_shared = 0
        self.num_cached = 0
        self.num_entries = 0
        """Pages in all tables, those in several counted for each."""
        self.evictions = 0
        self.changes: PageChanges | None = None
        """Where changes are noted, while somebody watches."""
        self._refcount = [0] * num_pages
        self._published = bytearray(num_pages)
        self._shared = bytearray(num_pages)
        self._owner: list[PageTable | None] = [None] * num_pages
        # Popped from the end: the lowest page first, which keeps a small load in few bytes.
        self._free = list(range(num_pages - 1, -1, -1))
        # The LRU list: a ring through the sentinel `num_pages`; its successor goes first.
        self._next = [_NONE] * num_pages + [num_pages]
        self._previous = [_NONE] * num_pages + [num_pages]

    # -- queries --------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Pages without content that anybody could want."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Pages in at least one table."""
        return self.num_pages - len(self._free) - self.num_cached

    @property
    def num_available(self) -> int:
        """Pages :meth:`append` could hand out now: free and cached."""
        return len(self._free) + self.num_cached

    def pages_for(self, tokens: int) -> int:
        """Pages that ``tokens`` tokens occupy."""
        return -(-tokens // self.page_size)

    def refcount(self, page: int) -> int:
        """How many tables hold ``page``."""
        return self._refcount[page]

    def is_published(self, page: int) -> bool:
        """Whether the content may be found by others."""
        return bool(self._published[page])

    def owner(self, page: int) -> PageTable | None:
        """The only holder of ``page``; None once it is shared, or held by nobody."""
        return self._owner[page]

    def state(self, page: int) -> PageState:
        """What ``page`` is now."""
        count = self._refcount[page]
        if count > 1:
            return PageState.SHARED
        if count:
            return PageState.PUBLISHED if self._published[page] else PageState.HELD
        return PageState.FREE if self._next[page] == _NONE else PageState.CACHED

    def cached_latest_first(self) -> Iterator[int]:
        """The cached pages, from the one that was released last to the one that goes first."""
        page = self._previous[self.num_pages]
        while page != self.num_pages:
            yield page
            page = self._previous[page]

    # -- commands -------------------------------------------------------------------------------

    def append(self, table: PageTable) -> int:
        """Give ``table`` one more page: a free one, else the least recently used cached one."""
        if self._free:
            page = self._free.pop()
        elif self.num_cached:
            page = self._next[self.num_pages]
            self._unlink(page)
            self._published[page] = 0
            self.evictions += 1
            if self.on_evict is not None:
                self.on_evict(page)
        else:
            raise OutOfPagesError(f"All {self.num_pages} pages are held.")
        self._refcount[page] = 1
        self._owner[page] = table
        table.pages.append(page)
        table.private += 1
        self.num_entries += 1
        if self.changes is not None:
            self.changes.pages.add(page)
        return page

    def hold(self, table: PageTable, pages: Iterable[int]) -> None:
        """Append pages with valid content (cache hits, a fork's prefix) to ``table``."""
        before = len(table.pages)
        for page in pages:
            count = self._refcount[page]
            if count == 0:
                self._unlink(page)
                self._owner[page] = table
                table.private += 1
            elif not self._shared[page]:
                self._share(page)
            self._refcount[page] = count + 1
            table.pages.append(page)
            self.num_entries += 1
        if self.changes is not None:
            self.changes.pages.update(table.pages[before:])

    def fork(self, source: PageTable, target: PageTable, tokens: int) -> list[tuple[int, int]]:
        """Let the empty ``target`` have the first ``tokens`` tokens of ``source``: full pages are
        shared, the last partial one is to be copied. Returns the copies to make, at most one.
        """
        full, partial = divmod(tokens, self.page_size)
        self.hold(target, source.pages[:full])
        return [(source.pages[full], self.append(target))] if partial else []

    def publish(self, page: int) -> None:
        """Declare a held page's content final and findable: on release it is kept as cached."""
        if self._refcount[page] == 0:
            raise ValueError(f"Page {page} is held by nobody and cannot be published.")
        self._published[page] = 1
        if self.changes is not None:
            self.changes.pages.add(page)

    def clear(self, table: PageTable) -> None:
        """Release all pages of ``table``, tail first, so that chains die from the leaf."""
        self.num_entries -= len(table.pages)
        if self.changes is not None:
            self.changes.pages.update(table.pages)
            self.changes.cleared.add(table)
        while table.pages:
            self._release(table.pages.pop(), table)
        table.private = 0

    def drop_cached(self) -> int:
        """Turn every cached page into a free one; returns how many there were."""
        dropped = self.num_cached
        if self.changes is not None:
            self.changes.pages.update(self.cached_latest_first())
        while self.num_cached:
            page = self._next[self.num_pages]
            self._unlink(page)
            self._published[page] = 0
            if self.on_evict is not None:
                self.on_evict(page)
            self._free.append(page)
        return dropped

    def _release(self, page: int, table: PageTable) -> None:
        count = self._refcount[page] - 1
        self._refcount[page] = count
        if count:
            return
        if self._shared[page]:
            self._shared[page] = 0
            self.num_shared -= 1
        self._owner[page] = None
        if self._published[page]:
            self._link_last(page)
        else:
            self._free.append(page)

    # -- the LRU ring ---------------------------------------------------------------------------

    def _link_last(self, page: int) -> None:
        sentinel = self.num_pages
        last = self._previous[sentinel]
        self._next[last] = page
        self._previous[page] = last
        self._next[page] = sentinel
        self._previous[sentinel] = page
        self.num_cached += 1

    def _unlink(self, page: int) -> None:
        before, after = self._previous[page], self._next[page]
        self._next[before] = after
        self._previous[after] = before
        self._next[page] = self._previous[page] = _NONE
        self.num_cached -= 1

    # -- when the books are wrong ---------------------------------------------------------------

    def contested(self, tables: Iterable[PageTable]) -> tuple[set[int], list[PageTable] | None]:
        """What the books and the tables of all who are alive do not agree on. O(pages).

        Returns
        -------
        The pages of which they say different things, and the tables that lack a page which is
        theirs by the books. None instead of those where a page lacks a holder and the books do not
        say whom: it may be any table.
        """
        tables = list(tables)
        counts = [0] * self.num_pages
        holder: list[PageTable | None] = [None] * self.num_pages
        owned: dict[int, int] = {}
        for table in tables:
            for page in table.pages:
                if 0 <= page < self.num_pages:
                    counts[page] += 1
                    holder[page] = table
                    owned[id(table)] = owned.get(id(table), 0) + (self._owner[page] is table)
        free, pages = set(self._free), set()
        lacking = [table for table in tables if owned.get(id(table), 0) != table.private]
        for page, count in enumerate(counts):
            believed, owner = self._refcount[page], self._owner[page]
            listed = page in free or self._next[page] != _NONE
            known = bool(self._shared[page]) if owner is None else owner is holder[page]
            if count == believed and (not count or (known and not listed)):
                continue
            pages.add(page)
            if count < believed and owner is None:
                return pages, None
            if owner is not None and owner is not holder[page]:
                lacking.append(owner)
        return pages, lacking

    def rebuild(self, tables: Iterable[PageTable]) -> None:
        """Write the books anew from the tables: every page that is in none is free, and none is
        published. O(pages).
        """
        n = self.num_pages
        if self.changes is not None:
            tables = list(tables)
            self.changes.pages.update(range(n))
            self.changes.cleared.update(tables)
        self._refcount, self._published, self._shared = [0] * n, bytearray(n), bytearray(n)
        self._owner = [None] * n
        self._next, self._previous = [_NONE] * n + [n], [_NONE] * n + [n]
        self._free.clear()
        self.num_cached = self.num_shared = self.num_entries = 0
        for table in tables:
            table.private = 0
            self.num_entries += len(table.pages)
            for page in table.pages:
                self._refcount[page] += 1
                if self._refcount[page] == 1:
                    self._owner[page] = table
                    table.private += 1
                elif not self._shared[page]:
                    self._share(page)
        self._free += [page for page in range(n - 1, -1, -1) if not self._refcount[page]]

    def _share(self, page: int) -> None:
        """A page has a second holder."""
        self._shared[page] = 1
        self.num_shared += 1
        owner = self._owner[page]
        if owner is not None:
            owner.private -= 1
            self._owner[page] = None

    # -- the conservation law -------------------------------------------------------------------

    def audit(self, tables: Iterable[PageTable]) -> None:
        """Check the books against every live table. O(pages): for tests, and after a fault.

        Raises
        ------
        AuditError
            Naming the first page, or table, that is wrong.
        """
        counts = [0] * self.num_pages
        tables = list(tables)
        for table in tables:
            if len(set(table.pages)) != len(table.pages):
                raise AuditError(f"A table holds a page twice: {table.pages}.")
            for page in table.pages:
                if not 0 <= page < self.num_pages:
                    raise AuditError(f"A table holds page {page} of {self.num_pages}.")
                counts[page] += 1
        ring = self._ring()
        free, cached = set(self._free), set(ring)
        if len(free) != len(self._free) or len(cached) != self.num_cached:
            raise AuditError("A page is listed twice as free, or the cached count is off.")
        for page, count in enumerate(counts):
            self._audit_page(page, count, page in free, page in cached)
        if sum(counts) != self.num_entries:
            raise AuditError(f"{sum(counts)} pages in tables, counted {self.num_entries}.")
        if sum(self._shared) != self.num_shared:
            raise AuditError(f"{sum(self._shared)} shared pages, counted {self.num_shared}.")
        for table in tables:
            owned = sum(self._owner[page] is table for page in table.pages)
            if owned != table.private:
                raise AuditError(f"A table owns {owned} pages but counts {table.private}.")

    def _ring(self) -> list[int]:
        ring, before, page = [], self.num_pages, self._next[self.num_pages]
        while page != self.num_pages:
            if not 0 <= page < self.num_pages or self._previous[page] != before:
                raise AuditError("The list of cached pages is broken.")
            ring.append(page)
            before, page = page, self._next[page]
        if self._previous[self.num_pages] != before:
            raise AuditError("The list of cached pages does not come back to its end.")
        return ring

    def _audit_page(self, page: int, count: int, free: bool, cached: bool) -> None:
        if self._refcount[page] != count:
            raise AuditError(
                f"Page {page} is in {count} tables but its count is {self._refcount[page]}."
            )
        if (count > 0) + free + cached != 1:
            raise AuditError(
                f"Page {page} must be in one state: held {count > 0}, free {free}, cached {cached}."
            )
        if free and self._published[page]:
            raise AuditError(f"Page {page} is free but published.")
        if cached and not self._published[page]:
            raise AuditError(f"Page {page} is cached but not published.")
        if count > 1 and not self._shared[page]:
            raise AuditError(f"Page {page} has {count} holders but is not counted as shared.")
        if count and not self._shared[page] and self._owner[page] is None:
            raise AuditError(f"Page {page} is held by one table but has no owner.")
