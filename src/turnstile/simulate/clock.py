"""The event loop on virtual time: arrivals and the ends of steps, in order, nothing between."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from collections.abc import Sequence as Seq

from turnstile.simulate.history import History
from turnstile.simulate.load import Load
from turnstile.simulate.machine import Machine
from turnstile.simulate.routing import Router

_DUE, _SEEN, _STEP = range(3)

Event = tuple[float, int, int, int, int]
"""Time, what comes first at equal times, the order of creation, a request and a machine."""


class Clock:
    """Runs a load through machines until every request is over.

    At equal times arrivals come before the end of a step, so that a step that begins then has
    them, as in the server, where commands are read just before planning.
    """

    def __init__(
        self, load: Load, machines: Seq[Machine], router: Router, history: History
    ) -> None:
        self.load = load
        self.machines = machines
        self.router = router
        self.history = history
        self._heap: list[Event] = []
        self._order = 0
        self._busy = [False] * len(machines)
        self._next = 0
        self._following = math.inf
        """When the next request of an open loop arrives."""

    def run(self, tell: Callable[[int], None] | None = None) -> None:
        """Go to the end. ``tell`` is called now and then with the number of arrivals so far."""
        self._first_arrivals()
        heap = self._heap
        due = self.load.due.tolist() if self.load.due is not None else []
        count = len(due)
        self._following = due[0] if due else math.inf
        while heap or self._following != math.inf:
            if heap and heap[0][0] < self._following:
                time, kind, _, index, machine = heapq.heappop(heap)
                self._happen(kind, time, index, machine)
                continue
            self._arrive(self._next, self._following)
            self._next += 1
            self._following = due[self._next] if self._next < count else math.inf
            if tell is not None and self._next % 10_000 == 0:
                tell(self._next)

    def _first_arrivals(self) -> None:
        load = self.load
        if load.due is None:
            users = min(load.users, len(load))
            for user in range(users):
                # Who pauses between questions does not come together with all others either.
                self._push(load.think * user / users, _DUE, user, -1)
            self._next = users

    def _push(self, time: float, kind: int, index: int, machine: int) -> None:
        self._order += 1
        heapq.heappush(self._heap, (time, kind, self._order, index, machine))

    def _happen(self, kind: int, now: float, index: int, machine: int) -> None:
        if kind == _STEP:
            for over, told in self.machines[machine].complete(now):
                self._answered(over, told)
            self._begin(machine, now)
        elif kind == _DUE:
            self._arrive(index, now)
        elif self.machines[machine].submit(index, now):
            self._answered(index, now)
        elif not self._busy[machine]:
            self._begin(machine, now)

    def _arrive(self, index: int, now: float) -> None:
        self.history.due[index] = now
        machine = self.router.choose(index, self.machines)
        self._push(self.machines[machine].accept(index, now), _SEEN, index, machine)

    def _begin(self, machine: int, now: float) -> None:
        until = min(self._following, self._heap[0][0]) if self._heap else self._following
        end = self.machines[machine].begin(now, until)
        self._busy[machine] = end is not None
        if end is not None:
            self._push(end, _STEP, -1, machine)

    def _answered(self, index: int, now: float) -> None:
        """A user of a closed loop asks again."""
        if self.load.due is None and self._next < len(self.load):
            self._push(now + self.load.think, _DUE, self._next, -1)
            self._next += 1
