"""Tenants share by charged service, nobody waits for ever, and a slot is kept for newcomers."""

from __future__ import annotations

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from budget import examples
from core.driver import Driver, make_scheduler
from turnstile.core.chunking import need, share_budget
from turnstile.core.events import Admitted
from turnstile.core.fairness import FairQueue, PriorityQueue, QueuePolicy
from turnstile.core.request import FinishReason, Request, Sequence

SKIPS = 1
OUTPUT_PRICE = 2.0
PROMPT_PRICE = 1.0


@st.composite
def backlogs(draw: st.DrawFn) -> dict[str, list[tuple[int, int]]]:
    """For each of two tenants, prompt and output lengths of its requests."""
    lengths = {}
    for tenant in "ab":
        prompts, outputs = draw(st.integers(1, 12)), draw(st.integers(1, 12))
        one = st.tuples(st.integers(1, prompts), st.integers(1, outputs))
        lengths[tenant] = draw(st.lists(one, min_size=45, max_size=45))
    return lengths


TALKERS_AND_READERS = {"a": [(1, 12)] * 45, "b": [(12, 1)] * 45}


def check_bound(
    queue: str, lengths: dict[str, list[tuple[int, int]]], weights: tuple[float, float],
    skips: int, slots: int, admission: str, budget: int,
) -> None:  # fmt: skip
    """Two tenants of equal priority, both backlogged; one came with everything before the other.

    In any span of time in which both wait, what they are charged, over weight, differs by at most
    ``2 · max(w_p · L, w_q · M)`` plus the skip limit times the dearest request, where L is the
    longest prompt and M what the pool holds, in tokens.
    """
    driver = Driver(
        make_scheduler(
            pages=20, page_size=2, queue=queue, admission=admission, prefix_caching=False,
            max_num_seqs=slots, max_num_batched_tokens=budget, max_skips=skips, reserved_slots=0,
        )
    )  # fmt: skip
    weight = dict(zip("ab", weights, strict=True))
    live: dict[str, list[Sequence]] = {"a": [], "b": []}
    dearest = longest = 0.0
    for tenant, wanted in lengths.items():
        for i, (prompt, outputs) in enumerate(wanted):
            request = Request(
                id=f"{tenant}{i}", prompt=(i,) * prompt, max_tokens=outputs, tenant=tenant,
                weight=weight[tenant], arrival=float(i + 100 * (tenant == "b")),
            )  # fmt: skip
            cost = PROMPT_PRICE * prompt + OUTPUT_PRICE * outputs
            dearest = max(dearest, cost / weight[tenant])
            longest = max(longest, prompt)
            live[tenant].append(driver.submit(request))
    pool = driver.scheduler.pool.num_pages * driver.scheduler.pool.page_size
    bound = 2 * max(PROMPT_PRICE * longest, OUTPUT_PRICE * pool) / min(weights) + skips * dearest
    lead = [0.0]
    while all(any(s.started is None for s in live[t]) for t in "ab"):
        driver.step()
        served = {t: sum(s.charged for s in live[t]) / weight[t] for t in "ab"}
        lead.append(served["a"] - served["b"])
    assert max(lead) - min(lead) <= bound


fairness = given(
    lengths=backlogs(),
    weights=st.sampled_from([(1.0, 1.0), (1.0, 1.0), (3.0, 1.0), (1.0, 2.0)]),
    skips=st.sampled_from([0, 1, 3]),
    slots=st.sampled_from([1, 4, 8]),
    admission=st.sampled_from(["expected", "guaranteed", "optimistic"]),
    budget=st.sampled_from([8, 16]),
)


@settings(max_examples=examples(20))
@example(
    lengths=TALKERS_AND_READERS,
    weights=(1.0, 1.0),
    skips=0,
    slots=4,
    admission="guaranteed",
    budget=8,
)
@fairness
def test_backlogged_tenants_stay_within_the_bound(
    lengths: dict[str, list[tuple[int, int]]], weights: tuple[float, float],
    skips: int, slots: int, admission: str, budget: int,
) -> None:  # fmt: skip
    check_bound("fair", lengths, weights, skips, slots, admission, budget)


@pytest.mark.parametrize("queue", ["fcfs", "priority"])
def test_other_queues_break_the_same_bound(queue: str) -> None:
    @settings(max_examples=100, database=None, derandomize=True, phases=[Phase.generate])
    @fairness
    def check(
        lengths: dict[str, list[tuple[int, int]]], weights: tuple[float, float],
        skips: int, slots: int, admission: str, budget: int,
    ) -> None:  # fmt: skip
        check_bound(queue, lengths, weights, skips, slots, admission, budget)

    with pytest.raises(AssertionError, match="max"):
        check()


def flood(
    queue: QueuePolicy, priority: int, rates: list[int], pages: int
) -> tuple[Driver, list[Request]]:
    """One request of ``priority`` (the first returned) among more urgent ones, which come faster
    than they can be served: ``rates`` is how many each second, over and over.
    """
    driver = Driver(make_scheduler(pages=pages, queue=queue, max_num_seqs=2,
                                   admission="optimistic", max_skips=SKIPS))  # fmt: skip
    driver.submit(Request(id="first", prompt=(1,) * 8, max_tokens=8, arrival=0.0))
    driver.step()
    requests = [Request(id="lowest", prompt=(2,) * 12, max_tokens=12, priority=priority,
                        arrival=1.0)]  # fmt: skip
    driver.submit(requests[0])
    for second in range(1, 300):
        for k in range(rates[second % len(rates)]):
            request = Request(id=f"u{second}-{k}", prompt=(k,) * 6, max_tokens=4, priority=-k,
                              arrival=float(second))  # fmt: skip
            driver.submit(request)
            requests.append(request)
        driver.step()
        if ("lowest", 0) in driver.finished:
            break
    return driver, requests


@settings(max_examples=examples(15))
@given(
    priority=st.integers(0, 4),
    rates=st.lists(st.integers(1, 3), min_size=1, max_size=5),
    pages=st.sampled_from([8, 12, 40]),
)
def test_no_priority_starves_however_many_urgent_requests_come(
    priority: int, rates: list[int], pages: int
) -> None:
    """A level of priority is worth ``ageing`` seconds and no more: whoever comes later than that
    does not start before it, but for those who may skip.
    """
    ageing = 5.0
    driver, (lowest, *urgent) = flood(FairQueue(ageing), priority, rates, pages)
    assert driver.finished["lowest", 0] is FinishReason.LENGTH
    admitted = [event.request_id for event in driver.events if isinstance(event, Admitted)]
    before = set(admitted[: admitted.index("lowest")])
    skipped = [
        request
        for request in urgent
        if request.id in before
        and request.arrival > lowest.arrival + ageing * (priority - request.priority)
    ]
    assert len(skipped) <= SKIPS


def test_strict_priority_starves_the_lowest() -> None:
    driver, _ = flood(PriorityQueue(), 1, [2], 40)
    assert ("lowest", 0) not in driver.finished
    assert len(driver.finished) > 100, "others were served all the time"


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
    driver.scheduler.queue.charge(seen, 10_000.0)
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
