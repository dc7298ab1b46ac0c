"""The check against real runs: what is simulated for them, and what the table says."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from turnstile.core.cost import Coefficients
from turnstile.simulate.calibrate import Calibration
from turnstile.simulate.cases import KEYS, cases
from turnstile.simulate.check import (
    CheckError,
    Measured,
    Round,
    at_pace,
    common_timings,
    right,
    simulate_all,
    simulate_run,
    table,
)
from turnstile.simulate.figures import Figures
from turnstile.simulate.setup import Front
from turnstile.simulate.timing import LinearTiming, StepWork
from turnstile.simulate.verdict import mean_step

SIZE = 30
KNOWN = Calibration(
    source="a test",
    coefficients=Coefficients(3e-3, 1e-4, 1e-7, 4e-5, 5e-7),
    front=Front(1e-4, 5e-4, 2e-5),
    engine={"num_pages": 2000, "page_size": 16},
)


@cache
def measured() -> Measured:
    """Two rounds on a machine that is twice as slow in the second one."""
    rounds = []
    for pace in (1.0, 2.0):
        known, rate = KNOWN.scaled(pace), 20.0 / pace
        planned = {case.name: case for case in cases(SIZE, rate)}
        before = {"W1": [], "tiny pool": [], "flood": [], "Poisson": ["W1"]}
        runs = {
            name: simulate_run(planned[name], known, [planned[b] for b in earlier])
            | {"turns_s": [0.01] * 5000, "middle_s": 10.0 * number}
            for number, (name, earlier) in enumerate(before.items())
        }
        again = runs["W1"] | {"middle_s": 40.0}
        rounds.append(Round(known, rate, runs, before, again))
    return Measured("2026-11-30 12:00", 2, SIZE, rounds)


def test_each_round_is_simulated_at_the_pace_of_its_own_w1() -> None:
    told: list[str] = []
    outcomes = simulate_all(measured(), told.append)
    assert told == ["simulating round 1 of 2", "simulating round 2 of 2"]
    assert [o.case.name for o in outcomes] == ["W1", "Poisson", "flood", "tiny pool"]
    for outcome in outcomes:
        assert [v.error for v in outcome.verdicts] == pytest.approx([0.0] * 9, abs=1e-6)
        # Told that each step takes 10 ms, it is another machine, and the same in both rounds.
        means = [told["busy_s"] / told["steps"] for told in outcome.told]
        assert means == pytest.approx([0.01, 0.01])
    assert right(outcomes)


def test_the_level_of_what_steps_cost_is_that_of_w1_whatever_pace_the_stairs_had() -> None:
    first, *_ = cases(SIZE, 20.0)
    real = simulate_run(first, KNOWN, [])
    found = at_pace(KNOWN.scaled(1.3), first, real)
    assert found.coefficients.alpha == pytest.approx(KNOWN.coefficients.alpha)
    assert found.coefficients.gamma == pytest.approx(KNOWN.coefficients.gamma)


def test_what_small_steps_cost_beside_large_ones_is_learned_from_all_rounds() -> None:
    whole = measured()
    first, second = whole.rounds
    off = replace(first.known, coefficients=replace(KNOWN.coefficients, alpha=5e-3))
    ours, theirs = common_timings([replace(first, known=off), second])
    step = StepWork(decodes=1, decode_context=1)
    true, wrong = (LinearTiming(k.coefficients).seconds(step, 0) for k in (KNOWN, off))
    assert ours.seconds(step, 0) == pytest.approx((true + wrong) / 2.0)
    assert theirs.seconds(step, 0) == pytest.approx(true + wrong)


def test_between_the_two_w1_of_a_round_the_pace_moves_evenly() -> None:
    each, _ = measured().rounds
    later = each.again | {"busy_s": 1.2 * each.again["busy_s"]}
    moving = replace(each, again=later)
    assert [moving.pace(name) for name in moving.runs] == pytest.approx([1.0, 1.05, 1.1, 1.15])
    moved, steady = (
        {o.case.name: o.simulated[0] for o in simulate_all(replace(measured(), rounds=[r]), print)}
        for r in (moving, each)
    )
    assert mean_step(moved["W1"]) == mean_step(steady["W1"])
    slower = mean_step(moved["tiny pool"]) / mean_step(steady["tiny pool"])
    assert slower == pytest.approx(1.05, rel=0.01)


def test_what_was_measured_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "raw.json"
    measured().write(path, simulated={})
    assert Measured.read(path) == measured()
    path.write_text("{}")
    with pytest.raises(CheckError, match="format"):
        Measured.read(path)


def test_the_table_shows_every_figure_and_counts_those_that_are_right() -> None:
    whole = measured()
    slower = [
        replace(each, runs={name: _slower(run) for name, run in each.runs.items()})
        for each in whole.rounds
    ]
    outcomes = simulate_all(replace(whole, rounds=slower), lambda text: None)
    text = table(outcomes, whole)
    assert not right(outcomes)
    assert text.count("**off**") == 4  # the throughput of each
    assert "| | preemptions |" in text
    assert "steps against those of the first: 1." in text
    assert "32 of 36 figures within what is allowed" in text


def _slower(figures: Figures) -> Figures:
    return figures | {"output_throughput": figures["output_throughput"] / 3.0}


def test_the_loads_are_those_that_are_sent() -> None:
    by_name = {case.name: case for case in cases(SIZE, 5.0)}
    assert next(iter(by_name)) == "W1"
    assert {len(case.load()) for case in by_name.values()} == {SIZE}
    flood = by_name["flood"].load()
    assert [tenant.name for tenant in flood.tenants] == list(KEYS)
    assert sum(flood.due == 0.0) == 24
    assert {flood.tenant(i).name for i in range(len(flood)) if flood.due[i] == 0.0} == {KEYS[0]}
    assert flood.due[24] > 2.0
    sent = [time for stream in by_name["flood"].streams for time in stream.arrivals().times]
    assert sent == pytest.approx(flood.due.tolist())
    assert by_name["tiny pool"].num_pages == 256
    given = by_name["Poisson"].answers_before([by_name["W1"]])["default"]
    alone = by_name["Poisson"].answers_before([])["default"]
    assert len(given) == len(alone) + SIZE
    assert given[-SIZE:] == by_name["W1"].load().outputs.tolist()
