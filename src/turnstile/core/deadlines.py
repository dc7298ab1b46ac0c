"""When whose time is up."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from turnstile.core.request import Sequence, State


class Deadlines:
    """A heap of deadlines. A sequence that ends before its deadline stays in the heap until it
    surfaces, or until the heap is swept.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._sweep_at = 256

    def __len__(self) -> int:
        return len(self._heap)

    def watch(self, sequence: Sequence) -> None:
        """Remember a sequence's deadline, if it has one. O(log n), amortised."""
        deadline = sequence.request.deadline
        if deadline is None:
            return
        heapq.heappush(self._heap, (deadline, sequence.arrival_order, sequence))
        if len(self._heap) > self._sweep_at:
            # Most of them have ended long before their deadlines: drop those.
            self._heap = [entry for entry in self._heap if entry[2].state is not State.FINISHED]
            heapq.heapify(self._heap)
            self._sweep_at = 2 * len(self._heap) + 256

    def rebuild(self, alive: Iterable[Sequence]) -> None:
        """Watch these, and nobody else."""
        self._heap.clear()
        for sequence in alive:
            self.watch(sequence)

    def due(self, now: float) -> Iterator[Sequence]:
        """Those alive whose deadline has come, each once."""
        while self._heap and self._heap[0][0] <= now:
            *_, sequence = heapq.heappop(self._heap)
            if sequence.state is not State.FINISHED:
                yield sequence
