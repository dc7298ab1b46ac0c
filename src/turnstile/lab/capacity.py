"""How many users a server holds: the most for whom the limits are kept, by doubling and halving."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from turnstile.bench.metrics import Figures, Limits
from turnstile.lab.drive import Seconds, Server, drive
from turnstile.lab.load import Ask, ClosedLoad

ATTAINMENT = 0.9
"""Share of the requests that must keep every limit."""
TRIES = 3
"""Draws of the requests that a number of users is tried with, at most."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One number of users, and how it went (each user's first request aside)."""

    users: int
    figures: Figures
    outputs_per_step: float

    @property
    def attainment(self) -> float:
        """Share of the requests that kept every limit."""
        return float(self.figures["goodput"]["attainment"] or 0.0)

    @property
    def kept(self) -> bool:
        """Whether so many users can be served."""
        return self.attainment >= ATTAINMENT


@dataclass(slots=True)
class Capacity:
    """What a search found, with all it tried."""

    trials: list[Trial] = field(default_factory=list)

    @property
    def best(self) -> Trial | None:
        """The most users whose limits were kept."""
        return max((t for t in self.trials if t.kept), key=lambda t: t.users, default=None)

    @property
    def users(self) -> int:
        """Their number; 0 where not even one user's were."""
        return self.best.users if self.best else 0


def try_users(
    server: Server,
    asks: list[Ask],
    users: int,
    limits: Limits,
    *,
    by_steps: bool = False,
    seconds: Seconds = "wall",
) -> Trial:
    """Let so many users ask all of ``asks`` in a closed loop, each as soon as it has its answer.

    The first request of each is not judged: they all come at the same moment, which users do not.
    By steps, a step is a millisecond to the limits.
    """
    run = drive(server, ClosedLoad(asks, users), by_steps=by_steps, seconds=seconds)
    figures = run.figures(limits, by_steps=by_steps, skip=users)
    return Trial(users, figures, run.outputs / max(1, len(run.steps)))


def by_majority(attempt: Callable[[int], Trial], tries: int = TRIES) -> Trial:
    """Try a number of users with other requests each time, until most trials agree whether the
    limits are kept: one trial near the limit is a throw of dice.

    ``attempt`` serves draw number 0, 1, … of the requests. Returns the trial nearest to the limit
    among those that agree.
    """
    most = tries // 2 + 1
    tried: dict[bool, list[Trial]] = {True: [], False: []}
    for draw in range(tries):
        trial = attempt(draw)
        tried[trial.kept].append(trial)
        if len(tried[trial.kept]) == most:
            break
    kept = len(tried[True]) >= most
    nearest = min if kept else max
    return nearest(tried[kept], key=lambda trial: trial.attainment)


def find_capacity(attempt: Callable[[int], Trial], start: int = 4, most: int = 1024) -> Capacity:
    """Double from ``start`` until a limit breaks, then halve the distance down to an eighth.

    ``attempt`` serves so many users. More users are taken never to do better.
    """
    found = Capacity()
    low, high = 0, start
    while high <= most:
        trial = attempt(high)
        found.trials.append(trial)
        if not trial.kept:
            break
        low, high = high, 2 * high
    else:
        return found  # nothing that may be tried breaks a limit
    while high - low > max(1, low // 8):
        middle = (low + high) // 2
        trial = attempt(middle)
        found.trials.append(trial)
        if trial.kept:
            low = middle
        else:
            high = middle
    return found
