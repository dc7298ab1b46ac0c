"""The seams that the lab plugs other servers' policies into."""

from __future__ import annotations

import pytest

from core.driver import Driver, make_scheduler
from turnstile.core.admission import ExpectedAdmission
from turnstile.core.request import FinishReason, Request


def test_prompts_can_be_computed_in_passes_of_their_own() -> None:
    scheduler = make_scheduler(separate_prefill=True, max_num_batched_tokens=8)
    driver = Driver(scheduler)
    driver.submit(Request(id="first", prompt=(1, 2, 3), max_tokens=12))
    driver.step()
    driver.submit(Request(id="second", prompt=tuple(range(20)), max_tokens=3))
    kinds = []
    while scheduler.has_work:
        plan = scheduler.plan(driver.now)
        kinds.append({"decode" if chunk.sequence.decoding else "prompt" for chunk in plan.chunks})
        driver._take(scheduler.commit(plan, driver.model.run(plan), driver.now))
    assert kinds[:3] == [{"prompt"}] * 3, "20 tokens at 8 a step"
    assert set(map(len, kinds)) == {1}, "no step mixes the two"


def test_the_victim_is_whomever_the_policy_names() -> None:
    scheduler = make_scheduler(pages=8, admission="optimistic", max_num_batched_tokens=32)
    scheduler.choose_victim = lambda running, queue, pin_after: running[-1]
    driver = Driver(scheduler)
    for name in ("old", "middle", "new"):
        driver.submit(Request(id=name, prompt=(1, 2, 3, 4), max_tokens=20, salt=name.encode()))
    while scheduler.has_work:
        driver.step()
    gone = [event.request_id for event in driver.events if type(event).__name__ == "Preempted"]
    assert gone[0] == "new"
    assert "old" not in gone
    assert all(len(outputs) == 20 for outputs in driver.outputs.values())


@pytest.mark.parametrize(("reason", "learnt"), [(FinishReason.STOP, [3]), (FinishReason.ABORT, [])])
def test_answers_that_end_at_a_stop_string_teach_their_length(
    reason: FinishReason, learnt: list[int]
) -> None:
    lengths: list[int] = []

    class Remembering(ExpectedAdmission):
        def learn(self, tenant: str, outputs: int) -> None:
            lengths.append(outputs)

    scheduler = make_scheduler(admission=Remembering())
    driver = Driver(scheduler)
    driver.submit(Request(id="r", prompt=(1, 2, 3), max_tokens=50))
    for _ in range(3):
        driver.step()
    scheduler.cancel("r", now=3.0, reason=reason)
    assert lengths == learnt
