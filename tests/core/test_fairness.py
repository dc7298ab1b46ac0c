"""Tenants share by charged service, nobody waits for ever, and a slot is kept for newcomers."""

from __future__ import annotations

import random

import pytest

from core.driver import Driver, make_scheduler
from turnstile.core.chunking import need, share_budget
from turnstile.core.fairness import FairQueue
from turnstile.core.request import Request, Sequence

SKIPS = 4


def widest_gap(queue: str, seed: int, weights: tuple[float, float]) -> tuple[float, float]:
    """Two backlogged tenants, one of which came first with everything: the largest difference in
    service over weight while both wait, and DESIGN's bound on it.
    """
    rng = random.Random(seed)
    driver = Driver(
        make_scheduler(pages=40, queue=queue, max_num_seqs=4, max_skips=SKIPS, reserved_slots=0)
    )
    dearest = longest = 0.0
    for tenant, weight in zip("ab", weights, strict=True):
        for i in range(60):
            request = Request(
                id=f"{tenant}{i}", prompt=(i,) * rng.randint(1, 20),
                max_tokens=rng.randint(1, 20), tenant=tenant, weight=weight,
                arrival=float(i + 100 * (tenant == "b")),
            )  # fmt: skip
            cost = len(request.prompt) + 2.0 * request.max_tokens
            dearest = max(dearest, cost / weight)
            longest = max(longest, len(request.prompt) / weight)
            driver.submit(request)
    tokens_in_pool = 2.0 * driver.scheduler.pool.num_pages * driver.scheduler.pool.page_size
    bound = 2 * max(longest, tokens_in_pool / min(weights)) + SKIPS * dearest
    served = dict.fromkeys("ab", 0.0)
    live: dict[str, list[Sequence]] = {
        t: [driver.scheduler.sequences(f"{t}{i}")[0] for i in range(60)] for t in "ab"
    }
    gap = 0.0
    while all(any(s.started is None for s in live[t]) for t in "ab"):
        driver.step()
        for tenant, weight in zip("ab", weights, strict=True):
            served[tenant] = sum(s.charged for s in live[tenant]) / weight
        gap = max(gap, abs(served["a"] - served["b"]))
    return gap, bound


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0), (1.0, 2.0)])
def test_backlogged_tenants_stay_within_the_bound(weights: tuple[float, float]) -> None:
    for seed in range(3):
        gap, bound = widest_gap("fair", seed, weights)
        assert gap <= bound


def test_first_come_first_served_breaks_the_same_bound() -> None:
    assert any(gap > bound for gap, bound in (widest_gap("fcfs", s, (1.0, 1.0)) for s in range(3)))


def sequence(name: str, tenant: str = "t", *, order: int = 0, **settings: object) -> Sequence:
    request = Request(id=name, prompt=(1,), max_tokens=4, tenant=tenant, **settings)  # type: ignore[arg-type]
    return Sequence(request, arrival_order=order)


def enter(queue: FairQueue, member: Sequence) -> Sequence:
    queue.arrive(member)
    queue.push(member)
    return member


def test_waiting_outweighs_priority_in_the_end() -> None:
    queue = FairQueue(ageing=30.0)
    old = enter(queue, sequence("old", priority=1, arrival=0.0, order=1))
    fresh = enter(queue, sequence("fresh", priority=0, arrival=29.0, order=2))
    assert queue.next() is fresh
    queue.take(fresh)
    enter(queue, sequence("later", priority=0, arrival=31.0, order=3))
    assert queue.next() is old


def test_idling_saves_up_nothing() -> None:
    queue = FairQueue()
    back = enter(queue, sequence("x", "back", order=1))
    busy = enter(queue, sequence("y", "busy", order=2))
    queue.take(back)
    queue.leave(back)
    queue.charge(busy, 500.0)
    enter(queue, sequence("z", "back", order=3))
    assert queue.served("back") == 500.0


def test_with_nobody_active_the_newcomer_starts_where_the_last_one_stopped() -> None:
    queue = FairQueue()
    busy = enter(queue, sequence("y", "busy"))
    queue.charge(busy, 70.0)
    queue.take(busy)
    queue.leave(busy)
    enter(queue, sequence("z", "new"))
    assert queue.served("new") == 70.0


def test_a_slot_is_kept_for_a_tenant_that_runs_nothing_even_behind_a_less_served_queue() -> None:
    driver = Driver(make_scheduler(pages=200, max_num_seqs=8, max_skips=2, reserved_slots=1))
    seen = driver.submit(Request(id="b-old", prompt=(1,), max_tokens=15, tenant="b"))
    driver.step()
    driver.cancel("b-old")
    assert seen.charged > 0
    for i in range(40):
        driver.submit(Request(id=f"a{i}", prompt=(1, i), max_tokens=30, tenant="a"))
    driver.step()
    assert len(driver.scheduler.running) == 7
    # b has been served more than a, and a's queue is longer than the number of skips.
    newcomer = driver.submit(Request(id="b", prompt=(9,), max_tokens=3, tenant="b"))
    driver.scheduler.queue.charge(newcomer, 10_000.0)
    driver.step()
    assert newcomer in driver.scheduler.running
    driver.run()


def test_a_large_request_is_overtaken_a_bounded_number_of_times() -> None:
    driver = Driver(make_scheduler(pages=20, max_skips=3, admission="guaranteed", queue="fcfs"))
    driver.submit(Request(id="first", prompt=(1,) * 20, max_tokens=30))
    driver.step()
    large = driver.submit(Request(id="large", prompt=(2,) * 40, max_tokens=35, arrival=1.0))
    for i in range(20):
        driver.submit(Request(id=f"s{i}", prompt=(3, i), max_tokens=2, arrival=2.0 + i))
    overtook = 0
    while large.started is None:
        driver.step()
        overtook = sum(key[0].startswith("s") for key in driver.finished)
    assert 0 < overtook <= 3
    driver.run()


def test_thin_shares_leave_the_first_admitted_a_token() -> None:
    behind = [sequence(f"s{i}", f"tenant{i}") for i in range(9)]
    for i, member in enumerate(behind):
        member.tokens = [1] * (5 + i)
    for budget in range(1, 80):
        shares = dict(share_budget(behind, budget))
        assert shares[behind[0]] >= 1
        assert sum(shares.values()) == min(budget, sum(map(need, behind)))
        assert all(1 <= tokens <= need(s) for s, tokens in shares.items())


def test_without_chunks_every_prompt_is_whole_among_several_tenants() -> None:
    driver = Driver(make_scheduler(pages=99, chunked_prefill=False))
    for tenant in "abc":
        driver.submit(Request(id=tenant, prompt=(ord(tenant),) * 30, max_tokens=3, tenant=tenant))
    driver.run()
    prefills = [c for plan in driver.plans for c in plan.chunks if c.start == 0]
    assert [chunk.count for chunk in prefills] == [30, 30, 30]
