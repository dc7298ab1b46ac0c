"""Fills a page pool with sequences of given lengths and says what the memory then holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from turnstile.core.pages import PagePool, PageTable


@dataclass(frozen=True, slots=True)
class Filling:
    """``sequences`` hold ``used`` tokens in ``reserved`` tokens of memory, of ``memory`` there are.

    ``most_wasted`` is the most that one sequence reserves beyond what it uses.
    """

    sequences: int
    used: int
    reserved: int
    memory: int
    most_wasted: int

    @property
    def useful(self) -> float:
        """Share of the reserved memory that holds something."""
        return self.used / self.reserved if self.reserved else 0.0

    @property
    def wasted_each(self) -> float:
        """Tokens reserved for nothing, a sequence."""
        return (self.reserved - self.used) / self.sequences if self.sequences else 0.0


def fill(pool: PagePool, lengths: Iterable[int]) -> Filling:
    """Give each sequence the pages for its tokens, until one does not fit or none is left.

    The pool's books are checked against the tables, and the pool is left empty.
    """
    tables: list[PageTable] = []
    used = most_wasted = 0
    for tokens in lengths:
        pages = pool.pages_for(tokens)
        if pages > pool.num_available:
            break
        table = PageTable()
        for _ in range(pages):
            pool.append(table)
        tables.append(table)
        used += tokens
        most_wasted = max(most_wasted, pages * pool.page_size - tokens)
    pool.audit(tables)
    reserved = pool.num_held * pool.page_size
    for table in tables:
        pool.clear(table)
    memory = pool.num_pages * pool.page_size
    return Filling(len(tables), used, reserved, memory, most_wasted)
