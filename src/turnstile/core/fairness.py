"""Who is next: the queue policies.

:class:`FairQueue` is the default: tenants share by tokens, after "Fairness in Serving Large
Language Models" (VTC, OSDI 2024, section 4). :class:`FirstComeQueue` and :class:`PriorityQueue`
are what other servers do, for comparison and for those who want it.

A round of admission reads::

    while (sequence := queue.next()) is not None:
        queue.take(sequence)          it starts: leaves the queue
        queue.set_aside(sequence)     it cannot start now: look at the next one
    queue.end_round()                 those set aside are back where they were
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from turnstile.core.pages import AuditError
from turnstile.core.request import Sequence, State

OUTPUT_CHARGE = 2.0
"""Service of an output token, in units of an uncached prompt token."""

Entry = tuple[tuple[float, float, int], Sequence]


class Lane:
    """Sequences in order of ``place``; O(log n) in and out, removal by forgetting."""

    __slots__ = ("_heap", "_members")

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._members: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        """In order of place. O(n log n): for people, not for the scheduler."""
        return iter(sorted(self._members, key=lambda s: s.place))

    def push(self, sequence: Sequence) -> None:
        """Add a sequence whose place is set."""
        self._members.add(sequence)
        heapq.heappush(self._heap, (sequence.place, sequence))

    def remove(self, sequence: Sequence) -> bool:
        """Take a sequence out from wherever it stands; False if it is not here."""
        if sequence not in self._members:
            return False
        self._members.discard(sequence)
        # Stale entries are dropped when they surface; rebuild before they outnumber the others.
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [(s.place, s) for s in self._members]
            heapq.heapify(self._heap)
        return True

    def head(self) -> Sequence | None:
        """The first, left where it is."""
        while self._heap:
            place, sequence = self._heap[0]
            if sequence in self._members and sequence.place == place:
                return sequence
            heapq.heappop(self._heap)
        return None


class QueuePolicy(ABC):
    """Order among waiting sequences, and the books of who was served.

    ``tenants_share`` and ``by_priority`` tell the gate whom a newcomer will find before it: only
    those of its own tenant, and of others what they are owed; only those whose priority is not
    later. Where the order is another one, the gate predicts as if it were by arrival, and learns
    how far off that is.
    """

    name: str
    tenants_share: bool = False
    by_priority: bool = False

    def __init__(self) -> None:
        self._aside: list[Sequence] = []

    @abstractmethod
    def push(self, sequence: Sequence) -> None:
        """Enter a new or preempted sequence (a preempted one returns to its old place)."""

    @abstractmethod
    def next(self) -> Sequence | None:
        """The next candidate of this round; None when there is none left."""

    @abstractmethod
    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence, for good or because it starts."""

    @abstractmethod
    def empty(self) -> None:
        """Nobody stands in the queue any more, nor aside."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Sequence]:
        """All waiting, in the order they would start if all went well. For people: O(n log n)."""

    def take(self, sequence: Sequence) -> None:
        """The candidate starts."""
        self.remove(sequence)

    def set_aside(self, sequence: Sequence) -> None:
        """The candidate cannot start in this round; :meth:`end_round` puts it back."""
        self.remove(sequence)
        self._aside.append(sequence)

    def set_tenant_aside(self, sequence: Sequence) -> None:
        """The candidate's whole tenant cannot start now (only the candidate where tenants are not
        told apart).
        """
        self.set_aside(sequence)

    def end_round(self) -> None:
        """Put back who was set aside."""
        for sequence in self._aside:
            self.push(sequence)
        self._aside.clear()

    # -- the books: policies without tenants keep none ---------------------------------------------

    def arrive(self, sequence: Sequence, served: float | None = None) -> None:  # noqa: B027
        """A sequence becomes alive (waiting or running). ``served`` is its tenant's counter where
        the sequence was alive before, if it was.
        """

    def leave(self, sequence: Sequence) -> None:  # noqa: B027
        """A sequence is finished."""

    def start(self, sequence: Sequence) -> None:  # noqa: B027
        """A sequence got a slot."""

    def stop(self, sequence: Sequence) -> None:  # noqa: B027
        """A sequence lost its slot: finished or preempted."""

    def charge(self, sequence: Sequence, tokens: float) -> None:
        """Book ``tokens`` of service (2 for an output token) on the sequence and its tenant."""
        sequence.charged += tokens

    def served(self, tenant: str) -> float:
        """Service of ``tenant`` so far, divided by its weight. 0 where no books are kept."""
        return 0.0

    def num_running(self, tenant: str) -> int | None:
        """Sequences of ``tenant`` with a slot; None where tenants are not told apart."""
        return None

    @property
    def num_tenants(self) -> int:
        """Tenants ever seen (1 where they are not told apart)."""
        return 1

    def counters(self) -> dict[str, float]:
        """The virtual token counter of each active tenant."""
        return {}

    @property
    def level(self) -> float:
        """The counter to which a newcomer is lifted while nobody is active."""
        return 0.0

    def resume(self, counters: Mapping[str, float], level: float) -> None:  # noqa: B027
        """Go on from :meth:`served` and :attr:`level` of another queue: before anybody arrives."""

    def rebuild(self, alive: Iterable[Sequence]) -> None:
        """Empty the queue, and write the books anew: these are alive, and of them those run whose
        state says so. What tenants were served stays.
        """
        self.empty()

    def audit(self, alive: Iterable[Sequence]) -> None:  # noqa: B027
        """Check the books against all who are alive; raises :class:`AuditError`."""


class FirstComeQueue(QueuePolicy):
    """Strictly by arrival, whoever asks."""

    name = "fcfs"

    def __init__(self) -> None:
        super().__init__()
        self._lane = Lane()

    def place(self, sequence: Sequence) -> tuple[float, float, int]:
        """Where the sequence stands."""
        return (0.0, sequence.request.arrival, sequence.arrival_order)

    def push(self, sequence: Sequence) -> None:
        sequence.place = self.place(sequence)
        self._lane.push(sequence)

    def next(self) -> Sequence | None:
        return self._lane.head()

    def remove(self, sequence: Sequence) -> None:
        self._lane.remove(sequence)

    def empty(self) -> None:
        self._aside.clear()
        self._lane = Lane()

    def __len__(self) -> int:
        return len(self._lane) + len(self._aside)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._lane)


class PriorityQueue(FirstComeQueue):
    """Strictly by priority, then arrival, whoever asks. Low priorities can starve."""

    name = "priority"
    by_priority = True

    def place(self, sequence: Sequence) -> tuple[float, float, int]:
        return (sequence.request.priority, sequence.request.arrival, sequence.arrival_order)


@dataclass(slots=True)
class _Tenant:
    name: str
    weight: float = 1.0
    served: float = 0.0
    alive: int = 0
    running: int = 0
    lane: Lane = field(default_factory=Lane)
    # Whether the tenant has an entry in each of the two heaps below: never more than one.
    in_served: bool = False
    in_active: bool = False


class FairQueue(QueuePolicy):
    """The least served tenant first; within a tenant by priority with ageing, then arrival.

    Every tenant has a virtual token counter: uncached prompt tokens at admission and 2 for each
    output token, divided by the tenant's weight. A tenant that comes back is lifted to the least
    counter among active tenants (so that idling saves up nothing), or, if nobody is active, to
    that of the last one that was. One whose work goes on after the engine was restarted goes on
    from the counter it had there: it was not idle.

    ``ageing`` is how many seconds of waiting outweigh one level of priority. It makes the place
    of a sequence a constant, ``arrival + ageing · priority``: nothing is ever re-sorted, and
    nothing starves.
    """

    name = "fair"
    tenants_share = True
    by_priority = True

    def __init__(self, ageing: float = 30.0) -> None:
        super().__init__()
        self.ageing = ageing
        self._tenants: dict[str, _Tenant] = {}
        # Counters only grow, so an entry with an old counter is a lower bound: refresh at the top.
        self._by_served: list[tuple[float, str]] = []
        self._active: list[tuple[float, str]] = []
        self._last_active = 0.0
        self._size = 0
        self._tenants_aside: list[_Tenant] = []

    def place(self, sequence: Sequence) -> tuple[float, float, int]:
        """Where the sequence stands among those of its tenant."""
        request = sequence.request
        first = request.arrival + self.ageing * request.priority
        return (first, request.arrival, sequence.arrival_order)

    def push(self, sequence: Sequence) -> None:
        sequence.place = self.place(sequence)
        tenant = self._tenant(sequence)
        self._offer(tenant)
        tenant.lane.push(sequence)
        self._size += 1

    def next(self) -> Sequence | None:
        heap = self._by_served
        while heap:
            served, name = heap[0]
            tenant = self._tenants[name]
            head = tenant.lane.head()
            if head is None:
                heapq.heappop(heap)
                tenant.in_served = False
            elif served < tenant.served:
                heapq.heapreplace(heap, (tenant.served, name))
            else:
                return head
        return None

    def set_tenant_aside(self, sequence: Sequence) -> None:
        # `next` has just returned the candidate, so its tenant is at the top of the heap.
        tenant = self._tenant(sequence)
        heapq.heappop(self._by_served)
        tenant.in_served = False
        self._tenants_aside.append(tenant)

    def end_round(self) -> None:
        super().end_round()
        for tenant in self._tenants_aside:
            self._offer(tenant)
        self._tenants_aside.clear()

    def remove(self, sequence: Sequence) -> None:
        if self._tenant(sequence).lane.remove(sequence):
            self._size -= 1

    def empty(self) -> None:
        self._aside.clear()
        self._tenants_aside.clear()
        self._by_served.clear()
        self._size = 0
        for tenant in self._tenants.values():
            tenant.lane, tenant.in_served = Lane(), False

    def __len__(self) -> int:
        return self._size + len(self._aside)

    def __iter__(self) -> Iterator[Sequence]:
        tenants = sorted(self._tenants.values(), key=lambda t: (t.served, t.name))
        return (sequence for tenant in tenants for sequence in tenant.lane)

    # -- the books --------------------------------------------------------------------------------

    def arrive(self, sequence: Sequence, served: float | None = None) -> None:
        tenant = self._tenant(sequence)
        tenant.weight = sequence.request.weight
        if tenant.alive == 0:
            if served is None:
                least = self._least_active()
                served = self._last_active if least is None else least
            tenant.served = max(tenant.served, served)
            self._activate(tenant)
        tenant.alive += 1

    def leave(self, sequence: Sequence) -> None:
        tenant = self._tenant(sequence)
        tenant.alive -= 1
        if tenant.alive == 0:
            self._last_active = tenant.served

    def start(self, sequence: Sequence) -> None:
        self._tenant(sequence).running += 1

    def stop(self, sequence: Sequence) -> None:
        self._tenant(sequence).running -= 1

    def charge(self, sequence: Sequence, tokens: float) -> None:
        sequence.charged += tokens
        tenant = self._tenants[sequence.request.tenant]
        tenant.served += tokens / tenant.weight

    def served(self, tenant: str) -> float:
        known = self._tenants.get(tenant)
        return known.served if known else 0.0

    def num_running(self, tenant: str) -> int | None:
        known = self._tenants.get(tenant)
        return known.running if known else 0

    @property
    def num_tenants(self) -> int:
        return len(self._tenants)

    def counters(self) -> dict[str, float]:
        return {t.name: t.served for t in self._tenants.values() if t.alive}

    @property
    def level(self) -> float:
        return self._last_active

    def resume(self, counters: Mapping[str, float], level: float) -> None:
        for name, served in counters.items():
            tenant = self._tenants.setdefault(name, _Tenant(name))
            tenant.served = max(tenant.served, served)
        self._last_active = max(self._last_active, level)

    def rebuild(self, alive: Iterable[Sequence]) -> None:
        super().rebuild(alive)
        self._active.clear()
        for tenant in self._tenants.values():
            tenant.alive, tenant.running, tenant.in_active = 0, 0, False
        for sequence in alive:
            tenant = self._tenant(sequence)
            tenant.alive += 1
            tenant.running += sequence.state is State.RUNNING
        for tenant in self._tenants.values():
            if tenant.alive:
                self._activate(tenant)

    def audit(self, alive: Iterable[Sequence]) -> None:
        counted: dict[str, list[int]] = {name: [0, 0] for name in self._tenants}
        for sequence in alive:
            counts = counted.setdefault(sequence.request.tenant, [0, 0])
            counts[0] += 1
            counts[1] += sequence.state is State.RUNNING
        for name, (living, running) in counted.items():
            known = self._tenants.get(name)
            if known is None or (known.alive, known.running) != (living, running):
                raise AuditError(f"Of {name} {living} are alive and {running} run, not {known}.")

    def _tenant(self, sequence: Sequence) -> _Tenant:
        name = sequence.request.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(name, sequence.request.weight)
        return tenant

    def _offer(self, tenant: _Tenant) -> None:
        if not tenant.in_served:
            tenant.in_served = True
            heapq.heappush(self._by_served, (tenant.served, tenant.name))

    def _activate(self, tenant: _Tenant) -> None:
        if not tenant.in_active:
            tenant.in_active = True
            heapq.heappush(self._active, (tenant.served, tenant.name))

    def _least_active(self) -> float | None:
        heap = self._active
        while heap:
            served, name = heap[0]
            tenant = self._tenants[name]
            if not tenant.alive:
                heapq.heappop(heap)
                tenant.in_active = False
            elif served < tenant.served:
                heapq.heapreplace(heap, (tenant.served, name))
            else:
                return served
        return None


QUEUE_POLICIES: dict[str, type[QueuePolicy]] = {
    policy.name: policy for policy in (FairQueue, FirstComeQueue, PriorityQueue)
}
