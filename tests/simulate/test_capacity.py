"""Bisection, and what many machines behind a router hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulate.machines import arrivals, setup
from turnstile.bench.lengths import Fixed, Uniform
from turnstile.simulate.capacity import by_majority, find_capacity, highest_rate, most_users
from turnstile.simulate.figures import Figures, Limits
from turnstile.simulate.load import Load, draw
from turnstile.simulate.run import Plant, play, simulate


def pretend(capacity: float) -> object:
    def run(value: float) -> Figures:
        kept = value <= capacity
        return {"goodput": {"kept": kept, "attainment": 1.0 if kept else 0.5}}

    return run


@pytest.mark.parametrize("capacity", [1, 2, 63, 64, 65, 100, 1999])
def test_bisection_finds_the_last_load_that_keeps_the_limits(capacity: int) -> None:
    found = find_capacity(pretend(capacity), 64, 1, 1 << 20, 0.0)  # type: ignore[arg-type]
    assert found.value == capacity
    assert found.broken == capacity + 1
    assert found.figures is not None


def test_where_nothing_keeps_the_limits_the_capacity_is_nothing() -> None:
    found = find_capacity(pretend(0), 64, 1, 1 << 20, 0.0)  # type: ignore[arg-type]
    assert (found.value, found.figures) == (0, None)


def test_where_everything_keeps_them_no_broken_load_is_named() -> None:
    found = find_capacity(pretend(1e9), 64, 1, 1000, 0.0)  # type: ignore[arg-type]
    assert (found.value, found.broken) == (1000, None)


def test_the_most_users_keep_the_limits_and_more_do_not() -> None:
    plant = Plant(setup(max_num_seqs=64, max_num_batched_tokens=256))
    limits = Limits({"tpot": 25.0}, share=0.9)

    def make(users: float, number: int) -> Load:
        load = draw("fixed", 5 * int(users), Fixed(20), Fixed(20), 1 + number)
        return load.with_users(int(users))

    found = most_users(plant, make, limits, start=4)
    # A decode step takes 10 ms and 1 ms a user, and now and then a prompt comes on top.
    assert 4 <= found.value <= 15
    assert found.broken == found.value + 1


def test_two_machines_bear_about_twice_the_rate() -> None:
    def make(rate: float, number: int) -> Load:
        load = draw("fixed", 100, Fixed(20), Uniform(5, 15), 1 + number)
        return load.with_rate(rate, 1 + number)

    limits = Limits({"ttft": 500.0}, share=0.95)
    one = highest_rate(Plant(setup()), make, limits)
    two = highest_rate(Plant(setup(), 2, "least-loaded"), make, limits)
    assert 1.6 < two.value / one.value < 2.6


@pytest.mark.parametrize(
    ("attained", "tries", "draws", "told"),
    [
        ([0.97, 0.96, 0.10], 3, 2, 0.96),
        ([0.97, 0.10, 0.96], 3, 3, 0.96),
        ([0.10, 0.97, 0.20], 3, 3, 0.20),
        ([0.97, 0.10], 2, 2, 0.10),
        ([0.10], 1, 1, 0.10),
    ],
)
def test_a_load_is_judged_by_most_of_its_draws(
    attained: list[float], tries: int, draws: int, told: float
) -> None:
    drawn = []

    def run(number: int) -> Figures:
        drawn.append(number)
        attainment = attained[number]
        return {"goodput": {"kept": attainment >= 0.95, "attainment": attainment}}

    assert by_majority(run, tries)["goodput"]["attainment"] == told
    assert drawn == list(range(draws))


def test_no_try_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="at least once"):
        by_majority(lambda number: {}, 0)


def test_a_router_that_knows_prefixes_saves_prefill() -> None:
    load = draw("shared", 200, Fixed(8), Fixed(4), 3, prefixes=40, prefix_tokens=64)
    load = load.with_rate(5.0, 3)
    cached = {
        router: simulate(Plant(setup(pages=120), 4, router), load)["cached_tokens"]
        for router in ("round-robin", "prefix-aware")
    }
    assert cached["prefix-aware"] > 1.3 * cached["round-robin"]


def test_the_least_loaded_machine_is_chosen_over_the_next_in_turn() -> None:
    # Every second request is long: in turn, one machine would get all of them.
    load = arrivals(*[(i * 0.05, 10, 200 if i % 2 else 2) for i in range(40)])
    plants = {router: Plant(setup(), 2, router) for router in ("round-robin", "least-loaded")}
    ends = {router: play(plant, load).end for router, plant in plants.items()}
    assert ends["least-loaded"] < ends["round-robin"]


def test_replicas_and_routers_are_checked() -> None:
    with pytest.raises(ValueError, match="replicas"):
        Plant(setup(), 0)
    with pytest.raises(ValueError, match="router"):
        Plant(setup(), 2, "random")
    with pytest.raises(ValueError, match="admission"):
        replace(setup(), admission="hopeful")
