"""The event stream tells the whole story of a sequence, in order, and travels unchanged."""

from __future__ import annotations

import json
from itertools import pairwise

from core.driver import Driver, make_scheduler
from turnstile.core import events
from turnstile.core.request import Request


def test_an_event_travels_and_comes_back_the_same() -> None:
    for event in (
        events.Queued(1.0, "a", 0, "t", 9),
        events.Waiting(1.0, "a", 0, events.WaitReason.PAGES),
        events.Decoding(2.0, "a", 1, 8),
        events.Stepped(1.5, 3, 8, 4, 2, 2, 0.01),
        events.Repaired(1.5, 2, 9),
    ):
        assert events.decode(*events.encode(event)) == event


def test_what_came_over_a_wire_is_an_event_again() -> None:
    event = events.Waiting(1.0, "a", 0, events.WaitReason.PAGES)
    kind, values = json.loads(json.dumps(events.encode(event)))
    back = events.decode(kind, values)
    assert isinstance(back, events.Waiting)
    assert back.reason is events.WaitReason.PAGES
    assert events.decode(kind, [1.0, "a", 0, "a reason of another version"]) is None


def test_an_event_of_another_version_is_nothing() -> None:
    assert events.decode("Unheard", [1.0, "a", 0]) is None
    assert events.decode("Admitted", [1.0, "a", 0]) is None


def test_decoding_is_said_once_after_each_start() -> None:
    driver = Driver(make_scheduler(pages=11, admission="optimistic"))
    for k in range(4):
        driver.submit(Request(id=f"r{k}", prompt=tuple(range(8)), max_tokens=12))
    driver.run()
    assert driver.scheduler.statistics.preemptions > 0
    for k in range(4):
        mine = [
            type(event)
            for event in driver.events
            if isinstance(event, events.Admitted | events.Decoding | events.Preempted)
            and event.request_id == f"r{k}"
        ]
        # Each start is followed by a decoding, unless it was preempted before it came so far.
        for one, two in pairwise(mine):
            if two is events.Decoding:
                assert one is events.Admitted
            if one is events.Decoding:
                assert two is events.Preempted
        assert mine[0] is events.Admitted
        assert mine[-1] is events.Decoding


def test_the_first_decoding_comes_when_the_prompt_is_computed() -> None:
    driver = Driver(make_scheduler(pages=40, max_num_batched_tokens=8))
    driver.submit(Request(id="a", prompt=tuple(range(30)), max_tokens=3))
    driver.run()
    found = [event for event in driver.events if isinstance(event, events.Decoding)]
    assert [event.computed for event in found] == [30]
    before = [event for event in driver.events if isinstance(event, events.Stepped)]
    assert sum(event.draws for event in before if event.time < found[0].time) == 0
