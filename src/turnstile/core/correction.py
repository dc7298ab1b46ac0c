"""Predicted against actual: how far predictions of each magnitude are off, learned as they end."""

from __future__ import annotations

import math


class Correction:
    """Puts predictions of one quantity right. See the module.

    For each decade of the raw prediction two numbers are kept, so that a drift is followed and
    nothing is stored: the median of log(actual ÷ raw), by stochastic approximation (Robbins and
    Monro 1951), and the *margin* from the median that was told to the 90th percentile.

    In a queue errors come in flocks. All who wait at the same time meet the same speed, so their
    errors are alike; and an error is known only when its wait is over, after many others have been
    told the same. A quantile that followed each outcome would forget in one flock what the last one
    taught, and be wrong for all of the next. Therefore an outcome counts for less the more requests
    stood before it (half, with ``FLOCK`` of them); the margin is measured from the median that was
    told, grows no further than would have covered the outcome, and shrinks slowly. A magnitude that
    was never seen begins with the margin of the next smaller one: queues grow through all of them.
    """

    RATE = 0.05
    GROWTH, DECLINE = 0.09, 0.005
    """Steps of the margin for an outcome beyond it, and within."""
    FLOCK = 8.0
    LEAST_MARGIN, FIRST_MARGIN, MOST_MARGIN = math.log(1.13), math.log(2.0), math.log(20.0)
    INHERITED = (math.log(1.3), math.log(1.6))
    """Range of a margin that comes from a smaller magnitude."""
    FLOOR = 0.01
    """Seconds added to both sides: below it nobody cares, and a wait of 0 has no logarithm."""
    _DECADES = 5
    _KNOWN = 20

    def __init__(self) -> None:
        self.count = 0
        self.covered = 0
        """Predictions whose actual was within the 90th percentile predicted."""
        self.predicted_seconds = 0.0
        self.actual_seconds = 0.0
        self._medians = [0.0] * self._DECADES
        self._margins: list[float | None] = [None] * self._DECADES
        self._seen = [0] * self._DECADES

    def correct(self, raw: float) -> tuple[float, float]:
        """The median and the 90th percentile for a raw prediction, both at least 0."""
        i = self._decade(raw)
        median = (raw + self.FLOOR) * math.exp(self._medians[i])
        p90 = median * math.exp(max(self.LEAST_MARGIN, self._margin(i)))
        return max(0.0, median - self.FLOOR), max(0.0, p90 - self.FLOOR)

    def observe(
        self, raw: float, median: float, p90: float, actual: float, ahead: float = 0.0
    ) -> None:
        """Learn how a prediction came out that was told when ``ahead`` others waited."""
        self.count += 1
        self.covered += actual <= p90
        self.predicted_seconds += median
        self.actual_seconds += actual
        i, weight = self._decade(raw), self.FLOCK / (self.FLOCK + ahead)
        error = math.log((actual + self.FLOOR) / (raw + self.FLOOR))
        self._medians[i] += self.RATE * weight * (0.5 - (error <= self._medians[i]))
        needed = math.log((actual + self.FLOOR) / (median + self.FLOOR))
        margin = self._margin(i)
        if needed > margin:
            self._margins[i] = min(needed, margin + self.GROWTH, self.MOST_MARGIN)
        else:
            self._margins[i] = max(0.0, margin - self.DECLINE * weight)
        self._seen[i] += 1

    @property
    def coverage(self) -> float:
        """Share of actual values within the predicted 90th percentile; 0 before the first."""
        return self.covered / self.count if self.count else 0.0

    def _margin(self, decade: int) -> float:
        known = self._margins[decade]
        if known is not None:
            return known
        for smaller in range(decade - 1, -1, -1):
            inherited = self._margins[smaller]
            if inherited is not None and self._seen[smaller] >= self._KNOWN:
                least, most = self.INHERITED
                return min(most, max(least, inherited))
        return self.FIRST_MARGIN

    def _decade(self, raw: float) -> int:
        decade = math.floor(math.log10(raw + self.FLOOR)) + 2
        return min(max(decade, 0), self._DECADES - 1)
