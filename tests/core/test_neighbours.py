"""One user of tenant A beside tenant B on virtual time: B's long prompts are no worse than B's
ordinary users, and without fairness they are.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from turnstile.core.admission import ExpectedAdmission
from turnstile.core.cost import Coefficients, StepCost
from turnstile.core.events import Admitted
from turnstile.core.fairness import QUEUE_POLICIES
from turnstile.core.forecast import EngineView
from turnstile.core.gate import Gate, GateConfig, Place, Work
from turnstile.core.pages import PagePool
from turnstile.core.plan import Outcome, Plan, Progress
from turnstile.core.request import Request
from turnstile.core.scheduler import Scheduler, SchedulerConfig

COST = Coefficients(0.005, 4e-4, 2e-7, 5e-5)
"""About what two cores need for a model of 135 million parameters."""
USERS = 99


@dataclass
class Room:
    """USERS users of B, and later one of A; each asks again when answered."""

    scheduler: Scheduler
    flood: bool
    gate: Gate = field(default_factory=lambda: Gate(GateConfig(slots=128, kv_tokens=2900 * 16)))
    places: dict[str, Place] = field(default_factory=dict)
    asking: list[str] = field(default_factory=list)
    now: float = 0.0
    asked: dict[str, float] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    draw: random.Random = field(default_factory=lambda: random.Random(5))

    def lengths(self, tenant: str) -> tuple[int, int]:
        if tenant == "a":
            return self.draw.randint(32, 96), 16
        if self.flood:
            return self.draw.randint(900, 1500), 16
        ordinary = self.draw.lognormvariate(0, 0.8)
        return int(min(768, 16 + 80 * ordinary)), int(min(384, 8 + 56 * ordinary))

    def ask(self, tenant: str) -> None:
        prompt, outputs = self.lengths(tenant)
        name = f"{tenant}{len(self.asked)}"
        ids = (len(self.asked), *(self.draw.randrange(9000) for _ in range(prompt - 1)))
        request = Request(id=name, prompt=ids, max_tokens=outputs, tenant=tenant, arrival=self.now)
        self.asked[name] = self.now
        work = Work(tenant=tenant, prompt_tokens=prompt, max_tokens=outputs, min_tokens=outputs)
        [self.places[name]] = self.gate.enter([work], self.now)
        self.scheduler.submit(request, now=self.now)

    def step(self) -> None:
        plan = self.scheduler.plan(self.now)
        # Who was answered asks again at once, and finds a step planned already.
        for tenant in self.asking:
            self.ask(tenant)
        self.asking.clear()
        for event in self.scheduler.take_events():
            if isinstance(event, Admitted):
                self.places[event.request_id].start(event.time)
        self.gate.learn(EngineView.of(self.scheduler))
        took = COST.predict(StepCost.of(plan)) * self.draw.uniform(0.95, 1.1)
        self.now += took
        for progress in self.scheduler.commit(plan, self.outcomes(plan), self.now, took):
            self.take(progress)

    def outcomes(self, plan: Plan) -> list[Outcome]:
        return [
            Outcome(tuple(self.draw.randrange(10_000, 20_000) for _ in range(chunk.samples)))
            for chunk in plan.chunks
        ]

    def take(self, progress: Progress) -> None:
        request = progress.sequence.request
        if progress.tokens:
            self.times[request.id].append(self.now)
            self.places[request.id].first_token(self.now)
        if progress.finish:
            self.places[request.id].leave(self.now, [progress.sequence.num_outputs])
            self.asking.append(request.tenant)

    def run(self, until: float) -> None:
        while self.now < until:
            self.step()


@cache
def run(policy: str, *, flood: bool, neighbour_steps: float | None = 2.0) -> Room:
    """The room after 28 seconds, of which A's user was there for 20."""
    config: dict[str, Any] = {"max_num_seqs": 128, "max_num_batched_tokens": 512}
    scheduler = Scheduler(
        SchedulerConfig(neighbour_steps=neighbour_steps, **config),
        PagePool(2900, 16),
        ExpectedAdmission(),
        QUEUE_POLICIES[policy](),
    )
    room = Room(scheduler, flood)
    for _ in range(USERS):
        room.ask("b")
    room.run(until=8.0)
    room.ask("a")
    room.run(until=28.0)
    return room


def felt(policy: str, *, flood: bool, neighbour_steps: float | None = 2.0) -> tuple[float, float]:
    """The 99th percentiles of TTFT and ITL of A's user, in seconds."""
    room = run(policy, flood=flood, neighbour_steps=neighbour_steps)
    ttft, gaps = [], []
    for name, asked in room.asked.items():
        if name.startswith("a"):
            times = room.times.get(name, [])
            # Who still waits has waited so long at least.
            ttft.append((times[0] if times else room.now) - asked)
            gaps += np.diff(times).tolist()
    return float(np.percentile(ttft, 99)), float(np.percentile(gaps, 99)) if gaps else np.inf


def test_a_flood_of_long_prompts_is_no_worse_than_ordinary_users() -> None:
    base_ttft, base_itl = felt("fair", flood=False)
    ttft, itl = felt("fair", flood=True)
    assert ttft < 1.5 * base_ttft
    assert itl < 1.5 * base_itl


def test_first_come_first_served_it_is_many_times_worse() -> None:
    base_ttft, _ = felt("fair", flood=False)
    ttft, _ = felt("fcfs", flood=True)
    assert ttft > 20 * base_ttft


def test_long_prompts_of_others_lengthen_the_steps_unless_they_are_bounded() -> None:
    _, bounded = felt("fair", flood=True)
    _, unbounded = felt("fair", flood=True, neighbour_steps=None)
    assert unbounded > 1.5 * bounded


def test_the_gate_foretells_whom_the_flood_holds_up_and_whom_not() -> None:
    room = run("fair", flood=True)
    for name, asked in room.asked.items():
        estimate = room.places[name].estimate
        if not name.startswith("a") or estimate is None or name not in room.times:
            continue
        assert estimate.raw_wait < 0.5
        took = room.times[name][0] - asked
        assert took / 3 < estimate.raw_ttft < took * 3
    newcomer = Work(tenant="b", prompt_tokens=1200, max_tokens=16, min_tokens=16)
    estimate = room.gate.predict(newcomer)
    assert estimate is not None
    # 99 prompts of 1,200 tokens are before it, in part computed, at about 1,800 tokens a second.
    assert 20 < estimate.raw_wait < 90
