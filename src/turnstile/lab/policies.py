"""Ways to schedule, by name: ours, those of others, and ours with one thing taken away.

Each is a few small classes in the places that :mod:`turnstile.core` leaves for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from turnstile.core.admission import (
    AdmissionPolicy,
    Candidate,
    ExpectedAdmission,
    GuaranteedAdmission,
    Outlook,
    UncheckedAdmission,
)
from turnstile.core.fairness import FairQueue, FirstComeQueue, QueuePolicy
from turnstile.core.pages import PagePool, PageTable
from turnstile.core.preemption import VictimPolicy, choose_newest, choose_victim
from turnstile.core.request import Sequence


class OptimisticAdmission(AdmissionPolicy):
    """A sequence may start when its prompt fits what is available now: nobody looks ahead.

    What vLLM does (PagedAttention, SOSP 2023, section 4.5): outputs take pages as they grow, and
    preemption pays for the optimism. ``watermark`` is the share of the pool that a newcomer leaves.
    """

    name = "optimistic"

    def __init__(self, watermark: float = 0.01) -> None:
        self.watermark = watermark

    def remaining(self, sequence: Sequence) -> int:
        return 1

    def fits(
        self,
        candidate: Candidate,
        running: Iterable[Sequence],
        pool: PagePool,
        reserve: int = 0,
        outlook: Outlook | None = None,
    ) -> bool:
        # Those who still compute their prompts were promised the pages for them.
        promised = sum(
            max(0, pool.pages_for(sequence.total) - len(sequence.table)) for sequence in running
        )
        cached = sum(pool.refcount(page) == 0 for page in candidate.matched)
        missing = pool.pages_for(candidate.sequence.total) - len(candidate.matched) + cached
        spare = int(self.watermark * pool.num_pages)
        return promised + missing + spare + reserve <= pool.num_available


class HopefulAdmission(OptimisticAdmission):
    """The same hope without the safety net: who finds no page fails."""

    name = "hopeful"
    preempts = False


class UncountedPool(PagePool):
    """A pool that does not count holders: a page is given back when the first of them leaves.

    What is left out is the count alone. A table still gives back only pages that nobody else has
    been given meanwhile, so that the damage is the one that matters: somebody reads a page that
    belongs to another. ``stolen`` counts pages given to a new owner while others read them.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size)
        self.stolen = 0
        self._owners = [0] * num_pages
        self._seen: dict[PageTable, dict[int, int]] = {}

    def append(self, table: PageTable) -> int:
        page = super().append(table)
        self._owners[page] += 1
        self.stolen += any(
            page in pages and pages[page] != self._owners[page]
            for reader, pages in self._seen.items()
            if reader is not table
        )
        self._seen.setdefault(table, {})[page] = self._owners[page]
        return page

    def hold(self, table: PageTable, pages: Iterable[int]) -> None:
        listed = list(pages)
        super().hold(table, listed)
        for page in listed:
            self._seen.setdefault(table, {})[page] = self._owners[page]

    def clear(self, table: PageTable) -> None:
        super().clear(table)
        self._seen.pop(table, None)

    def _release(self, page: int, table: PageTable) -> None:
        if self._seen[table][page] == self._owners[page] and self.refcount(page):
            self._refcount[page] = 1
            super()._release(page, table)


@dataclass(frozen=True, slots=True)
class Policy:
    """One way to schedule.

    ``contiguous``: memory is reserved for the longest sequence there may be, in one piece.
    ``counts``: pages have reference counts, so that their books can be checked.
    """

    name: str
    summary: str
    admission: Callable[[], AdmissionPolicy] = ExpectedAdmission
    queue: Callable[[], QueuePolicy] = FairQueue
    victim: VictimPolicy = choose_victim
    pool: Callable[[int, int], PagePool] = PagePool
    contiguous: bool = False
    counts: bool = True
    prefix_caching: bool = True
    chunked_prefill: bool = True
    separate_prefill: bool = False

    def but(self, name: str, summary: str, **changes: object) -> Policy:
        """This policy with something changed."""
        return replace(self, name=name, summary=summary, **changes)  # type: ignore[arg-type]


TURNSTILE = Policy(
    "turnstile", "looks ahead by measured lengths; least work lost is preempted; tenants share"
)

GUARANTEED = TURNSTILE.but(
    "guaranteed",
    "starts only what surely fits, to the last token it may ask for",
    admission=GuaranteedAdmission,
)

ORCA = Policy(
    "orca",
    "iteration-level scheduling; memory reserved for the longest sequence there may be",
    admission=GuaranteedAdmission,
    queue=FirstComeQueue,
    contiguous=True,
    prefix_caching=False,
    chunked_prefill=False,
)
"""Orca (OSDI 2022) as the PagedAttention paper compares with it: "Orca (Max)"."""

VLLM = Policy(
    "vllm",
    "starts whoever's prompt fits now; the newest is preempted; first come, first served",
    admission=OptimisticAdmission,
    queue=FirstComeQueue,
    victim=choose_newest,
)

UNCHECKED = TURNSTILE.but("unchecked", "no admission control at all", admission=UncheckedAdmission)
NO_PREEMPTION = TURNSTILE.but(
    "no preemption", "hopes, and has no way back", admission=HopefulAdmission
)
NO_COUNTS = TURNSTILE.but(
    "no counts", "shared pages without reference counts", pool=UncountedPool, counts=False
)
FIRST_COME = TURNSTILE.but("first come", "whoever asks first, whoever asks", queue=FirstComeQueue)
WHOLE_PROMPTS = TURNSTILE.but(
    "whole prompts", "a prompt is computed in one step, however long", chunked_prefill=False
)
SEPARATE_PREFILL = WHOLE_PROMPTS.but(
    "separate prefill",
    "prompts in passes of their own, while those who stream stand still",
    separate_prefill=True,
)
NO_SHARING = TURNSTILE.but("no sharing", "every prompt is computed anew", prefix_caching=False)

POLICIES = {
    policy.name: policy
    for policy in (
        TURNSTILE, GUARANTEED, ORCA, VLLM, UNCHECKED, NO_PREEMPTION, NO_COUNTS, FIRST_COME,
        WHOLE_PROMPTS, SEPARATE_PREFILL, NO_SHARING,
    )
}  # fmt: skip
