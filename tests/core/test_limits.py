"""What one tenant may use: buckets, and limits at the gate."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstile.core.gate import Gate, GateConfig, Place, Refused, Work
from turnstile.core.limits import Bucket, TenantLimits


def work(tokens: int = 10, n: int = 1, tenant: str = "a", **limits: int) -> Work:
    return Work(
        tenant=tenant, prompt_tokens=tokens, max_tokens=10, min_tokens=10, n=n,
        limits=TenantLimits(**limits),
    )  # fmt: skip


def refusal(gate: Gate, works: list[Work], now: float = 0.0) -> Refused:
    with pytest.raises(Refused) as refused:
        gate.enter(works, now)
    return refused.value


@given(
    st.integers(1, 10_000),
    st.lists(st.tuples(st.floats(0, 100), st.floats(-50, 500)), max_size=40),
)
def test_a_bucket_never_gives_more_than_a_minute_holds_and_what_has_filled(
    limit: int, takes: list[tuple[float, float]]
) -> None:
    bucket, now, taken = Bucket(limit, 0.0), 0.0, 0.0
    for wait, amount in takes:
        now += wait
        if amount <= bucket.level(now):
            seconds = bucket.seconds_until(amount, now)
            assert seconds == 0
            bucket.take(amount, now)
            taken += max(0.0, amount)
        elif amount <= limit:
            assert bucket.level(now + bucket.seconds_until(amount, now)) >= amount - 1e-6
        assert bucket.level(now) <= limit
    given_back = -sum(amount for _, amount in takes if amount < 0)
    assert taken <= limit + now * limit / 60 + given_back + 1e-6


def test_a_tenant_may_have_so_many_samples_at_once_and_another_is_not_counted() -> None:
    gate = Gate(GateConfig(slots=100))
    places = gate.enter([work(n=2, max_concurrent=3)], 0.0)
    assert refusal(gate, [work(n=2, max_concurrent=3)]).reason == "max_concurrent"
    gate.enter([work(n=2, tenant="b", max_concurrent=3)], 0.0)
    places += gate.enter([work(max_concurrent=3)], 0.0)
    refused = refusal(gate, [work(max_concurrent=3)])
    assert refused.retry_after is not None
    assert 1 <= refused.retry_after <= 60
    assert refusal(gate, [work(n=4, max_concurrent=3)]).retry_after is None
    places[0].leave(0.0)
    gate.enter([work(n=2, max_concurrent=3)], 0.0)


def test_tokens_are_reserved_at_the_door_and_settled_by_what_was_drawn() -> None:
    gate = Gate(GateConfig(slots=100))
    limits: dict[str, Any] = {"tokens_per_minute": 100}
    [place] = gate.enter([work(70, **limits)], 0.0)
    assert gate.allowances("a", 0.0)["tokens"].remaining == 20
    assert refusal(gate, [work(20, **limits)]).reason == "tokens_per_minute"
    place.start(0.0)
    place.leave(0.0, drawn=4)
    assert gate.allowances("a", 0.0)["tokens"].remaining == 26
    [place] = gate.enter([work(16, **limits)], 0.0)
    place.leave(0.0)  # it never ran: all of it comes back
    assert gate.allowances("a", 0.0)["tokens"].remaining == 26
    refused = refusal(gate, [work(41, **limits)])
    # 25 more of 100 a minute; those refused before were promised 30 first.
    assert refused.retry_after == pytest.approx(33.0)
    assert refusal(gate, [work(101, **limits)]).retry_after is None


def test_requests_per_minute_count_requests_and_not_prompts() -> None:
    gate = Gate(GateConfig(slots=100))
    gate.enter([work(requests_per_minute=2)] * 5, 0.0)
    gate.enter([work(requests_per_minute=2)], 0.0)
    first = refusal(gate, [work(requests_per_minute=2)])
    second = refusal(gate, [work(requests_per_minute=2)])
    assert (first.retry_after, second.retry_after) == (30.0, 60.0)
    gate.enter([work(requests_per_minute=2)], 30.0)
    assert gate.allowances("a", 30.0)["requests"].remaining == 0
    assert gate.allowances("a", 30.0)["requests"].reset == pytest.approx(60.0)


def test_a_refused_request_takes_nothing_of_its_tenants_minute() -> None:
    gate = Gate(GateConfig(slots=1, max_requests=0))
    limits: dict[str, Any] = {"tokens_per_minute": 100, "requests_per_minute": 9}
    gate.enter([work(10, **limits)], 0.0)
    before = gate.allowances("a", 0.0)
    assert refusal(gate, [work(10, **limits)]).reason == "max_num_queued_reqs"
    assert gate.allowances("a", 0.0) == before


def test_new_limits_hold_for_those_who_are_inside_already() -> None:
    gate = Gate(GateConfig(slots=100))
    inside = gate.enter([work(n=3)], 0.0)
    assert refusal(gate, [work(max_concurrent=3)]).reason == "max_concurrent"
    gate.enter([work()], 0.0)
    inside[0].leave(0.0)
    gate.enter([work(max_concurrent=3)], 0.0)


moves = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20), st.floats(0, 5)), max_size=60)


@given(moves, st.integers(1, 6), st.integers(1, 300))
def test_what_a_tenant_has_inside_is_counted_through_every_ending(
    actions: list[tuple[int, int, float]], concurrent: int, tokens: int
) -> None:
    gate = Gate(GateConfig(slots=4, max_requests=3))
    inside: list[Place] = []
    now = 0.0
    for kind, number, wait in actions:
        now += wait
        if kind == 0:
            limits = {"max_concurrent": concurrent, "tokens_per_minute": tokens}
            try:
                inside += gate.enter([work(number, 1 + number % 2, **limits)], now)
            except Refused:
                continue
        elif inside:
            place = inside.pop(number % len(inside))
            if kind > 1:
                place.start(now)
            place.leave(now, drawn=number)
            place.leave(now, drawn=number)
        state: Any = gate
        if state._meters:
            assert state._meters["a"].concurrent == sum(place.work.n for place in inside)
            assert state._meters["a"].concurrent <= concurrent
            assert gate.allowances("a", now)["tokens"].remaining <= tokens
