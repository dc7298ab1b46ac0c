"""When a simulated figure counts as right."""

from __future__ import annotations

import pytest

from turnstile.simulate.verdict import Verdict, pace_of, verdicts


def verdict(real: list[float], *simulated: float) -> Verdict:
    return Verdict("TTFT p50 ms", tuple(real), simulated, 0.10)


@pytest.mark.parametrize(
    ("real", "simulated", "right"),
    [
        ([100.0, 101.0, 102.0], 110.0, True),
        ([100.0, 101.0, 102.0], 112.0, False),
        ([92.0, 100.0, 108.0], 115.0, True),  # a spread of 16 %
        ([92.0, 100.0, 108.0], 117.0, False),
    ],
)
def test_the_tolerance_counts_or_the_spread_where_that_is_larger(
    real: list[float], simulated: float, right: bool
) -> None:
    assert verdict(real, simulated).right is right


def test_one_run_that_went_wrong_does_not_make_the_others_right() -> None:
    judged = verdict([100.0, 101.0, 250.0], 125.0)
    assert judged.spread > 1.0
    assert judged.allowed == pytest.approx(0.20)
    assert not judged.right
    assert verdict([100.0, 101.0, 250.0], 100.0).error == pytest.approx(-1 / 101)


def test_the_median_of_several_simulated_runs_is_judged() -> None:
    assert verdict([100.0], 100.0, 102.0, 500.0).right


def test_what_a_run_lacks_is_not_compared() -> None:
    whole = {"output_throughput": 50.0, "ttft_ms": {"p50": 10.0, "p99": 20.0}}
    labels = [v.label for v in verdicts([whole, whole], [whole])]
    assert labels == ["output tok/s", "TTFT p50 ms", "TTFT p99 ms"]
    without = {"output_throughput": 50.0, "ttft_ms": {"p50": None, "p99": 20.0}}
    assert [v.label for v in verdicts([whole, without], [whole])] == ["output tok/s", "TTFT p99 ms"]


def test_the_pace_of_a_run_is_the_mean_of_its_steps_over_the_mean_of_the_simulated_ones() -> None:
    real, simulated = {"steps": 80, "busy_s": 2.0}, {"steps": 64, "busy_s": 0.8}
    assert pace_of(real, simulated) == 2.0
