"""What tenants were served, remembered outside of the engine that serves them.

An engine that dies takes the virtual token counters of its fair queue along. Those of tenants with
something in flight are in its last snapshot; a tenant that had just gone away would come back
without its lead over the others (or its debt), so each counter is kept as it was last heard of.
"""

from __future__ import annotations

from turnstile.engine.protocol import Resume, Snapshot

MOST_TENANTS = 4096


class Accounts:
    """The last known counter of each tenant, for at most ``limit`` tenants.

    Beyond that, the tenant that was silent longest is forgotten. When it comes back it counts as
    new, and is lifted to the least counter among active tenants.
    """

    def __init__(self, limit: int = MOST_TENANTS) -> None:
        self.limit = limit
        self._counters: dict[str, float] = {}
        self._level = 0.0

    def hear(self, snapshot: Snapshot) -> None:
        """Take down what a step says. O(tenants active)."""
        self._level = snapshot.tenant_level
        for told in (snapshot.departed, snapshot.tenants):
            for tenant, counter in told.items():
                self._counters.pop(tenant, None)
                self._counters[tenant] = counter
        while len(self._counters) > self.limit:
            del self._counters[next(iter(self._counters))]

    def resume(self) -> Resume:
        """What to tell a new engine before anybody is submitted to it."""
        return Resume(dict(self._counters), self._level)
