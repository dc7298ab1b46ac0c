"""One simulation: a load, machines, a router; figures out."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

from turnstile.simulate.clock import Clock
from turnstile.simulate.figures import Figures, Limits, measure
from turnstile.simulate.history import History
from turnstile.simulate.load import Load
from turnstile.simulate.machine import Machine, TurnstileMachine
from turnstile.simulate.routing import ROUTERS
from turnstile.simulate.setup import Setup, SetupError
from turnstile.simulate.static import StaticMachine


@dataclass(frozen=True, slots=True)
class Plant:
    """The machines of a simulation: so many alike, behind a router."""

    setup: Setup
    replicas: int = 1
    router: str = "round-robin"
    static: bool = False
    """Static batches over contiguous memory, instead of the scheduler that serves."""

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise SetupError(f"--replicas must be at least 1, not {self.replicas}.")
        if self.router not in ROUTERS:
            raise SetupError(f"There is no router {self.router!r}; known are {', '.join(ROUTERS)}.")


def play(
    plant: Plant, load: Load, tell: Callable[[int], None] | None = None, *, fast: bool = True
) -> History:
    """Run the load to its end; returns what happened. ``fast`` changes nothing but the time."""
    history = History(len(load))
    machines: list[Machine] = [
        StaticMachine(plant.setup, load, history)
        if plant.static
        else TurnstileMachine(plant.setup, load, history, fast=fast)
        for _ in range(plant.replicas)
    ]
    clock = Clock(load, machines, ROUTERS[plant.router](load), history)
    # Nothing here makes cycles, and the collector would look at every waiting request again.
    enabled = gc.isenabled()
    gc.disable()
    try:
        clock.run(tell)
    finally:
        if enabled:
            gc.enable()
    return history


def simulate(
    plant: Plant,
    load: Load,
    limits: Limits | None = None,
    tell: Callable[[int], None] | None = None,
) -> Figures:
    """Run the load to its end; returns its figures."""
    history = play(plant, load, tell)
    return measure(history, load, plant.setup.num_pages, limits, plant.replicas)
