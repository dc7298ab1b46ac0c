from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstile.server.errors import ApiError
from turnstile.server.gate import Place, StaticGate, Work


def work(tokens: int = 10, n: int = 1) -> Work:
    return Work(tenant="t", prompt_tokens=tokens, max_tokens=10, n=n)


def test_an_idle_server_is_never_full() -> None:
    gate = StaticGate(slots=2, max_requests=0, max_tokens=0)
    first = gate.enter([work(), work()], 0.0)
    with pytest.raises(ApiError) as refused:
        gate.enter([work()], 0.0)
    assert refused.value.status == 503
    assert refused.value.code == "engine_overloaded"
    assert dict(refused.value.headers())[b"x-should-retry"] == b"true"
    first[0].start(1.0)
    first[0].leave(2.0)
    gate.enter([work()], 2.0)


def test_waiting_tokens_are_bounded() -> None:
    gate = StaticGate(slots=1, max_requests=None, max_tokens=100)
    gate.enter([work(1000)], 0.0)[0].start(0.0)
    gate.enter([work(60)], 0.0)
    with pytest.raises(ApiError):
        gate.enter([work(60)], 0.0)
    gate.enter([work(40)], 0.0)
    assert gate.rejections() == {"max_num_queued_reqs": 0, "max_num_queued_tokens": 1}


def test_several_enter_together_or_not_at_all() -> None:
    gate = StaticGate(slots=1, max_requests=4, max_tokens=None)
    with pytest.raises(ApiError) as refused:
        gate.enter([work()] * 10, 0.0)
    assert gate.load == 0
    assert refused.value.retry_after is None  # alone more than the queue: waiting does not help
    gate.enter([work()] * 5, 0.0)
    with pytest.raises(ApiError) as refused:
        gate.enter([work()], 0.0)
    assert refused.value.retry_after is not None
    assert 1 <= refused.value.retry_after <= 60


actions = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(1, 4)), max_size=80)


@given(actions, st.integers(1, 4), st.integers(0, 6), st.integers(0, 50))
def test_places_are_conserved(
    moves: list[tuple[int, int, int]], slots: int, requests: int, tokens: int
) -> None:
    gate = StaticGate(slots, requests, tokens)
    inside: list[Place] = []
    for kind, number, n in moves:
        if kind == 0:
            try:
                inside += gate.enter([work(number, n)], 0.0)
            except ApiError:
                assert inside
        elif inside:
            place = inside[number % len(inside)]
            if kind == 1:
                place.start(0.0)
            else:
                place.leave(0.0)
                place.leave(0.0)
                inside.remove(place)
        state: Any = gate
        waiting = [place for place in inside if not place.started]
        assert state._waiting == len(waiting)
        assert state._waiting_tokens == sum(place.work.prompt_tokens for place in waiting)
        assert state._running == sum(place.work.n for place in inside if place.started)
        assert len(waiting) <= requests + slots
