"""What happens when, on a machine whose steps take 10 ms and 1 ms a token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simulate.machines import arrivals, setup
from turnstile.bench.workloads import WORKLOADS
from turnstile.simulate.history import COMPLETED, REFUSED
from turnstile.simulate.load import Load, LoadError, Tenant, draw, from_workload
from turnstile.simulate.run import Plant, play, simulate
from turnstile.simulate.setup import Front


def test_one_request_takes_its_prefill_and_a_step_for_every_further_token() -> None:
    history = play(Plant(setup()), arrivals((1.0, 30, 4)))
    assert history.first[0] == pytest.approx(1.0 + 0.010 + 0.030)
    assert history.ended[0] == pytest.approx(1.040 + 3 * 0.011)
    assert history.tokens[0] == 4
    assert list(history.gap_counts) == [1, 1, 1]
    assert history.busy == pytest.approx(0.040 + 3 * 0.011)


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    history = play(Plant(setup()), arrivals((0.0, 160, 1)))
    assert history.steps == 3
    assert history.first[0] == pytest.approx(3 * 0.010 + 0.160)


def test_who_arrives_during_a_step_is_in_the_next_one() -> None:
    history = play(Plant(setup()), arrivals((0.0, 10, 3), (0.001, 10, 1)))
    # The first prompt until 20 ms; then its second token beside the other's prompt.
    assert history.first[0] == pytest.approx(0.020)
    assert history.started[1] == pytest.approx(0.020)
    assert history.first[1] == pytest.approx(0.020 + 0.010 + 0.011)


def test_the_front_delays_what_comes_in_and_what_goes_out() -> None:
    front = Front(per_request=0.1, delivery=0.2)
    history = play(Plant(setup(front=front)), arrivals((0.0, 10, 1), (0.0, 10, 1)))
    assert history.first[0] == pytest.approx(0.1 + 0.020 + 0.2 + 0.1)
    # One after another through the door.
    assert history.first[1] == pytest.approx(0.2 + 0.020 + 0.2 + 0.1)


def test_the_more_rows_a_step_has_the_later_all_of_them_are_with_their_clients() -> None:
    front = Front(delivery=0.01, per_row=0.001)
    # Both are in the third step, the first one in the two before it alone.
    history = play(Plant(setup(front=front)), arrivals((0.0, 10, 3), (0.021, 10, 1)))
    alone, together = 0.010 + 0.001, 0.010 + 0.002
    assert history.first[0] == pytest.approx(0.020 + alone)
    assert history.last[0] == pytest.approx(0.020 + 0.011 + 0.021 + together)
    assert history.first[1] == history.last[0]
    assert list(history.gaps) == pytest.approx([0.011, 0.021 + 0.001])


def test_an_answer_that_begins_or_ends_keeps_the_others_of_its_step_waiting() -> None:
    front = Front(per_request=0.004)
    history = play(Plant(setup(front=front)), arrivals((0.0, 10, 2), (0.014, 10, 3)))
    # The first begins alone; then it ends in the step in which the other begins.
    assert history.first[0] == pytest.approx(0.004 + 0.020 + 0.004)
    assert history.last[0] == pytest.approx(0.024 + 0.021 + 2 * 0.004)
    assert history.first[1] == history.last[0]


def test_what_a_step_says_comes_after_what_the_step_before_said() -> None:
    # Two answers end in the second step and keep each other for 0.2 s, the third step has one row.
    load = arrivals((0.0, 10, 2), (0.0, 10, 2), (0.0, 10, 3))
    history = play(Plant(setup(front=Front(delivery=0.01, per_request=0.1))), load)
    assert history.last[2] >= history.last[0]
    assert min(history.gaps) >= 0.0


def test_a_closed_loop_asks_again_when_it_is_answered_and_has_thought() -> None:
    load = replace(arrivals(*[(0.0, 10, 2)] * 6), due=None, users=2, think=1.0)
    history = play(Plant(setup(max_num_seqs=8)), load)
    assert list(history.due[:2]) == [0.0, 0.5]
    for user_before, user_after in ((0, 2), (1, 3), (2, 4), (3, 5)):
        assert history.due[user_after] == history.ended[user_before] + 1.0


def test_what_can_never_run_is_refused_and_the_rest_goes_on() -> None:
    load = arrivals((0.0, 5000, 1), (0.0, 10, 1), (0.0, 300, 1))
    history = play(Plant(setup(pages=10)), load)
    assert list(history.status) == [REFUSED, COMPLETED, REFUSED]


def test_an_answer_may_end_before_its_limit() -> None:
    load = replace(arrivals((0.0, 10, 5)), max_tokens=100)
    history = play(Plant(setup()), load)
    assert history.tokens[0] == 5
    # The limit is what guaranteed admission must reckon with: a pool for one at a time.
    both = replace(arrivals((0.0, 10, 5), (0.0, 10, 5)), max_tokens=100)
    plant = Plant(setup(pages=10, admission="guaranteed"))
    assert play(plant, both).started[1] == play(plant, both).ended[0]


def test_equal_prefixes_come_from_the_cache_and_other_tokens_do_not() -> None:
    shared = (((0, 64),), ((0, 64),), ((1, 64),))
    load = replace(arrivals((0.0, 80, 1), (1.0, 80, 1), (2.0, 80, 1)), shared=shared)
    assert list(play(Plant(setup()), load).cached) == [0, 64, 0]


def test_tenants_share_a_machine_that_one_of_them_floods() -> None:
    flood = [(0.0, 32, 32)] * 40
    load = replace(
        arrivals(*flood, (0.5, 32, 32)),
        tenants=(Tenant("flood"), Tenant("quiet")),
        tenant_of=np.asarray([0] * 40 + [1]),
    )
    fair = play(Plant(setup(policy="fair")), load)
    unfair = play(Plant(setup(policy="fcfs")), load)
    assert fair.first[40] - 0.5 < (unfair.first[40] - 0.5) / 5


def test_who_has_seen_short_answers_lets_more_in_and_must_preempt_more() -> None:
    load = arrivals(*[(0.0, 16, 120)] * 8)
    preemptions = {
        length: play(
            Plant(setup(pages=30, past_outputs={"default": [length] * 40})), load
        ).preemptions
        for length in (2, 128)
    }
    assert preemptions[2] > preemptions[128] == 0


def test_the_same_seed_gives_the_same_figures_and_another_does_not() -> None:
    def run(seed: int) -> object:
        load = from_workload(replace(WORKLOADS["W5"], requests=50), seed)
        return simulate(Plant(setup(max_num_seqs=32)), load)

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_lengths_are_those_that_bench_draws() -> None:
    load = from_workload(WORKLOADS["W1"], 101)
    assert (int(load.prompts.sum()), int(load.outputs.sum())) == (50_735, 33_376)
    assert load.users == 100
    shared = from_workload(WORKLOADS["W3"], 101)
    assert shared.tokens(0)[:512] == shared.tokens(1)[:512]
    assert shared.tokens(0)[512] != shared.tokens(1)[512]
    assert len(shared.tokens(0)) == shared.prompts[0]


@pytest.mark.parametrize(
    "wrong", [{"due": None}, {"users": 2}, {"outputs": np.asarray([0])}, {"prompts": np.empty(0)}]
)
def test_an_impossible_load_is_refused(wrong: dict[str, object]) -> None:
    load = arrivals((0.0, 1, 1))
    with pytest.raises(LoadError):
        replace(load, **wrong)  # type: ignore[arg-type]


def test_drawn_requests_fit_the_context() -> None:
    from turnstile.bench.lengths import Fixed

    load = draw("cut", 3, Fixed(900), Fixed(300), 1, prefixes=2, prefix_tokens=100, max_len=1000)
    assert list(load.prompts + load.outputs) == [1000] * 3
    assert isinstance(load, Load)
