"""What happened in a simulation, per request and per step; kept small for a million requests."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from turnstile.core.events import Admitted, AnyEvent
from turnstile.core.request import Sequence
from turnstile.simulate.timing import StepWork

PENDING, COMPLETED, REFUSED, FAILED = range(4)


class History:
    """Records of all requests of a load. Times are seconds; NaN where something never happened."""

    def __init__(self, requests: int) -> None:
        nothing = array("d", [float("nan")]) * requests
        self.due = array("d", nothing)
        self.started = array("d", nothing)
        self.first = array("d", nothing)
        self.last = array("d", nothing)
        self.ended = array("d", nothing)
        self.tokens = array("q", [0]) * requests
        self.cached = array("q", [0]) * requests
        self.status = bytearray(requests)
        self.gaps = array("d")
        """Gaps between tokens of one request, each counted ``gap_counts`` times."""
        self.gap_counts = array("q")
        self.steps = 0
        self.busy = 0.0
        self.page_seconds = 0.0
        self.peak_pages = 0
        self.row_seconds = 0.0
        self.peak_rows = 0
        self.preemptions = 0
        self.end = 0.0

    def token(self, index: int, now: float, step_before: float) -> int:
        """The request got a token. Returns 1 if it also got one in the step before: the caller
        counts those, as they all have the same gap.
        """
        last = self.last[index]
        self.last[index] = now
        if last != last:
            self.first[index] = now
            return 0
        if last == step_before:
            return 1
        self.gap(now - last, 1)
        return 0

    def gap(self, seconds: float, count: int) -> None:
        """So many gaps of this length."""
        self.gaps.append(seconds)
        self.gap_counts.append(count)

    def finish(self, index: int, now: float, sequence: Sequence, failed: bool) -> None:
        """The request is over."""
        self.status[index] = FAILED if failed else COMPLETED
        self.ended[index] = now
        self.tokens[index] = sequence.num_outputs
        self.cached[index] = sequence.num_cached
        self.preemptions += sequence.preemptions
        self.end = max(self.end, now)

    def refuse(self, index: int, now: float) -> None:
        """The request was not taken."""
        self.status[index] = REFUSED
        self.ended[index] = now
        self.end = max(self.end, now)

    def step(self, seconds: float, work: StepWork, held: int) -> None:
        """A step that takes so long, with so many pages held in it."""
        rows = work.decodes + work.chunks
        self.steps += 1
        self.busy += seconds
        self.page_seconds += held * seconds
        self.peak_pages = max(self.peak_pages, held)
        self.row_seconds += rows * seconds
        self.peak_rows = max(self.peak_rows, rows)

    def events(self, happened: Iterable[AnyEvent]) -> None:
        """Take from the core's stream what is wanted: when a request first got a slot."""
        for event in happened:
            if isinstance(event, Admitted):
                index = int(event.request_id)
                if self.started[index] != self.started[index]:
                    self.started[index] = event.time
