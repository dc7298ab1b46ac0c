"""The search for the most users, and the clocks that runs go by."""

from __future__ import annotations

import pytest

from turnstile.lab.capacity import Trial, by_majority, find_capacity, try_users
from turnstile.lab.continuous import ContinuousServer
from turnstile.lab.drive import drive
from turnstile.lab.load import Ask, OpenLoad
from turnstile.lab.model import LabModel
from turnstile.lab.static import StaticServer


def trial(users: int, kept: bool) -> Trial:
    return Trial(users, {"goodput": {"attainment": 1.0 if kept else 0.5}}, 0.0)


@pytest.mark.parametrize("limit", [1, 3, 4, 7, 50, 99, 100])
def test_the_search_comes_within_an_eighth_below_the_limit(limit: int) -> None:
    found = find_capacity(lambda users: trial(users, users <= limit))
    assert limit - max(1, limit // 8) <= found.users <= limit
    tried = [t.users for t in found.trials]
    assert len(set(tried)) == len(tried) <= 10


def test_a_machine_that_serves_nobody_holds_nobody() -> None:
    found = find_capacity(lambda users: trial(users, False))
    assert found.users == 0
    assert found.best is None


def test_the_search_stops_at_the_most_it_may_try() -> None:
    found = find_capacity(lambda users: trial(users, True), most=20)
    assert found.users == 16


@pytest.mark.parametrize(
    ("kept", "tries"), [([True, True], 2), ([True, False, True], 3), ([False, True, False], 3)]
)
def test_a_number_of_users_is_judged_by_most_of_its_trials(kept: list[bool], tries: int) -> None:
    tried = []

    def attempt(draw: int) -> Trial:
        tried.append(draw)
        return trial(8, kept[draw])

    assert by_majority(attempt).kept is (kept.count(True) >= 2)
    assert tried == list(range(tries))


def asks(count: int) -> list[Ask]:
    return [Ask(f"r{i}", (5, 6, i), 4, 4) for i in range(count)]


def test_a_trial_judges_all_but_each_users_first(tiny: LabModel) -> None:
    server = ContinuousServer(tiny, memory_tokens=512, max_model_len=128, slots=2)
    tight = try_users(server, asks(12), 4, {"ttft": 4.0}, by_steps=True)
    # Two slots and four users: who asks again waits for somebody's four steps.
    assert tight.figures["goodput"]["judged"] == 8
    assert tight.attainment < 1.0
    again = ContinuousServer(tiny, memory_tokens=512, max_model_len=128, slots=2)
    assert try_users(again, asks(12), 2, {"ttft": 1.5}, by_steps=True).kept


def test_by_the_processors_clock_waiting_takes_no_time(tiny: LabModel) -> None:
    server = ContinuousServer(tiny, memory_tokens=512, max_model_len=128, slots=2)
    late = [Ask("late", (5, 6), 3, 3, arrival=3600.0)]
    run = drive(server, OpenLoad(late), by_steps=False, seconds="processor")
    assert run.seconds > 3600.0
    answer = run.answers["late"]
    assert answer.arrival_second == pytest.approx(3600.0)
    assert 3600.0 < answer.seconds[0] < 3660.0


def test_figures_by_steps_count_a_step_as_a_millisecond(tiny: LabModel) -> None:
    server = StaticServer(tiny, memory_tokens=512, max_model_len=128, batch_size=2)
    figures = drive(server, asks(4)).figures(by_steps=True)
    assert figures["ttft_ms"]["max"] == pytest.approx(5.0), "the second batch begins at step 5"
    assert figures["itl_ms"]["max"] == pytest.approx(1.0)
    assert figures["output_throughput"] == pytest.approx(16 / 0.008)
