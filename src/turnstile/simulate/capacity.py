"""The most users, or the highest rate, that keep what was promised: found by bisection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from turnstile.simulate.figures import Figures, Limits
from turnstile.simulate.load import Load
from turnstile.simulate.run import Plant, simulate

_USERS_LIMIT = 1 << 20
_LEAST_RATE, _HIGHEST_RATE = 1e-3, 1e6


class CapacityError(ValueError):
    """This cannot be searched for; the message says why."""


@dataclass(slots=True)
class Bisection:
    """What bisection found.

    Attributes
    ----------
    value
        The largest load tried that kept the limits; 0 where even the least one does not.
    broken
        The smallest load tried that did not keep them; None where none was found.
    figures
        Of the run at ``value``.
    tried
        Every load tried, and the share of requests that kept the limits.
    """

    value: float = 0.0
    broken: float | None = None
    figures: Figures | None = None
    tried: list[tuple[float, float]] = field(default_factory=list)


def find_capacity(
    run: Callable[[float], Figures], start: float, least: float, most: float, close: float
) -> Bisection:
    """Double or halve from ``start`` until the limits are kept on one side and broken on the
    other, then halve the distance until it is within ``close`` (relative) or 1.

    Assumes that more load is never better; bisection cannot see a dip below what it has tried.
    """
    found = Bisection()

    def keeps(value: float) -> bool:
        figures = run(value)
        kept = bool(figures["goodput"]["kept"])
        found.tried.append((value, figures["goodput"]["attainment"]))
        if kept and value > found.value:
            found.value, found.figures = value, figures
        if not kept and (found.broken is None or value < found.broken):
            found.broken = value
        return kept

    value = start
    if keeps(value):
        while found.broken is None and value < most:
            value = min(most, value * 2)
            keeps(value)
    else:
        while found.value == 0 and value > least:
            value = max(least, value / 2)
            keeps(value)
    whole = least >= 1
    while found.value and found.broken is not None:
        low, high = found.value, found.broken
        if high - low <= close * low or (whole and high - low <= 1):
            break
        middle = (low + high) / 2
        keeps(float(round(middle)) if whole else middle)
    return found


def by_majority(run: Callable[[int], Figures], tries: int) -> Figures:
    """Try a load with several draws of it, until most of them agree whether it keeps the limits.

    One draw near the limit is a throw of dice, and a search that believes it goes astray.

    Parameters
    ----------
    run
        Simulates draw number 0, 1, ….
    tries
        How many at most, at least 1; of an even number, half are not most.

    Returns
    -------
    The figures of the draw nearest to the limit among those that agree.
    """
    if tries < 1:
        raise CapacityError(f"A load must be tried at least once, not {tries} times.")
    most = tries // 2 + 1
    tried: dict[bool, list[Figures]] = {True: [], False: []}
    for draw in range(tries):
        figures = run(draw)
        alike = tried[bool(figures["goodput"]["kept"])]
        alike.append(figures)
        if len(alike) == most:
            break
    kept = len(tried[True]) >= most
    nearest = min if kept else max
    return nearest(tried[kept], key=lambda figures: figures["goodput"]["attainment"])


MakeLoad = Callable[[float, int], Load]
"""Makes a load of so many users, or of such a rate: draw number 0, 1, … of it."""


def most_users(
    plant: Plant, make_load: MakeLoad, limits: Limits, start: int = 64, tries: int = 1
) -> Bisection:
    """The largest closed loop that keeps the limits, within 2 %; each :func:`by_majority`."""

    def run(users: float) -> Figures:
        return by_majority(lambda draw: simulate(plant, make_load(users, draw), limits), tries)

    return find_capacity(run, start, 1, _USERS_LIMIT, 0.02)


def highest_rate(
    plant: Plant, make_load: MakeLoad, limits: Limits, start: float = 1.0, tries: int = 1
) -> Bisection:
    """The highest rate of arrivals that keeps the limits, within 2 %; each :func:`by_majority`."""

    def run(rate: float) -> Figures:
        return by_majority(lambda draw: simulate(plant, make_load(rate, draw), limits), tries)

    return find_capacity(run, start, _LEAST_RATE, _HIGHEST_RATE, 0.02)
