"""Several samples of one request: until they fork one stands for all, and ends them all."""

from __future__ import annotations

import pytest

from core.driver import Driver, make_scheduler, solo
from turnstile.core.request import DuplicateRequestError, FinishReason, Request

LONG = Request(id="r", prompt=tuple(range(30)), max_tokens=5, n=3)


def ends(driver: Driver) -> list[FinishReason]:
    driver.run()
    return [driver.finished["r", index] for index in range(3)]


@pytest.mark.parametrize("started", [0, 1])
def test_to_cancel_a_group_before_it_forks_ends_every_sample_of_it(started: int) -> None:
    driver = Driver(make_scheduler())
    driver.submit(LONG)
    for _ in range(started):
        driver.step()
    driver.cancel("r")
    assert ends(driver) == [FinishReason.ABORT] * 3


def test_a_deadline_before_the_fork_ends_every_sample() -> None:
    driver = Driver(make_scheduler(max_num_batched_tokens=8))
    driver.submit(Request(id="r", prompt=(1,) * 30, max_tokens=5, n=3, deadline=2.0))
    assert ends(driver) == [FinishReason.TIMEOUT] * 3


def test_a_row_that_fails_before_the_fork_fails_every_sample() -> None:
    driver = Driver(make_scheduler())
    driver.break_row = lambda chunk: True
    driver.submit(LONG)
    assert ends(driver) == [FinishReason.ERROR] * 3
    assert [driver.errors["r", index] for index in range(3)] == ["broken"] * 3
    assert driver.scheduler.statistics.failed_rows == 1


def test_scoring_a_prompt_three_times_without_outputs_ends_three_times() -> None:
    driver = Driver(make_scheduler())
    driver.submit(Request(id="r", prompt=(1,) * 30, max_tokens=0, n=3, score_prompt=True))
    assert ends(driver) == [FinishReason.LENGTH] * 3
    assert sum(plan.num_tokens for plan in driver.plans) == 30


def test_a_sample_that_forked_ends_alone() -> None:
    driver = Driver(make_scheduler())
    driver.submit(LONG)
    while len(driver.scheduler.sequences("r")) < 3:
        driver.step()
    driver.cancel("r", 0)
    driver.run()
    assert driver.finished["r", 0] is FinishReason.ABORT
    assert [driver.outputs["r", k] for k in (1, 2)] == [solo(LONG, k) for k in (1, 2)]


def test_no_two_samples_with_one_id_and_index_are_alive() -> None:
    driver = Driver(make_scheduler())
    single = Request(id="r", prompt=(1, 2), max_tokens=5)
    driver.submit(single, outputs=solo(single)[:1], sample_index=2)
    driver.submit(single, outputs=solo(single)[:1], sample_index=1)
    for index in (1, 2):
        with pytest.raises(DuplicateRequestError, match=f"Sample {index}"):
            driver.scheduler.submit(single, sample_index=index, now=0.0)
    with pytest.raises(DuplicateRequestError):
        driver.scheduler.submit(LONG, now=0.0)
    assert len(driver.scheduler.sequences("r")) == 2
    driver.scheduler.submit(single, now=0.0)
    with pytest.raises(DuplicateRequestError, match="Sample 0"):
        driver.scheduler.submit(single, now=0.0)
