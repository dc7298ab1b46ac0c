"""Whose pages can still be believed when the books do not balance.

The pool says of every page who holds it, and every sequence says which pages it holds. Where both
say the same the page is its holder's: nobody else was given it, and nobody else can have written to
it. Where they differ something was written down wrong, and what is in the page may be anybody's.

What no book contradicts is believed: two pages of one table that changed places, say, leave no
trace. A sequence that is not believed costs its computation, never its answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from turnstile.core.pages import PagePool, PageTable
from turnstile.core.request import Sequence, State


def believable(
    alive: Seq[Sequence],
    running: Seq[Sequence],
    pool: PagePool,
    copies: Iterable[tuple[int, int]],
) -> tuple[list[Sequence], list[Sequence]]:
    """Who of ``running`` keeps its pages, and who of the others has a table that is wrong itself
    (the rest share pages with one).

    ``copies`` are page copies not made yet: their targets hold nothing.
    """
    known = set(alive)
    runs = [s for s in dict.fromkeys(running) if s in known and s.state is State.RUNNING]
    tables = {id(s.table): s for s in alive}
    contested, blamed = pool.contested([s.table for s in alive])
    if blamed is None:
        # A page has lost a holder whom no book names: it may be any of them.
        return [], []
    wrong = {tables[id(table)] for table in blamed if id(table) in tables}
    wrong |= {s for s in runs if not _plausible(s, pool)}
    contested |= {target for _, target in copies}
    holders: dict[int, list[tuple[Sequence, int]]] = defaultdict(list)
    for sequence in runs:
        for index, page in enumerate(sequence.table.pages):
            holders[page].append((sequence, index))
    for page, group in holders.items():
        if len(group) > 1 and not _share_rightly(group, pool.page_size):
            contested.add(page)
    doubtful = {s for page in contested for s, _ in holders.get(page, ())}
    kept = [s for s in runs if s not in wrong and s not in doubtful]
    return kept, [s for s in alive if s in wrong]


def start_anew(sequence: Sequence) -> None:
    """Forget all that was computed for a sequence; its tokens stay."""
    sequence.state = State.WAITING
    sequence.table = PageTable()
    sequence.computed = 0
    sequence.drafts = ()
    sequence.keys = []
    sequence.blocked = (-1, 0)


def _plausible(sequence: Sequence, pool: PagePool) -> bool:
    """Whether its table could be that of a sequence so far computed."""
    pages = sequence.table.pages
    return (
        0 <= sequence.computed < sequence.total
        and sequence.computed <= len(pages) * pool.page_size
        and len(set(pages)) == len(pages)
        and all(0 <= page < pool.num_pages for page in pages)
    )


def _share_rightly(group: list[tuple[Sequence, int]], page_size: int) -> bool:
    """Whether all who hold a page hold it at the same place, full, after the same tokens."""
    first, place = group[0]
    end = (place + 1) * page_size
    return all(
        index == place
        and end <= sequence.computed
        and sequence.request.salt == first.request.salt
        and sequence.tokens[:end] == first.tokens[:end]
        for sequence, index in group
    )
