"""Who killed the engine: suspects, trials, verdicts. Pure bookkeeping over request ids.

The rule, in full:

1. The engine dies. Those in its step are *suspects*; everybody is submitted again. A suspect that
   comes through ``CLEARING_STEPS`` steps is cleared: it got past the place where the engine died.
2. It dies again with suspects in the step. Half of them go on *trial*: they are submitted beside
   those that have proven harmless. The other suspects, and requests that never ran, are held back
   until all on trial are cleared (or gone); then the next half is tried.
3. It dies during a trial: the half on trial that was in the step is halved again.
4. A suspect that is alone on trial when the engine dies in its step, for the ``STRIKES``-th time
   with nothing computed between, is next submitted with nobody beside it: another may be guilty
   too. If the engine dies in a step of it alone, it is guilty. The trial of the others goes on.

Of suspects, those that never came through a step are tried first and apart from those that did:
a request that kills does so, most often, before its first token.

A death in nobody's step (idle, loading) makes no suspects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CLEARING_STEPS = 3
STRIKES = 3


@dataclass(frozen=True, slots=True)
class Member:
    """A request that was in the fatal step: see :class:`turnstile.engine.journal.Entry`."""

    request_id: str
    steps: int
    proven: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a death taught: who is guilty, if that is clear, and whether suspicion fell on fewer."""

    guilty: str | None = None
    narrowed: bool = False


class Quarantine:
    """See the module. ``strict`` while a trial is on: suspects and newcomers are held back."""

    def __init__(self) -> None:
        self.strict = False
        self._alone = False
        self._trial: dict[str, None] = {}
        self._held: list[list[str]] = []
        self._strikes: dict[str, int] = {}

    @property
    def active(self) -> bool:
        """Whether anybody is a suspect."""
        return bool(self._strikes)

    def is_suspect(self, request_id: str) -> bool:
        """Whether it was in a fatal step and has not come past it yet."""
        return request_id in self._strikes

    def admits(self, request_id: str, proven: bool) -> bool:
        """Whether a request may be in the engine now."""
        if not self.strict or request_id in self._trial:
            return True
        return not self._alone and proven and request_id not in self._strikes

    def died(self, members: Sequence[Member]) -> Verdict:
        """The engine died in a step of ``members`` (none: outside of steps)."""
        if not members:
            return Verdict()
        # A request that has come through many steps is less likely to be guilty. If all of them
        # have, nobody can be ruled out.
        young = [m for m in members if m.steps < CLEARING_STEPS] or list(members)
        again = [m for m in young if m.request_id in self._trial]
        if not again:
            return self._first_death(young)
        suspects = [m for m in young if m.request_id in self._trial or not m.proven]
        for member in suspects:
            self._strikes[member.request_id] = self._strikes.get(member.request_id, 0) + 1
        if len(suspects) == 1 and self._strikes[suspects[0].request_id] >= STRIKES:
            if len(members) > 1:
                self._try_alone(suspects[0].request_id)
                return Verdict(narrowed=True)
            self.left(suspects[0].request_id)
            return Verdict(suspects[0].request_id)
        narrowed = len(suspects) < len(self._trial) or len(suspects) > 1
        self.strict = True
        first, second = _halves(suspects)
        chosen = {m.request_id for m in suspects}
        absent = [request_id for request_id in self._trial if request_id not in chosen]
        if second or absent:
            self._held.append([*second, *absent])
        self._trial = dict.fromkeys(first)
        return Verdict(narrowed=narrowed)

    def _try_alone(self, request_id: str) -> None:
        absent = [other for other in self._trial if other != request_id]
        if absent:
            self._held.append(absent)
        self._trial = {request_id: None}
        self.strict = self._alone = True

    def _first_death(self, members: Sequence[Member]) -> Verdict:
        if self._trial:
            self._held.append(list(self._trial))
        self._trial = dict.fromkeys(m.request_id for m in members)
        for request_id in self._trial:
            self._strikes[request_id] = self._strikes.get(request_id, 0) + 1
        if self._held:
            self.strict = True
        return Verdict()

    def came_through(self, request_id: str, steps: int) -> bool:
        """A request has had ``steps`` steps from this engine. True if that cleared a suspect."""
        if steps < CLEARING_STEPS or request_id not in self._trial:
            return False
        self.left(request_id)
        return True

    def left(self, request_id: str) -> None:
        """A request has ended, or is no suspect any more."""
        if self._strikes.pop(request_id, None) is None:
            return
        self._trial.pop(request_id, None)
        for group in self._held:
            if request_id in group:
                group.remove(request_id)
        if not self._trial:
            self._alone = False
        while not self._trial and self._held:
            self._trial = dict.fromkeys(self._held.pop())
        if not self._trial:
            self.strict = False


def _halves(suspects: Sequence[Member]) -> tuple[list[str], list[str]]:
    """The unproven and the proven, or where all are alike the two halves of them."""
    first = [m.request_id for m in suspects if not m.proven]
    second = [m.request_id for m in suspects if m.proven]
    if not first or not second:
        everyone = [m.request_id for m in suspects]
        middle = (len(everyone) + 1) // 2
        first, second = everyone[:middle], everyone[middle:]
    return first, second
