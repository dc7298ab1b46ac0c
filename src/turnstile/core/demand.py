"""What tenants ask for, a second: who of those not here yet will be served before a newcomer.

A fair queue lets the least served go first, whenever they come. A tenant that asks for less than
its share never waits long; a request behind a long queue of its own tenant is overtaken by all that
such a tenant is still going to ask for.
"""

from __future__ import annotations

import math

from turnstile.core.forecast import Ahead

MEMORY, SHORTEST = 30.0, 5.0
"""Seconds after which demand is forgotten to 1/e, and least seconds that a rate is taken over."""
MOST_TENANTS = 128
"""Who asked longest ago is left out, so that a prediction stays cheap."""
NOTHING = Ahead()


class Demand:
    """Work that each tenant asks for a second, as it did lately. All O(1), rescaling amortised."""

    def __init__(self) -> None:
        # Newer work weighs more, instead of all older work less: one addition for a request.
        self._asked: dict[str, Ahead] = {}
        self.weights: dict[str, float] = {}
        """Of those who have asked lately."""
        self._began: float | None = None
        self._weighed_at = 0.0
        self._now = 0.0

    def add(self, tenant: str, weight: float, work: Ahead, now: float) -> None:
        """A tenant asks for this."""
        if self._began is None:
            self._began = self._weighed_at = now
        self._now = max(self._now, now)
        if self._now - self._weighed_at > 10 * MEMORY:
            self._weigh_anew()
        work = work.scaled(self._weight)
        self._asked[tenant] = self._asked.pop(tenant, NOTHING) + work
        self.weights[tenant] = weight
        if len(self._asked) > MOST_TENANTS:
            silent = next(iter(self._asked))
            del self._asked[silent], self.weights[silent]

    def asked_by(self, tenant: str) -> Ahead:
        """What a tenant has asked for; times :attr:`scale` it is what it asks for in a second."""
        return self._asked.get(tenant, NOTHING)

    @property
    def scale(self) -> float:
        """Turns sums into rates."""
        began = self._now if self._began is None else self._began
        window = MEMORY * (1.0 - math.exp((began - self._now) / MEMORY))
        return 1.0 / (self._weight * max(SHORTEST, window))

    def others_ask(self, tenant: str) -> bool:
        """Whether any but this tenant has been heard of."""
        return len(self._asked) > (tenant in self._asked)

    @property
    def _weight(self) -> float:
        return math.exp((self._now - self._weighed_at) / MEMORY)

    def _weigh_anew(self) -> None:
        kept = math.exp((self._weighed_at - self._now) / MEMORY)  # 0 after a long silence
        self._asked = {tenant: work.scaled(kept) for tenant, work in self._asked.items()}
        self._weighed_at = self._now
