"""What is around the engine, told by when steps ended and when their tokens came."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from turnstile.server.watch.trace import BEGAN
from turnstile.simulate.delivery import DeliveryError, fit_front
from turnstile.simulate.setup import Front
from turnstile.simulate.traced import LABEL, Steps, TraceError, read_steps

FRONT = Front(per_request=3e-4, delivery=5e-4, per_row=3e-5)


def crowd(front: Front, late: float = 0.0) -> tuple[Steps, list[list[float]]]:
    """120 answers in a crowd that grows and shrinks, delivered so; and of every tenth step all
    tokens later still.
    """
    rng = np.random.default_rng(7)
    firsts = np.sort(rng.integers(0, 300, 120))
    lengths = rng.integers(1, 90, 120)
    count = int((firsts + lengths).max())
    draws, turning = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    for first, length in zip(firsts, lengths, strict=True):
        draws[first : first + length] += 1
        turning[list({first, first + length - 1})] += 1
    ends = 1000.0 + np.cumsum(0.004 + 2e-4 * draws * rng.uniform(0.8, 1.5, count))
    told = ends + [front.delay(int(r), int(t)) for r, t in zip(draws, turning, strict=True)]
    told[::10] += late
    answers = [
        told[first : first + length].tolist() for first, length in zip(firsts, lengths, strict=True)
    ]
    return Steps(ends, np.full(count, 0.004), draws), answers


@pytest.mark.parametrize("late", [0.0, 0.05])
def test_the_front_is_found_from_the_delays_also_where_some_are_far_longer(late: float) -> None:
    steps, answers = crowd(FRONT, late)
    found = fit_front(steps, answers)
    assert found.delivery == pytest.approx(FRONT.delivery, rel=0.1)
    assert found.per_row == pytest.approx(FRONT.per_row, rel=0.1)
    assert found.per_request == pytest.approx(FRONT.per_request, rel=0.1)


def test_answers_of_other_steps_teach_nothing() -> None:
    steps, answers = crowd(FRONT)
    elsewhere = [[time - 500.0 for time in answer] for answer in answers]
    with pytest.raises(DeliveryError, match="0 of 120"):
        fit_front(steps, elsewhere)


def test_steps_are_read_from_a_trace_on_the_clock_it_names(tmp_path: Path) -> None:
    assert LABEL == BEGAN
    path = tmp_path / "trace.json"
    label = {"ph": "M", "pid": 1, "name": "process_labels", "args": {"labels": f"{BEGAN}50.250000"}}
    # The second begins when the first is over and planned, the third when somebody comes again.
    told = [(16_000, 4_000, 2), (10_000, 5_000, 1), (90_000, 3_000, 1)]
    steps = [
        {"ph": "X", "name": "decode", "ts": ts, "dur": dur, "args": {"draws": draws}}
        for ts, dur, draws in told
    ]
    other = {"ph": "C", "name": "pages", "ts": 3, "args": {"held": 1}}
    path.write_text(json.dumps([label, other, *steps]))
    read = read_steps(path)
    assert read.ends.tolist() == pytest.approx([50.265, 50.270, 50.343])
    assert read.draws.tolist() == [1, 2, 1]
    assert read.turns.tolist() == pytest.approx([0.005, 0.005, 0.003])
    assert read.between(50.266, 50.3).draws.tolist() == [2]
    path.write_text(json.dumps(steps))
    with pytest.raises(TraceError, match="began"):
        read_steps(path)
    path.write_text("{")
    with pytest.raises(TraceError, match="no trace"):
        read_steps(path)
