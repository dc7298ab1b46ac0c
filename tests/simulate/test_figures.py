"""The figures against those that bench computes from the same samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulate.machines import arrivals, setup
from turnstile.bench.metrics import distribution
from turnstile.simulate.figures import Limits, weighted_distribution
from turnstile.simulate.run import Plant, simulate


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 5)), min_size=1, max_size=40))
def test_weighted_percentiles_are_those_of_the_repeated_values(
    pairs: list[tuple[int, int]],
) -> None:
    values = np.asarray([v for v, _ in pairs], dtype=np.float64)
    counts = np.asarray([c for _, c in pairs], dtype=np.int64)
    expected = distribution(np.repeat(values, counts) / 1000.0)
    found = weighted_distribution(values, counts)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-9)


def test_refused_requests_miss_every_limit() -> None:
    load = arrivals((0.0, 5000, 1), (0.0, 10, 2), (0.0, 10, 200))
    limits = Limits({"ttft": 1000.0, "e2el": 1000.0}, share=0.3)
    good = simulate(Plant(setup()), load, limits)["goodput"]
    assert (good["good"], good["kept"]) == (1, True)
    assert good["attainment"] == pytest.approx(1 / 3)


def test_throughput_counts_what_came_out_until_the_last_answer() -> None:
    figures = simulate(Plant(setup()), arrivals((1.0, 10, 3)))
    assert figures["duration_s"] == pytest.approx(0.020 + 2 * 0.011)
    assert figures["output_throughput"] == pytest.approx(3 / figures["duration_s"])
    assert figures["machine"]["busy_ratio"] == pytest.approx(1.0)


@pytest.mark.parametrize("wrong", [{"itl": 5.0}, {"ttft": 0.0}, {"ttft": float("nan")}])
def test_a_limit_that_means_nothing_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="limit"):
        Limits(wrong)
