"""The arithmetic of memory, from the allocators that serve, and attention over their pages."""

from __future__ import annotations

import itertools

import pytest
import torch

from turnstile.core.pages import PagePool
from turnstile.lab.attention import Problem, attend_by_loop, by_loop, by_native, by_reference
from turnstile.lab.contiguous import ContiguousPool
from turnstile.lab.filling import fill


def test_the_books_hundred_requests_use_a_twentieth_of_what_they_reserve() -> None:
    filling = fill(ContiguousPool(100 * 4096, 4096), itertools.repeat(200))
    assert filling.sequences == 100
    assert filling.reserved == filling.memory == 409_600
    assert filling.used == 20_000
    assert filling.most_wasted == 3_896
    assert round(100 * filling.useful) == 5


@pytest.mark.parametrize("page_size", [1, 7, 16, 64])
def test_pages_waste_at_most_their_size_less_one(page_size: int) -> None:
    filling = fill(PagePool(40_000 // page_size, page_size), range(1, 200))
    assert filling.sequences == 199
    assert filling.used == sum(range(1, 200))
    assert filling.most_wasted == page_size - 1


def test_filling_stops_at_the_first_that_does_not_fit_and_empties_the_pool() -> None:
    pool = PagePool(10, 16)
    filling = fill(pool, [100, 33, 1])
    assert (filling.sequences, filling.reserved) == (2, 160)
    assert fill(pool, [100, 49, 1]).sequences == 1
    assert pool.num_free == 10


def test_a_cache_without_room_for_one_reservation_is_refused() -> None:
    with pytest.raises(ValueError, match="100 tokens of memory do not hold one reservation of 128"):
        ContiguousPool(100, 128)


def test_the_loop_over_tokens_is_attention() -> None:
    problem = Problem([1, 16, 17, 40])
    random = torch.Generator().manual_seed(1)
    q = torch.randn(4, 4, 32, generator=random)
    k, v = (torch.randn(problem.num_pages, 2, 16, 32, generator=random) for _ in range(2))
    from turnstile.kernels.paged_attention import LayerPages

    tables = problem.tables()
    ours = attend_by_loop(q, LayerPages(k, v), tables, problem.lengths, 0.2)
    for row, (table, length) in enumerate(zip(tables, problem.lengths, strict=True)):
        keys, values = (x[table].transpose(0, 1).flatten(1, 2)[:, :length] for x in (k, v))
        for head in range(4):
            weights = torch.softmax(0.2 * keys[head // 2] @ q[row, head], 0)
            torch.testing.assert_close(ours[row, head], weights @ values[head // 2])
    shifted = [table[::-1] for table in tables]
    assert not torch.allclose(
        ours[3], attend_by_loop(q, LayerPages(k, v), shifted, problem.lengths, 0.2)[3]
    )


def test_the_three_forms_agree() -> None:
    problem = Problem([3, 33, 50], seed=4)
    loop, reference = by_loop(problem), by_reference(problem)
    torch.testing.assert_close(reference.rows, loop.rows, rtol=1e-4, atol=1e-4)
    native, in_order = by_native(problem), by_native(problem, shuffled=False)
    if native is None or in_order is None:
        pytest.skip("the native kernels are not built here")
    torch.testing.assert_close(native.rows, loop.rows, rtol=1e-4, atol=1e-4)
    assert torch.equal(native.rows, in_order.rows)
