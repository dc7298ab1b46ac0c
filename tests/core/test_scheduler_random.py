"""Whatever arrives, leaves, forks and runs out: the books balance, everybody gets their tokens."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.driver import STOP, Driver, make_scheduler, solo
from turnstile.core.admission import NeverFitsError
from turnstile.core.request import FinishReason, Request


def random_request(rng: random.Random, number: int, *, forks: bool) -> Request:
    shared = tuple(range(100, 100 + rng.choice((0, 4, 9, 16, 21))))
    own = tuple(rng.randrange(50) for _ in range(rng.randint(1, 20)))
    return Request(
        id=f"r{number}",
        prompt=shared + own,
        max_tokens=rng.randint(1, 24),
        n=rng.randint(1, 3) if forks and rng.random() < 0.3 else 1,
        tenant=rng.choice("ABC"),
        weight=rng.choice((1.0, 2.0)),
        priority=rng.choice((0, 0, 0, 1, -1)),
        arrival=float(number),
        deadline=None,
        min_tokens=rng.choice((0, 0, 3)),
        stop_ids=frozenset((STOP,)) if rng.random() < 0.5 else frozenset(),
        read_cache=rng.random() < 0.9,
    )


def drive(
    seed: int,
    *,
    admission: str,
    queue: str = "fair",
    pages: int,
    steps: int = 40,
    drafts: bool = True,
) -> Driver:
    rng = random.Random(seed)
    driver = Driver(
        make_scheduler(
            pages=pages, admission=admission, queue=queue, slots=rng.choice((3, 8, 16)), budget=32,
            prefix_caching=rng.random() < 0.8, max_skips=rng.choice((1, 4)),
        )
    )  # fmt: skip
    driver.scheduler.admission.lockstep = not drafts
    requests: dict[str, Request] = {}
    cancelled: set[str] = set()
    for _ in range(steps):
        while rng.random() < 0.5:
            request = random_request(rng, len(requests), forks=True)
            try:
                driver.submit(request)
                requests[request.id] = request
            except NeverFitsError:
                break
        if requests and rng.random() < 0.08:
            victim = rng.choice(sorted(requests))
            cancelled.add(victim)
            driver._take(driver.scheduler.cancel(victim, now=driver.now))
            driver.scheduler.audit()
        if drafts and rng.random() < 0.3:
            for sequence in driver.scheduler.running:
                if sequence.decoding:
                    right = solo(sequence.request, sequence.index)[sequence.num_outputs :]
                    sequence.drafts = tuple(right[: rng.randint(0, 3)]) + (49,) * rng.randint(0, 1)
        driver.step()
    driver.run()
    finish_and_check(driver, requests, cancelled)
    return driver


def finish_and_check(driver: Driver, requests: dict[str, Request], cancelled: set[str]) -> None:
    scheduler, pool = driver.scheduler, driver.scheduler.pool
    assert pool.num_held == 0
    assert pool.num_free + pool.num_cached == pool.num_pages
    assert not scheduler.running
    assert scheduler.num_waiting == 0
    assert scheduler.waiting_tokens == 0
    assert not scheduler.waiting_by_reason
    assert scheduler._reserved_forks == 0
    for request in requests.values():
        for index in range(request.n):
            got, expected = driver.outputs[request.id, index], solo(request, index)
            if request.id in cancelled:
                assert got == expected[: len(got)]
                continue
            assert got == expected
            assert driver.finished[request.id, index] in (FinishReason.STOP, FinishReason.LENGTH)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    pages=st.sampled_from((16, 24, 60)),
    admission=st.sampled_from(("expected", "optimistic")),
)
def test_everything_admitted_ends_exactly_once_with_the_tokens_of_a_solo_run(
    seed: int, pages: int, admission: str
) -> None:
    drive(seed, admission=admission, pages=pages)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), pages=st.sampled_from((16, 24, 60)), drafts=st.booleans())
def test_guaranteed_admission_never_preempts(seed: int, pages: int, drafts: bool) -> None:
    driver = drive(seed, admission="guaranteed", pages=pages, drafts=drafts)
    assert driver.scheduler.statistics.preemptions == 0


@pytest.mark.parametrize("queue", ["fcfs", "priority"])
def test_the_other_queue_policies_lose_nothing_either(queue: str) -> None:
    for seed in range(20):
        drive(seed, admission="optimistic", queue=queue, pages=20)


def test_small_pools_do_preempt_and_prefixes_do_hit() -> None:
    drivers = [drive(seed, admission="optimistic", pages=16) for seed in range(20)]
    assert sum(d.scheduler.statistics.preemptions for d in drivers) > 10
    assert sum(d.scheduler.cache.hits for d in drivers) > 100
    assert max(d.largest_batch for d in drivers) > 3
