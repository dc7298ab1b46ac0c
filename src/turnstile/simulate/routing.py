"""Which of several machines a request goes to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from hashlib import blake2b

from turnstile.simulate.load import Load
from turnstile.simulate.machine import Machine


class Router(ABC):
    """Chooses a machine for a request at the moment it arrives."""

    name: str

    def __init__(self, load: Load) -> None:
        self.load = load

    @abstractmethod
    def choose(self, index: int, machines: Seq[Machine]) -> int:
        """The place of the machine in ``machines``."""


class RoundRobin(Router):
    """One after another, whatever they have to do."""

    name = "round-robin"

    def __init__(self, load: Load) -> None:
        super().__init__(load)
        self._next = 0

    def choose(self, index: int, machines: Seq[Machine]) -> int:
        chosen = self._next % len(machines)
        self._next += 1
        return chosen


class LeastLoaded(Router):
    """The one with the fewest requests inside; the first of equals."""

    name = "least-loaded"

    def choose(self, index: int, machines: Seq[Machine]) -> int:
        return min(range(len(machines)), key=lambda i: (machines[i].outstanding, i))


class PrefixAware(LeastLoaded):
    """Requests that begin alike go to the same machine, unless it has ``SLACK`` times (and eight
    requests) more to do than the least loaded one. A request that begins like no other goes to
    the least loaded.
    """

    name = "prefix-aware"
    SLACK = 1.5

    def choose(self, index: int, machines: Seq[Machine]) -> int:
        least = super().choose(index, machines)
        run = self.load.first_run(index)
        if run is None:
            return least
        digest = blake2b(run.to_bytes(16, "little", signed=True), digest_size=8).digest()
        home = int.from_bytes(digest, "little") % len(machines)
        bound = self.SLACK * machines[least].outstanding + 8
        return home if machines[home].outstanding <= bound else least


ROUTERS: dict[str, type[Router]] = {
    router.name: router for router in (RoundRobin, LeastLoaded, PrefixAware)
}
