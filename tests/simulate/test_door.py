"""The gate before the simulated machine."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from simulate.machines import arrivals, setup
from turnstile.simulate.history import COMPLETED, REFUSED
from turnstile.simulate.load import Load
from turnstile.simulate.run import Plant, play


def test_of_a_burst_exactly_slots_and_queue_are_served() -> None:
    plant = Plant(setup(max_num_seqs=2, max_num_queued_reqs=8))
    history = play(plant, arrivals(*[(0.0, 10, 5)] * 50))
    assert Counter(history.status) == {COMPLETED: 10, REFUSED: 40}


def test_without_bounds_everybody_is_served() -> None:
    history = play(Plant(setup(max_num_seqs=2)), arrivals(*[(0.0, 10, 5)] * 50))
    assert Counter(history.status) == {COMPLETED: 50}


@pytest.mark.parametrize("fast", [True, False])
def test_a_bound_on_the_predicted_wait_keeps_real_waits_near_it(fast: bool) -> None:
    rng = np.random.default_rng(3)
    count = 400
    load = Load(
        "overload",
        prompts=rng.integers(10, 40, count),
        outputs=rng.integers(20, 60, count),
        due=np.cumsum(rng.exponential(0.02, count)),
    )
    open_door = play(Plant(setup()), load, fast=fast)
    bounded = play(Plant(setup(max_queue_wait=1.0)), load, fast=fast)
    waits = np.asarray(bounded.started) - np.asarray(bounded.due)
    assert np.nanmax(np.asarray(open_door.started) - np.asarray(open_door.due)) > 5.0
    assert np.nanpercentile(waits, 99) < 1.5
    served = Counter(bounded.status)
    assert served[COMPLETED] > 75  # what eight slots serve meanwhile
    assert served[REFUSED] > 50
