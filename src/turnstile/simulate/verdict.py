"""Is the simulator right? Figures of simulated runs against those of the real ones.

Several real runs of a load stand against as many simulated ones, median against median. A figure
may be off by its tolerance, or by the spread of the real runs where that is larger; but never by
more than :data:`CAP` tolerances: one run that went wrong does not make the others right.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from turnstile.simulate.fit import figure_at

Figures = Mapping[str, Any]

CAP = 2.0

COMPARED: tuple[tuple[str, tuple[str, ...], float], ...] = (
    ("output tok/s", ("output_throughput",), 0.05),
    ("TTFT p50 ms", ("ttft_ms", "p50"), 0.10),
    ("TTFT p99 ms", ("ttft_ms", "p99"), 0.20),
    ("TPOT p50 ms", ("tpot_ms", "p50"), 0.10),
    ("TPOT p99 ms", ("tpot_ms", "p99"), 0.20),
    ("ITL p50 ms", ("itl_ms", "p50"), 0.10),
    ("ITL p99 ms", ("itl_ms", "p99"), 0.20),
    ("E2E p50 ms", ("e2el_ms", "p50"), 0.10),
    ("E2E p99 ms", ("e2el_ms", "p99"), 0.20),
)
"""What is compared: label, where it is among the figures, and how far off it may be."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One figure: its values in the real runs and in the simulated ones."""

    label: str
    real: tuple[float, ...]
    simulated: tuple[float, ...]
    tolerance: float

    @property
    def error(self) -> float:
        """How far the simulated median is from the real one, as a part of that."""
        return statistics.median(self.simulated) / statistics.median(self.real) - 1.0

    @property
    def spread(self) -> float:
        """Largest less smallest of the real runs, as a part of their median."""
        return (max(self.real) - min(self.real)) / statistics.median(self.real)

    @property
    def allowed(self) -> float:
        """The largest error that passes."""
        return max(self.tolerance, min(self.spread, CAP * self.tolerance))

    @property
    def right(self) -> bool:
        """Whether the error passes."""
        return abs(self.error) <= self.allowed


def verdicts(real: Seq[Figures], simulated: Seq[Figures]) -> list[Verdict]:
    """Every figure of :data:`COMPARED` that all runs have."""
    found = []
    for label, path, tolerance in COMPARED:
        theirs, ours = values(real, path), values(simulated, path)
        if all(theirs) and all(ours):
            found.append(Verdict(label, theirs, ours, tolerance))
    return found


def values(runs: Seq[Figures], path: tuple[str, ...]) -> tuple[float, ...]:
    """The figure of each run; 0 where a run has none."""
    return tuple(figure_at(figures, path) or 0.0 for figures in runs)


def pace_of(real: Figures, simulated: Figures) -> float:
    """How many times as long as a simulated step a real one took, in the mean."""
    return mean_step(real) / mean_step(simulated)


def mean_step(figures: Figures) -> float:
    """Seconds of a step in the mean, from the end of the one before."""
    seconds: float = figures["busy_s"] / figures["steps"]
    return seconds
