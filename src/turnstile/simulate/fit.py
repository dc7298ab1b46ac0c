"""Find the machine with which a simulated run ends as a measured one.

A pattern search over a few positive numbers: each in turn is made larger and smaller by a factor,
what makes the simulated run more like the measured one is kept, and the factor shrinks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from turnstile.simulate.calibrate import CalibrationError
from turnstile.simulate.figures import Figures

Parameters = dict[str, float]

_STRIDES = 4

SEEN: tuple[tuple[tuple[str, ...], float], ...] = (
    (("output_throughput",), 4.0),
    (("ttft_ms", "p50"), 1.0),
    (("ttft_ms", "p99"), 0.5),
    (("itl_ms", "p50"), 1.0),
    (("itl_ms", "p99"), 0.5),
    (("queue_ms", "p50"), 1.0),
    (("e2el_ms", "p50"), 1.0),
    (("e2el_ms", "p99"), 0.5),
)
"""What is compared, and how much it counts."""


def distance(simulated: Figures, measured: Mapping[str, Any]) -> float:
    """Weighted mean of the squared logarithms of the ratios."""
    total = weights = 0.0
    for path, weight in SEEN:
        ours, theirs = figure_at(simulated, path), figure_at(measured, path)
        if ours and theirs:
            total += weight * math.log(ours / theirs) ** 2
            weights += weight
    if not weights:
        raise CalibrationError("The measured run has no figures to compare with.")
    return total / weights


def figure_at(figures: Any, path: tuple[str, ...]) -> float | None:
    """The number found by going down these names; None where there is none."""
    for name in path:
        figures = figures.get(name) if isinstance(figures, Mapping) else None
    return figures if isinstance(figures, int | float) else None


def descend(
    loss: Callable[[Parameters], float],
    start: Parameters,
    *,
    factor: float = 1.5,
    rounds: int = 4,
) -> tuple[Parameters, float]:
    """Least ``loss`` near ``start``; the factor becomes its square root after every round."""
    best, least = dict(start), loss(start)

    def go(name: str, step: float) -> bool:
        """As far as it gets better that way, a few steps at most."""
        nonlocal best, least
        before = least
        for _ in range(_STRIDES):
            tried = best | {name: best[name] * step}
            value = loss(tried)
            if value >= least:
                break
            best, least = tried, value
        return least < before

    for _ in range(rounds):
        for name in start:
            if not go(name, factor):
                go(name, 1.0 / factor)
        factor = math.sqrt(factor)
    return best, least
