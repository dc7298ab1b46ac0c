"""What the loop says of its own cost, on a clock that only moves when it is read."""

from __future__ import annotations

from itertools import count

from turnstile.core.admission import ExpectedAdmission
from turnstile.core.cost import CostModel
from turnstile.core.fairness import FairQueue
from turnstile.core.pages import PagePool
from turnstile.core.scheduler import Scheduler, SchedulerConfig
from turnstile.engine.fake import FakeExecutor
from turnstile.engine.loop import StepLoop
from turnstile.engine.params import SamplingParams
from turnstile.engine.protocol import StepResult, Submit


def test_a_turn_costs_what_its_pass_costs_and_what_is_around_it() -> None:
    ticks = count()
    said: list[StepResult] = []
    loop = StepLoop(
        Scheduler(SchedulerConfig(), PagePool(64, 16), ExpectedAdmission(), FairQueue()),
        FakeExecutor(),
        epoch=1,
        emit=said.append,
        clock=lambda: float(next(ticks)),
    )
    loop.apply(Submit("a", [1, 2, 3], SamplingParams(max_tokens=60), max_tokens=60, seed=0))
    while loop.has_work:
        loop.step()
    last = said[-1].snapshot
    assert last.cost.samples == last.turn.samples == CostModel.WARM * 3
    assert last.cost.largest_batch == last.turn.largest_batch == 1
    # One reading to the next is the pass; a turn is all the readings from commit to commit.
    assert round(last.cost.alpha + last.cost.beta + last.cost.delta, 1) == 1.0
    readings = (said[-2].snapshot.time - said[-12].snapshot.time) / 10
    assert readings > 2.0
    assert round(last.turn.alpha + last.turn.beta + last.turn.delta, 1) == readings
