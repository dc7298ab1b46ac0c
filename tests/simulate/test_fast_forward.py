"""Fast-forwarding changes nothing but the time it takes: everything is compared with ``==``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budget import examples
from simulate.machines import ScatteredTiming, arrivals, setup
from turnstile.bench.lengths import Uniform
from turnstile.core.cost import Coefficients
from turnstile.core.events import Preempted
from turnstile.core.plan import Plan
from turnstile.simulate.clock import Clock
from turnstile.simulate.fast_forward import FastForward
from turnstile.simulate.figures import Figures
from turnstile.simulate.history import History
from turnstile.simulate.load import Load, Tenant, draw
from turnstile.simulate.machine import TurnstileMachine
from turnstile.simulate.routing import ROUTERS
from turnstile.simulate.run import Plant, play, simulate
from turnstile.simulate.setup import Front, Setup
from turnstile.simulate.timing import LinearTiming


def everything(history: History) -> dict[str, Any]:
    """All that was written down, as bits."""
    told = {name: getattr(history, name) for name in vars(history)}
    return {k: v.tobytes() if hasattr(v, "tobytes") else v for k, v in told.items()}


@st.composite
def loads(draw: st.DrawFn) -> Load:
    count = draw(st.integers(1, 30))
    lengths = st.tuples(
        st.floats(0.0, 0.5), st.integers(1, 70), st.integers(1, 60), st.integers(0, 2),
        st.integers(0, 2),
    )  # fmt: skip
    rows = draw(st.lists(lengths, min_size=count, max_size=count))
    due = np.cumsum([row[0] for row in rows])
    tenants = (Tenant("a"), Tenant("b", 2.0), Tenant("c", 0.25))
    load = Load(
        "random",
        np.asarray([row[1] for row in rows]),
        np.asarray([row[2] for row in rows]),
        due=due,
        tenants=tenants[: draw(st.integers(1, 3))],
        max_tokens=draw(st.sampled_from([None, 60])),
        shared=tuple(((row[4], 24),) for row in rows) if draw(st.booleans()) else None,
    )
    load = replace(load, tenant_of=np.asarray([row[3] % len(load.tenants) for row in rows]))
    return load.with_users(draw(st.integers(1, count))) if draw(st.booleans()) else load


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    page_size = draw(st.sampled_from([1, 4, 16]))
    timing = LinearTiming(Coefficients(1e-2, 3e-4, 1e-6, 7e-5))
    return setup(
        page_size=page_size,
        pages=draw(st.integers(140, 400)) // page_size,
        timing=ScatteredTiming(timing, 0.2, 1) if draw(st.booleans()) else timing,
        front=Front(1e-3, 2e-3, 3e-4) if draw(st.booleans()) else Front(),
        admission=draw(st.sampled_from(["expected", "guaranteed", "unchecked"])),
        policy=draw(st.sampled_from(["fair", "fcfs", "priority"])),
        prefix_caching=draw(st.booleans()),
        max_num_seqs=draw(st.integers(1, 16)),
        max_num_batched_tokens=draw(st.sampled_from([16, 40])),
        target_itl=draw(st.sampled_from([None, 0.015])),
        min_chunk=4,
        learns_cost=draw(st.booleans()),
    )


@settings(max_examples=examples(60))
@given(loads(), setups(), st.sampled_from([1, 2]))
def test_the_same_happens_at_the_same_moments(load: Load, machine: Setup, replicas: int) -> None:
    plant = Plant(machine, replicas, "least-loaded")
    assert everything(play(plant, load)) == everything(play(plant, load, fast=False))


def test_the_same_seed_gives_the_same_figures_to_the_last_bit() -> None:
    def once() -> Figures:
        load = draw("x", 300, Uniform(5, 90), Uniform(1, 40), 7, prefixes=5, prefix_tokens=32)
        timing = ScatteredTiming(LinearTiming(Coefficients(1e-2, 3e-4, 1e-6, 7e-5)), 0.2, 7)
        machine = setup(pages=300, timing=timing, max_num_seqs=32)
        return simulate(Plant(machine, 2, "prefix-aware"), load.with_rate(40.0, 7))

    assert once() == once()


def step_through(machine: TurnstileMachine, *batches: range) -> tuple[list[Any], Any]:
    """All events and the counters, one batch of requests after another; audited at every step."""
    events: list[Any] = []
    machine.history.events = events.extend  # type: ignore[method-assign]
    now = 0.0
    for batch in batches:
        for index in batch:
            machine.history.due[index] = now
            machine.submit(index, now)
        # Until now: no step may be skipped, for each of them is looked at.
        while (end := machine.begin(now, until=now)) is not None:
            now = end
            machine.complete(now)
            machine.scheduler.audit()
    return events, machine.scheduler.statistics


def test_preemption_finds_everybody_as_long_as_they_are() -> None:
    # Short answers teach the forecast that answers are short; then long ones come, all at once.
    load = replace(arrivals(*[(0.0, 10, 2)] * 60, *[(0.0, 10, 60)] * 10), max_tokens=200)
    machine = setup(pages=100, page_size=4, max_num_seqs=12, max_num_batched_tokens=256)
    fast, plain = (
        step_through(
            TurnstileMachine(machine, load, History(len(load)), fast=fast), range(60), range(60, 70)
        )
        for fast in (True, False)
    )
    assert any(isinstance(event, Preempted) for event in plain[0])
    assert fast == plain


def test_a_sequence_that_only_decodes_is_not_looked_at() -> None:
    load = arrivals(*[(0.0, 8, 900)] * 8)
    machine = TurnstileMachine(setup(page_size=64), load, History(len(load)))
    planned = []
    plan = machine.scheduler.plan
    machine.scheduler.plan = lambda now: planned.append(p := plan(now)) or p  # type: ignore
    step_through(machine, range(8))
    looked_at = sum(len(p.chunks) for p in planned)
    assert len(planned) >= 900
    # The prompt, its way into a page, and the last token: not 900.
    assert looked_at < 8 * 10


def test_steps_of_sleepers_alone_are_not_planned() -> None:
    load = arrivals(*[(0.0, 8, 900)] * 8, (5.0, 8, 4))
    machines = [TurnstileMachine(setup(page_size=64), load, History(9), fast=f) for f in (1, 0)]
    planned: list[Plan] = []
    plan = machines[0].scheduler.plan
    machines[0].scheduler.plan = lambda now: planned.append(p := plan(now)) or p  # type: ignore
    for machine in machines:
        clock = Clock(load, [machine], ROUTERS["round-robin"](load), machine.history)
        clock.run()
        machine.scheduler.audit()
    fast, plain = machines
    assert everything(fast.history) == everything(plain.history)
    assert fast.scheduler.statistics == plain.scheduler.statistics
    assert fast.history.steps > 900
    assert len(planned) < 30


def test_weights_whose_sums_round_are_not_fast_forwarded() -> None:
    for weight, exact in ((1.0, True), (4.0, True), (0.125, True), (3.0, False), (0.3, False)):
        load = replace(arrivals((0.0, 8, 20)), tenants=(Tenant("a", weight),))
        machine = TurnstileMachine(setup(), load, History(1))
        assert isinstance(machine.scheduler.attendance, FastForward) is exact


@pytest.mark.parametrize("setting", ["separate_prefill", "speculation"])
def test_what_cannot_be_fast_forwarded_is_stepped_through(setting: str) -> None:
    load = arrivals((0.0, 8, 20))
    machine = TurnstileMachine(setup(**{setting: True}), load, History(1))
    assert not isinstance(machine.scheduler.attendance, FastForward)
    with pytest.raises(ValueError, match="fast-forwarded"):
        setup(**{setting: True}).make_scheduler(fast=True)
