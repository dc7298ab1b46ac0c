"""How long answers are on average, for a gate that must say how long they will hold their slots."""

from __future__ import annotations

import math
from itertools import accumulate


class OutputMeans:
    """The mean outputs of a sample, from those that ended: E[min(length, limit)].

    Lengths are kept in geometric buckets with slow forgetting. Cold, it behaves as if
    ``PRIOR_WEIGHT`` outputs had been seen, spread evenly in the logarithm from 16 to 1,024.
    """

    EDGES = tuple(2 ** (i / 2) for i in range(41))
    PRIOR_WEIGHT = 4.0
    HALF_LIFE = 500.0

    def __init__(self) -> None:
        prior = [16 <= round(edge) <= 1024 for edge in self.EDGES]
        weight = self.PRIOR_WEIGHT / sum(prior)
        self._counts = [weight * known for known in prior]
        self._sums = [c * e for c, e in zip(self._counts, self.EDGES, strict=True)]
        self._gain = 1.0
        self._tables: tuple[list[float], list[float]] | None = None

    def add(self, length: int) -> None:
        """A sample ended by itself after ``length`` outputs."""
        # Newer ones weigh more, instead of all older ones less: the same mean for one addition.
        self._gain *= 2 ** (1 / self.HALF_LIFE)
        if self._gain > 1e6:
            self._counts = [c / self._gain for c in self._counts]
            self._sums = [s / self._gain for s in self._sums]
            self._gain = 1.0
        bucket = self._bucket(length)
        self._counts[bucket] += self._gain
        self._sums[bucket] += self._gain * length
        self._tables = None

    def expected(self, least: int, most: int) -> float:
        """Mean outputs of a sample that draws from ``least`` to ``most`` tokens."""
        if self._tables is None:
            self._tables = list(accumulate(self._counts)), list(accumulate(self._sums))
        counts, sums = self._tables
        bucket = self._bucket(most) - 1
        below, short = (counts[bucket], sums[bucket]) if bucket >= 0 else (0.0, 0.0)
        mean = (short + (counts[-1] - below) * most) / counts[-1]
        return min(float(most), max(mean, float(least), 1.0))

    def _bucket(self, length: int) -> int:
        """The first bucket whose edge is at least ``length``."""
        if length <= 1:
            return 0
        return min(len(self.EDGES) - 1, math.ceil(2 * math.log2(length) - 1e-9))
