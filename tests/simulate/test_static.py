"""Static batches on virtual time: steps take 10 ms and 1 ms a token."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulate.machines import arrivals, setup
from turnstile.bench.lengths import Uniform
from turnstile.simulate.history import COMPLETED, REFUSED
from turnstile.simulate.load import draw
from turnstile.simulate.run import Plant, play, simulate


def static(members: int) -> Plant:
    """Memory for so many contexts of 4096 tokens."""
    return Plant(setup(pages=256 * members, max_num_seqs=64), static=True)


def test_a_batch_is_padded_and_ends_with_its_longest_answer() -> None:
    history = play(static(2), arrivals((0.0, 10, 2), (0.0, 30, 5), (0.0, 10, 1)))
    # 50 ms for others to come; two prompts of 30 tokens, as padded; then a token for each, also
    # for the one that has ended.
    assert list(history.first[:2]) == [pytest.approx(0.120)] * 2  # type: ignore[list-item]
    assert history.ended[0] == pytest.approx(0.120 + 0.012)
    assert history.ended[1] == pytest.approx(0.120 + 4 * 0.012)
    # The third waits for all of that, and then for others that do not come.
    assert history.started[2] == pytest.approx(history.ended[1] + 0.050)
    assert history.first[2] == pytest.approx(history.started[2] + 0.020)
    assert list(history.status) == [COMPLETED] * 3


def test_a_full_batch_does_not_wait() -> None:
    history = play(static(2), arrivals(*[(0.0, 10, 1)] * 4))
    assert history.started[2] == history.started[3] == history.ended[1]


def test_the_memory_bounds_the_batch() -> None:
    history = play(static(3), arrivals(*[(0.0, 10, 1)] * 7))
    assert history.peak_rows == 3
    assert history.peak_pages == 3 * 256


def test_what_is_longer_than_a_reservation_is_refused() -> None:
    assert list(play(static(1), arrivals((0.0, 4000, 200))).status) == [REFUSED]


def test_continuous_batching_over_pages_gets_more_through_the_same_memory() -> None:
    load = draw("chat", 120, Uniform(10, 60), Uniform(2, 60), 1).with_users(40)
    before = static(4)
    machine = replace(before.setup, scheduler=replace(before.setup.scheduler, min_chunk=16))
    after = Plant(machine)
    slow, fast = simulate(before, load), simulate(after, load)
    assert slow["output_tokens"] == fast["output_tokens"]
    assert fast["output_throughput"] > 1.5 * slow["output_throughput"]
    assert fast["ttft_ms"]["p50"] < slow["ttft_ms"]["p50"] / 3
