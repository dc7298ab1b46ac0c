"""A machine learned from the figures of a measurement."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from turnstile.bench.lengths import Fixed, Lognormal, Uniform, trace_lengths
from turnstile.bench.workloads import WORKLOADS, Workload
from turnstile.core.cost import Coefficients
from turnstile.simulate.bench_file import fit_result, load_of, read_result
from turnstile.simulate.calibrate import Calibration, CalibrationError, calibrated
from turnstile.simulate.fit import descend
from turnstile.simulate.load import from_workload
from turnstile.simulate.run import Plant, simulate

ENGINE = {"num_pages": 2000, "page_size": 16, "max_num_seqs": 64, "max_num_batched_tokens": 256}
TRUE = Calibration(
    source="the truth", coefficients=Coefficients(4e-3, 2e-4, 0.0, 1.5e-4), engine=ENGINE
)


def measured(workload: Workload, known: Calibration = TRUE) -> dict[str, Any]:
    """What bench would have written of a machine that is as ``known`` says."""
    load = from_workload(workload, 101)
    return {
        "format": "turnstile-bench-1",
        "workload": json.loads(json.dumps(asdict(workload))),
        "length_seed": 101,
        "median": simulate(Plant(calibrated(known)), load),
    }


def test_a_search_finds_the_bottom_of_a_valley() -> None:
    def loss(p: dict[str, float]) -> float:
        return abs(p["a"] - 40.0) / 40.0 + abs(p["b"] - 0.3)

    best, least = descend(loss, {"a": 3.0, "b": 1.0}, factor=2.0, rounds=8)
    assert best["a"] == pytest.approx(40.0, rel=0.02)
    assert best["b"] == pytest.approx(0.3, rel=0.02)
    assert least == loss(best)


def test_the_machine_that_measured_so_is_found() -> None:
    workload = replace(WORKLOADS["W1"], requests=30, users=8)
    found, off = fit_result(measured(workload), ENGINE, "test", rounds=5)
    assert off < 0.03
    # What matters is what it says of another load.
    other = from_workload(replace(workload, users=16), 7)
    ours, truth = (simulate(Plant(calibrated(k)), other) for k in (found, TRUE))
    assert ours["output_throughput"] == pytest.approx(truth["output_throughput"], rel=0.08)
    assert ours["itl_ms"]["p50"] == pytest.approx(truth["itl_ms"]["p50"], rel=0.12)


@pytest.mark.parametrize(
    "lengths",
    [Fixed(9), Uniform(3, 30), Lognormal(20, 0.5, 2, 60), trace_lengths("lmsys_turn1")[1]],
)
def test_the_requests_are_those_that_were_sent(lengths: Any) -> None:
    workload = Workload("W", "", 5, lengths, Fixed(2), prefix=3, prefix_groups=2, rate=4.0)
    load, sent = load_of(measured(workload)), from_workload(workload, 101)
    assert load.prompts.tolist() == sent.prompts.tolist()
    assert load.due is not None
    assert sent.due is not None
    assert load.due.tolist() == sent.due.tolist()
    assert load.shared == sent.shared


def test_files_and_loads_that_tell_too_little_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"format": "other"}')
    with pytest.raises(CalibrationError, match="no result"):
        read_result(path)
    result = measured(Workload("W", "", 2, Fixed(2), Fixed(2), users=1))
    result["workload"]["turns"] = {"tokens": 3}
    with pytest.raises(CalibrationError, match="single questions"):
        load_of(result)
    del result["workload"]["turns"]
    result["median"]["completed"] = 0
    with pytest.raises(CalibrationError, match="no request"):
        fit_result(result, ENGINE, "test")
