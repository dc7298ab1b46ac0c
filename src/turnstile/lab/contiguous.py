"""The contiguous cache: every request reserves room for the longest sequence there may be.

Memory that must be in one piece must be taken whole, before anybody knows how long the answer
gets. That is the paged cache with a page as long as the longest sequence: one page a sequence, and
nothing else changes, so the allocator and the kernels are those that serve. (Before paged
attention, 60 to 80 % of such memory held nothing: PagedAttention, SOSP 2023, section 1.)
"""

from __future__ import annotations

from turnstile.core.pages import PagePool

PAGE_UNIT = 16
"""The kernels want pages in whole units of this many tokens."""


def reservation(max_model_len: int) -> int:
    """Tokens that one request reserves."""
    return -(-max_model_len // PAGE_UNIT) * PAGE_UNIT


class ContiguousPool(PagePool):
    """``memory_tokens`` tokens of K and V cut into reservations of ``max_model_len``.

    Raises
    ------
    ValueError
        The memory does not hold one reservation.
    """

    def __init__(self, memory_tokens: int, max_model_len: int) -> None:
        longest = reservation(max_model_len)
        if memory_tokens < longest:
            raise ValueError(
                f"{memory_tokens} tokens of memory do not hold one reservation of {longest}."
            )
        super().__init__(memory_tokens // longest, longest)
