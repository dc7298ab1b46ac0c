"""The memory test equals a simulation; who is refused; who must go; what a step costs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.driver import Driver, make_scheduler, solo
from turnstile.core.admission import NeverFitsError, decode_peak
from turnstile.core.cost import CACHED_READ, Coefficients, CostModel, StepCost, read_again
from turnstile.core.entrance import Entrance
from turnstile.core.events import Admitted
from turnstile.core.fairness import FairQueue
from turnstile.core.pages import PagePool, PageTable
from turnstile.core.plan import Chunk, Plan
from turnstile.core.preemption import choose_victim
from turnstile.core.request import Request, Sequence


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), max_size=12), st.integers(1, 17))
def test_decode_peak_is_what_stepping_shows(pairs: list[tuple[int, int]], page_size: int) -> None:
    worst = 0
    for step in range(61):
        alive = [held + step for held, coming in pairs if coming >= step]
        worst = max(worst, sum(-(-tokens // page_size) for tokens in alive))
    held, coming = np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])
    assert decode_peak(held.astype(np.int64), coming.astype(np.int64), page_size) == worst


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({"prompt": (1,) * 150, "max_tokens": 51}, "max_model_len"),
        ({"prompt": (1,) * 40, "max_tokens": 26}, "num_pages"),
        ({"prompt": (1,) * 10, "max_tokens": 20, "n": 4}, "num_pages"),
        ({"prompt": (1,), "max_tokens": 2, "n": 9}, "max_num_seqs"),
    ],
)
def test_what_can_never_run_is_refused_by_name(settings: dict[str, object], limit: str) -> None:
    scheduler = make_scheduler(pages=16, page_size=4)
    with pytest.raises(NeverFitsError) as refusal:
        scheduler.submit(Request(id="x", **settings), now=0.0)  # type: ignore[arg-type]
    assert refusal.value.limit == limit
    assert not scheduler.has_work
    scheduler.submit(Request(id="fits", prompt=(1,) * 40, max_tokens=25), now=0.0)


def running(name: str, order: int, *, tenant: str = "t", priority: int = 0, computed: int = 5,
            preemptions: int = 0) -> Sequence:  # fmt: skip
    request = Request(id=name, prompt=(1,) * 9, max_tokens=9, tenant=tenant, priority=priority)
    sequence = Sequence(request, arrival_order=order)
    sequence.computed, sequence.preemptions = computed, preemptions
    return sequence


def test_the_victim_is_the_lowest_priority_then_the_most_served_then_the_least_lost() -> None:
    queue = FairQueue()
    oldest = running("oldest", 0, priority=9)
    members = [oldest, running("low", 1, priority=2), running("rich", 2, tenant="rich"),
               running("little", 3, computed=1), running("much", 4, computed=8)]  # fmt: skip
    for member in members:
        queue.arrive(member)
    queue.charge(members[2], 100.0)
    order = []
    while (victim := choose_victim(members, queue, 3)) is not None:
        order.append(victim.request.id)
        members.remove(victim)
    assert order == ["low", "rich", "little", "much"]
    assert members == [oldest]


def test_who_was_preempted_three_times_is_spared_while_there_is_another() -> None:
    queue = FairQueue()
    pinned, other = running("pinned", 1, priority=5, preemptions=3), running("other", 2)
    oldest = running("oldest", 0)
    for member in (oldest, pinned, other):
        queue.arrive(member)
    assert choose_victim([oldest, pinned, other], queue, 3) is other
    assert choose_victim([oldest, pinned], queue, 3) is pinned


def steps(seed: int, count: int) -> list[StepCost]:
    rng = np.random.default_rng(seed)
    costs = []
    for _ in range(count):
        batch = int(rng.integers(1, 64))
        tokens = batch + int(rng.integers(0, 512))
        costs.append(StepCost(tokens, int(tokens * rng.integers(1, 2000)), batch))
    return costs


def test_the_cost_model_recovers_the_coefficients() -> None:
    model, true = CostModel(), (5e-3, 2e-4, 3e-8, 1e-4)
    for cost in steps(0, 800):
        model.observe(
            cost,
            true[0] + true[1] * cost.tokens + true[2] * cost.query_context + true[3] * cost.batch,
        )
    fit = model.coefficients
    assert (fit.alpha, fit.beta, fit.gamma, fit.delta) == pytest.approx(true, rel=0.02)
    decodes = StepCost(10, 5000, 10)
    budget = model.budget(0.1, decodes, 10_000)
    assert 10 < budget < 10_000
    assert model.predict(StepCost(budget, 5000 + 256 * (budget - 10), 10)) == pytest.approx(
        0.1, rel=0.02
    )
    assert model.budget(0.0, decodes, 10_000) == 10


def test_the_finer_model_tells_apart_what_waits_for_memory_and_what_is_computed() -> None:
    rng = np.random.default_rng(2)
    fine, plain = CostModel(fine=True), CostModel()
    true = Coefficients(5e-3, 2e-4, 3e-8, 1e-4, 9e-7, 16, 1.5e-7)
    for number, cost in enumerate(steps(3, 800)):
        decodes = StepCost.decoding(int(rng.integers(1, 64)), int(rng.integers(1, 900)))
        shared = decodes.sharing(int(rng.uniform(0.0, 0.9) * decodes.decode_reads))
        cost = shared + (StepCost(0, 0, 0), cost)[number % 2]
        for model in (fine, plain):
            model.observe(cost, true.predict(cost))
    assert dataclasses.astuple(fine.coefficients) == pytest.approx(
        dataclasses.astuple(true), rel=0.02
    )
    assert (plain.coefficients.epsilon, plain.coefficients.knee) == (None, 0)


def test_what_is_shared_is_believed_to_cost_a_part_until_steps_that_share_tell() -> None:
    rng, model = np.random.default_rng(5), CostModel(fine=True)
    true = Coefficients(5e-3, 1e-4, 1e-7, 1e-4, 6e-7, 0, 6e-8)

    def observe(users: int, shared: int) -> None:
        decodes = StepCost.decoding(users, int(rng.integers(100, 400)) + shared)
        again = shared * (users - 1)
        model.observe(decodes.sharing(again), true.predict(decodes.sharing(again)))

    for _ in range(300):
        observe(int(rng.integers(1, 100)), 0)
    fit = model.coefficients
    assert fit.epsilon is not None
    assert fit.zeta == pytest.approx(CACHED_READ * fit.epsilon, rel=0.02)
    for _ in range(150):
        observe(int(rng.integers(50, 100)), 512)
    assert model.coefficients.zeta == pytest.approx(6e-8, rel=0.1)
    assert model.coefficients.epsilon == pytest.approx(6e-7, rel=0.1)


def test_up_to_the_knee_rows_are_free_and_shared_pages_cost_less_the_second_time() -> None:
    cost = Coefficients(5e-3, 2e-4, 3e-8, 0.0, 9e-7, 16)
    assert cost.predict(StepCost(1, 0, 1)) == cost.predict(StepCost(16, 0, 1))
    assert cost.predict(StepCost(17, 0, 1)) > cost.predict(StepCost(16, 0, 1))
    decodes = StepCost.decoding(64, 500)
    saved = cost.predict(decodes) - cost.predict(decodes.sharing(1000))
    assert saved == pytest.approx((1 - CACHED_READ) * 1000 * 9e-7)
    assert decodes.sharing(10**9).decode_reads == 0
    assert decodes.sharing(10**9).shared_reads == decodes.decode_reads
    told = dataclasses.replace(cost, zeta=2e-7)
    assert cost.predict(decodes) - told.predict(decodes.sharing(1000)) == pytest.approx(1000 * 7e-7)
    for each, step in ((cost, decodes), (told, decodes.sharing(1000))):
        assert each.scaled(2.0).predict(step) == pytest.approx(2.0 * each.predict(step))


def test_pages_are_read_again_by_the_rows_that_decode_and_not_by_prompts() -> None:
    pool = PagePool(20, 16)
    tables = [PageTable() for _ in range(4)]
    for _ in range(5):
        pool.append(tables[0])
    assert read_again(pool, 1, 1) == 0
    for table in tables[1:]:
        pool.hold(table, tables[0].pages)
    assert read_again(pool, 4, 4) == 3 * 5 * 16
    assert read_again(pool, 2, 4) == 3 * 5 * 16 // 2
    assert read_again(pool, 0, 4) == 0


@pytest.mark.parametrize("fine", [False, True])
def test_steps_held_up_count_for_what_they_take(fine: bool) -> None:
    """A third of the steps takes twice as long, for reasons of the machine: the fit tells the mean
    of all, 4/3, not what a step takes that is not held up; one that hangs changes little of it.
    """
    model, rng = CostModel(fine=fine), np.random.default_rng(4)
    for number, cost in enumerate(steps(5, 1500)):
        held_up = 2.0 if rng.random() < 1 / 3 else 1.0
        model.observe(cost, held_up * (5e-3 + 2e-4 * cost.tokens) + 30.0 * (number == 1200))
    cost = StepCost(200, 30_000, 30)
    assert model.predict(cost) == pytest.approx(4 / 3 * 45e-3, rel=0.04)


def test_the_features_of_a_plan_add_up() -> None:
    sequences = [Sequence(Request(id=str(i), prompt=(1,) * 40, max_tokens=4)) for i in range(3)]
    chunks = (Chunk(sequences[0], 39, 1, 1), Chunk(sequences[1], 10, 3, 0))
    both = StepCost.of(Plan(0, chunks))
    assert both == StepCost(4, 40 + 11 + 12 + 13, 2, 40, 40)
    assert both == sum((StepCost.of(Plan(0, (c,))) for c in chunks), StepCost(0, 0, 0))
    guessed = Chunk(sequences[2], 39, 3, 3, drafts=(7, 8))
    assert StepCost.of(Plan(0, (guessed,))) == StepCost(3, 40, 1, 40, 40, shared_reads=2 * 40)


def test_coefficients_are_never_negative() -> None:
    model = CostModel()
    for i, cost in enumerate(steps(1, 200)):
        model.observe(cost, 0.05 if i % 2 else 0.001 + 1.0 / cost.tokens)
        fit = model.coefficients
        assert min(fit.alpha, fit.beta, fit.gamma, fit.delta) >= 0.0


def test_a_cold_model_limits_nothing() -> None:
    assert CostModel().budget(0.001, StepCost(5, 5, 5), 512) == 512


def test_a_prompt_that_is_computed_makes_room_before_anybody_leaves() -> None:
    """In prefill a sequence counts in full; once it decodes beside another, it will have left
    before the other has grown.
    """
    driver = Driver(make_scheduler(pages=12, max_num_batched_tokens=8, admission="guaranteed"))
    driver.submit(Request(id="grows", prompt=(1,) * 4, max_tokens=21))
    driver.step()
    long = driver.submit(Request(id="long", prompt=(2,) * 20, max_tokens=5))
    driver.step()
    small = driver.submit(Request(id="small", prompt=(3,) * 4, max_tokens=5))
    driver.step()
    assert not long.decoding
    assert small.started is None
    while small.started is None:
        driver.step()
    assert long.decoding
    assert not driver.finished
    driver.run()


def test_what_a_stream_publishes_makes_room_for_the_next_turn_of_the_conversation() -> None:
    driver = Driver(make_scheduler(pages=8, admission="guaranteed"))
    first = Request(id="first", prompt=(1,) * 4, max_tokens=20)
    speaking = driver.submit(first)
    driver.step()
    prompt = (*first.prompt, *solo(first)[:12], 9)
    following = driver.submit(Request(id="next", prompt=prompt, max_tokens=4))
    driver.step()
    assert following.started is None
    while following.started is None:
        driver.step()
    assert speaking.num_outputs < 20, "it did not have to wait for the end"
    assert following.num_cached >= 12
    driver.run()


def test_a_long_prompt_that_does_not_fit_is_matched_anew_only_when_something_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(make_scheduler(pages=60, admission="guaranteed"))
    for i in range(2):
        driver.submit(Request(id=f"runs{i}", prompt=(i,) * 9, max_tokens=40 + 20 * i))
    driver.step()
    driver.submit(Request(id="long", prompt=(7,) * 150, max_tokens=20, arrival=1.0))
    looked: list[int] = []
    cache = driver.scheduler.cache
    match = cache.match
    monkeypatch.setattr(cache, "match", lambda s: (looked.append(len(driver.plans)), match(s))[1])
    monkeypatch.setattr(driver.scheduler.entrance, "_still_blocked",
                        Entrance._still_blocked.__get__(driver.scheduler.entrance))  # fmt: skip
    driver.run()
    started = next(e.time for e in driver.events if isinstance(e, Admitted) and e.index == 0
                   and e.request_id == "long")  # fmt: skip
    assert started >= 40, "it waited long"
    # Once on arrival, once when the others began to decode, once for each that left.
    assert len(looked) <= 4
