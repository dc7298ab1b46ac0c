"""The gate: what it reserves, whom it refuses, and how good its predictions are."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.driver import Driver, make_scheduler
from turnstile.core.correction import Correction
from turnstile.core.cost import Coefficients, StepCost
from turnstile.core.events import Admitted
from turnstile.core.fairness import FirstComeQueue
from turnstile.core.forecast import EngineView, steps_until_start
from turnstile.core.gate import REASONS, Gate, GateConfig, Place, Refused, Work
from turnstile.core.output_means import OutputMeans
from turnstile.core.plan import Outcome
from turnstile.core.request import FinishReason, Request

COST = Coefficients(0.005, 1e-4, 0.0, 1e-4)


def work(tokens: int = 10, n: int = 1, **fields: Any) -> Work:
    return Work(prompt_tokens=tokens, max_tokens=fields.pop("max_tokens", 10), n=n, **fields)


def warm(**fields: Any) -> EngineView:
    return EngineView(cost=COST, cost_samples=100, **fields)


def admitted(gate: Gate, count: int, **fields: Any) -> list[Place]:
    """Enter one by one at the same moment; those who were let in."""
    places = []
    for _ in range(count):
        try:
            places += gate.enter([work(**fields)], 0.0)
        except Refused:
            continue
    return places


@given(st.integers(1, 64), st.integers(0, 64), st.integers(0, 200), st.booleans())
def test_of_a_burst_exactly_slots_and_queue_get_in(
    slots: int, bound: int, burst: int, is_warm: bool
) -> None:
    gate = Gate(GateConfig(slots=slots, max_requests=bound))
    if is_warm:
        gate.learn(warm())
    places = admitted(gate, burst)
    assert len(places) == min(burst, slots + bound)
    assert gate.rejections["max_num_queued_reqs"] == max(0, burst - slots - bound)


@given(st.integers(0, 100_000), st.integers(1, 100_000), st.integers(0, 50))
def test_an_idle_gate_refuses_nobody(tokens: int, max_tokens: int, free: int) -> None:
    bounds = GateConfig(slots=1, max_requests=0, max_tokens=0, max_wait=1e-6)
    gate = Gate(bounds)
    gate.learn(warm(free_tokens=free, prefill_tokens=50))
    assert gate.enter([work(tokens, max_tokens=max_tokens)], 0.0)


def test_a_cold_estimate_refuses_nobody() -> None:
    gate = Gate(GateConfig(slots=1, max_wait=1e-6))
    gate.learn(EngineView(cost=COST, cost_samples=3))
    assert len(admitted(gate, 50)) == 50
    gate.learn(warm())
    with pytest.raises(Refused) as refused:
        gate.enter([work()], 0.0)
    assert refused.value.reason == "max_queue_wait"
    assert refused.value.estimate is not None


def test_waiting_tokens_are_bounded_and_a_request_beyond_all_bounds_is_told_so() -> None:
    gate = Gate(GateConfig(slots=1, max_tokens=100))
    gate.enter([work(1000)], 0.0)[0].start(0.0)
    gate.enter([work(60)], 0.0)
    with pytest.raises(Refused) as refused:
        gate.enter([work(60)], 0.0)
    assert refused.value.retry_after is not None
    with pytest.raises(Refused) as refused:
        gate.enter([work(60), work(60)], 0.0)
    assert refused.value.retry_after is None
    gate.enter([work(40)], 0.0)


def test_prompts_of_one_request_enter_together_or_not_at_all() -> None:
    gate = Gate(GateConfig(slots=1, max_requests=4))
    with pytest.raises(Refused) as refused:
        gate.enter([work()] * 10, 0.0)
    assert gate.waiting == 0
    assert refused.value.retry_after is None
    assert len(gate.enter([work()] * 5, 0.0)) == 5


def test_a_refusal_counts_those_who_wait_and_not_who_is_refused_or_has_a_slot() -> None:
    gate = Gate(GateConfig(slots=2, max_requests=4))
    gate.enter([work(10)], 0.0)[0].start(0.0)
    admitted(gate, 9, tokens=10)
    assert gate.waiting == 5  # one of them will have the second slot as soon as a step is over
    with pytest.raises(Refused) as refused:
        gate.enter([work(10)], 0.0)
    assert (refused.value.bound, refused.value.waiting) == (4, 4)
    assert refused.value.waiting_tokens == 40


def test_pages_that_are_taken_make_a_queue_although_slots_are_free() -> None:
    gate = Gate(GateConfig(slots=8, max_requests=2))
    gate.learn(warm(free_tokens=1000))
    for place in gate.enter([work(300, max_tokens=100, min_tokens=100)], 0.0):
        place.start(0.0)
    gate.learn(warm(free_tokens=600, prefill_tokens=0))
    # 600 tokens free, 100 of them for who runs: one more of 400 fits, two may wait.
    assert len(admitted(gate, 9, tokens=300, max_tokens=100, min_tokens=100)) == 3


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30), st.integers(1, 4)), max_size=80),
    st.integers(1, 4),
    st.integers(0, 6),
    st.integers(0, 50),
)
def test_places_are_given_back_exactly_once_in_every_ending(
    moves: list[tuple[int, int, int]], slots: int, requests: int, tokens: int
) -> None:
    gate = Gate(GateConfig(slots=slots, max_requests=requests, max_tokens=tokens))
    gate.learn(warm())
    inside: list[Place] = []
    refusals: list[Refused] = []
    for now, (kind, number, n) in enumerate(moves):
        if kind == 0:
            try:
                inside += gate.enter([work(number, n, tenant=f"t{number % 3}")], float(now))
            except Refused as refused:
                refusals.append(refused)
                assert inside
        elif inside:
            place = inside[number % len(inside)]
            if kind == 1:
                place.start(now)
            elif kind == 2:
                place.first_token(now)
            else:
                place.leave(now, [3] * n)
                place.leave(now, [3] * n)
                place.start(now)
                place.first_token(now)
                inside.remove(place)
        waiting = [place for place in inside if not place.started]
        assert gate.waiting == len(waiting)
        assert gate.waiting_tokens == sum(place.work.prompt_tokens for place in waiting)
        assert gate.running == sum(place.work.n for place in inside if place.started)
    for place in inside:
        place.leave(99.0)
    assert all(1 <= r.retry_after <= 60 for r in refusals if r.retry_after is not None)
    state: Any = gate._crowd
    assert (gate.waiting, gate.waiting_tokens, gate.running) == (0, 0, 0)
    assert not state._backlogs
    assert not state._running
    assert not state.running_of


def test_those_sent_away_are_told_to_come_back_one_after_the_other() -> None:
    gate = Gate(GateConfig(slots=1, max_requests=1))
    gate.learn(warm())
    for place in admitted(gate, 1, max_tokens=400, min_tokens=400):
        place.start(0.0)
    admitted(gate, 1, max_tokens=400, min_tokens=400)
    told = []
    for _ in range(8):
        with pytest.raises(Refused) as refused:
            gate.enter([work(max_tokens=400)], 0.0)
        told.append(refused.value.retry_after)
    assert told == sorted(told)
    # 400 steps of about 5 ms each: the first start in 2 s, the others as long apart.
    assert told[0] is not None
    assert told[3] is not None
    assert 1.5 < told[0] < 3
    assert 7 < told[3] < 10


def test_another_tenant_is_not_told_to_wait_behind_a_flood() -> None:
    gate = Gate(GateConfig(slots=8))
    gate.learn(warm(served={"flood": 0.0}))
    for place in admitted(gate, 7, tenant="flood", max_tokens=300, min_tokens=300):
        place.start(0.0)
    admitted(gate, 200, tenant="flood", max_tokens=300, min_tokens=300)
    flood = gate.predict(work(tenant="flood", max_tokens=300))
    other = gate.predict(work(tenant="other", max_tokens=300))
    assert flood is not None
    assert other is not None
    assert other.wait < 0.1
    assert flood.wait > 20


def test_under_first_come_first_served_everybody_waits_behind_the_flood() -> None:
    gate = Gate(GateConfig(slots=8, policy=FirstComeQueue))
    gate.learn(warm())
    for place in admitted(gate, 8, tenant="flood", max_tokens=300, min_tokens=300):
        place.start(0.0)
    admitted(gate, 200, tenant="flood", max_tokens=300, min_tokens=300)
    other = gate.predict(work(tenant="other", max_tokens=300))
    assert other is not None
    assert other.wait > 20


def test_an_urgent_request_is_predicted_before_the_others_of_its_tenant() -> None:
    gate = Gate(GateConfig(slots=2))
    gate.learn(warm())
    for place in admitted(gate, 2, max_tokens=300, min_tokens=300):
        place.start(0.0)
    admitted(gate, 50, max_tokens=300, min_tokens=300)
    late, urgent = gate.predict(work(priority=1)), gate.predict(work(priority=-1))
    assert late is not None
    assert urgent is not None
    assert urgent.wait < late.wait / 10


def test_the_place_of_a_start_follows_the_slots_that_come_free() -> None:
    assert steps_until_start([], 4, 10.0, 3) == 0.0
    assert steps_until_start([2.0, 5.0], 0, 10.0, 1) == 2.0
    assert steps_until_start([2.0, 5.0], 0, 10.0, 2) == 5.0
    assert steps_until_start([2.0, 5.0], 0, 10.0, 3) == 12.0
    assert steps_until_start([2.0], 1, 10.0, 3) == 10.0


def test_expected_outputs_follow_what_came_and_stay_within_the_limits() -> None:
    means = OutputMeans()
    assert means.expected(0, 5) == 5.0
    assert means.expected(40, 40) == 40.0
    for _ in range(300):
        means.add(30)
    assert 28 < means.expected(0, 4000) < 40
    assert means.expected(0, 8) <= 8
    assert means.expected(100, 200) == 100


@given(st.floats(0.05, 20.0), st.integers(0, 10_000))
def test_calibration_finds_a_constant_error_and_covers_nine_in_ten(
    factor: float, seed: int
) -> None:
    draw = random.Random(seed)
    calibration = Correction()
    covered = 0
    for i in range(3000):
        raw = 10 ** draw.uniform(0.01, 0.99)
        actual = raw * factor * draw.lognormvariate(0, 0.5)
        median, p90 = calibration.correct(raw)
        calibration.observe(raw, median, p90, actual)
        if i >= 1000:
            covered += actual <= p90
    assert 0.87 < covered / 2000 < 0.98
    assert factor / 1.6 < calibration.correct(5.0)[0] / 5.0 < factor * 1.6


def drive(load: float, seed: int, requests: int = 600) -> Gate:
    """The scheduler itself on virtual time behind a gate; Poisson arrivals at ``load``."""
    draw = random.Random(seed)
    scheduler = make_scheduler(
        pages=4000, page_size=16, max_num_seqs=8, max_num_batched_tokens=128, max_model_len=4000
    )
    gate = Gate(GateConfig(slots=8, budget=128))
    places: dict[str, Place] = {}
    now, arrival, count = 0.0, 0.0, 0
    seconds = 8 * COST.beta + COST.alpha + 8 * COST.delta
    rate = load * 8 / (60 * seconds)
    while count < requests or scheduler.has_work:
        while arrival <= now and count < requests:
            tokens, outputs = draw.randint(5, 60), min(240, int(draw.expovariate(1 / 60)) + 1)
            tenant = draw.choice("ab")
            request = Request(
                id=f"r{count}", prompt=(count % 50,) * tokens, max_tokens=240, tenant=tenant,
                arrival=arrival, stop_ids=frozenset({outputs}),
            )  # fmt: skip
            [places[request.id]] = gate.enter(
                [work(tokens, max_tokens=240, tenant=tenant)], arrival
            )
            scheduler.submit(request, now=now)
            count += 1
            arrival += draw.expovariate(rate)
        plan = scheduler.plan(now)
        for event in scheduler.take_events():
            if type(event).__name__ == "Admitted":
                places[event.request_id].start(event.time)  # type: ignore[union-attr]
        gate.learn(EngineView.of(scheduler))
        if not plan:
            now = max(now, arrival)
            continue
        took = COST.predict(StepCost.of(plan)) * draw.uniform(0.8, 1.3)
        now += took
        outcomes = [
            Outcome((c.sequence.num_outputs + 1,) if c.samples else ()) for c in plan.chunks
        ]
        for progress in scheduler.commit(plan, outcomes, now, took):
            place = places[progress.sequence.request.id]
            if progress.tokens:
                place.first_token(now)
            if progress.finish:
                place.leave(now, [progress.sequence.num_outputs])
    return gate


@pytest.mark.parametrize("load", [0.5, 1.5])
def test_predictions_of_the_scheduler_itself_are_calibrated(load: float) -> None:
    gate = drive(load, seed=1)
    for calibration in (gate.wait, gate.ttft):
        assert calibration.count > 550
        assert calibration.coverage > 0.85
        ratio = calibration.predicted_seconds / calibration.actual_seconds
        assert 0.7 < ratio < 1.4


def test_the_preempted_keep_their_places_and_nobody_asks_the_gate_for_them() -> None:
    driver = Driver(make_scheduler(pages=12, admission="optimistic", max_num_batched_tokens=64))
    gate = Gate(GateConfig(slots=8, max_requests=0, max_wait=1e-3))
    places = {}
    for k in range(6):
        [places[f"r{k}"]] = gate.enter([work(8, max_tokens=16)], 0.0)
        driver.submit(Request(id=f"r{k}", prompt=(k,) * 8, max_tokens=16))
    while driver.scheduler.has_work:
        driver.step()
        gate.learn(warm(free_tokens=0, prefill_tokens=50))
        for event in driver.events:
            if isinstance(event, Admitted):
                places[event.request_id].start(event.time)
        assert gate.waiting == 0  # also while the engine has preempted some
        assert gate.running == len(places)
    assert driver.scheduler.statistics.preemptions > 0
    assert set(driver.finished.values()) == {FinishReason.LENGTH}
    assert gate.rejections == dict.fromkeys(REASONS, 0)
