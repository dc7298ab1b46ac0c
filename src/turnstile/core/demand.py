"""What each tenant asks for, a second: who of those not here yet will be served before a newcomer.

A fair queue lets the least served go first, whenever they come. A tenant that asks for less than
its share never waits long, and whoever waits behind a long queue of his own is overtaken by all
that it is still going to ask for. Rates are sums with exponential forgetting, over the time in
which they were gathered.
"""

from __future__ import annotations

import math

from turnstile.core.forecast import Ahead

MEMORY, SHORTEST = 30.0, 5.0
"""Seconds after which demand is forgotten to 1/e, and least seconds that a rate is taken over."""
MOST_TENANTS = 128
"""Who asked longest ago is left out, so that a prediction stays cheap."""


class Demand:
    """Samples, prompt tokens and expected outputs that one tenant has asked for lately."""

    __slots__ = ("_began", "_last", "_outputs", "_prompt_tokens", "_samples", "weight")

    def __init__(self, now: float) -> None:
        self.weight = 1.0
        self._began = self._last = now
        self._samples = self._prompt_tokens = self._outputs = 0.0

    def add(self, samples: int, prompt_tokens: int, outputs: float, now: float) -> None:
        """It asks for this now."""
        kept = self._kept(now)
        self._last = now
        self._samples = kept * self._samples + samples
        self._prompt_tokens = kept * self._prompt_tokens + prompt_tokens
        self._outputs = kept * self._outputs + outputs

    def rate(self, now: float) -> Ahead:
        """What it asks for in a second."""
        window = MEMORY * (1.0 - math.exp((self._began - now) / MEMORY))
        share = self._kept(now) / max(SHORTEST, window)
        return Ahead(share * self._samples, share * self._prompt_tokens, share * self._outputs)

    def _kept(self, now: float) -> float:
        return math.exp(min(0.0, self._last - now) / MEMORY)


class Demands:
    """The demand of every tenant heard of lately."""

    def __init__(self) -> None:
        self._of: dict[str, Demand] = {}
        self._now = 0.0
        self._rates: dict[str, Ahead] = {}
        """As of the last who asked; empty where they are to be computed."""

    def add(
        self, tenant: str, weight: float, samples: int, prompt: int, outputs: float, now: float
    ) -> None:
        """A tenant asks for something."""
        self._now = now
        self._rates.clear()
        demand = self._of.pop(tenant, None) or Demand(now)
        self._of[tenant] = demand
        demand.weight = weight
        demand.add(samples, prompt, outputs, now)
        while len(self._of) > MOST_TENANTS:
            del self._of[next(iter(self._of))]

    def any_but(self, tenant: str) -> bool:
        """Whether another tenant has been heard of lately."""
        return len(self._of) > (tenant in self._of)

    def of_others(self, tenant: str, seconds: float) -> dict[str, tuple[float, Ahead]]:
        """Weight of each other tenant, and what it will ask for in the next ``seconds`` if all go
        on as they did. O(tenants).
        """
        if not self._rates:
            self._rates = {name: demand.rate(self._now) for name, demand in self._of.items()}
        return {
            name: (self._of[name].weight, rate.scaled(seconds))
            for name, rate in self._rates.items()
            if name != tenant
        }
