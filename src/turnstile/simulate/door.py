"""The server's own gate before a simulated machine: it refuses what the server would refuse."""

from __future__ import annotations

from collections.abc import Iterable

from turnstile.core.events import Admitted, AnyEvent
from turnstile.core.forecast import EngineView
from turnstile.core.gate import Gate, Place, Refused, Work
from turnstile.core.scheduler import Scheduler
from turnstile.simulate.load import Load


class Door:
    """Asks the gate for each request of a load, and tells it what becomes of them."""

    def __init__(self, gate: Gate, load: Load) -> None:
        self.gate = gate
        self._load = load
        self._places: dict[int, Place] = {}

    def enter(self, index: int, now: float) -> bool:
        """Whether the request is let in."""
        load, output = self._load, int(self._load.outputs[index])
        tenant = load.tenant(index)
        most = load.max_tokens or output
        work = Work(
            tenant=tenant.name,
            weight=tenant.weight,
            prompt_tokens=int(load.prompts[index]),
            max_tokens=most,
            # Without a stop token the length is known to the server too.
            min_tokens=0 if most > output else most,
        )
        try:
            [self._places[index]] = self.gate.enter([work], now)
        except Refused:
            return False
        return True

    def drew(self, index: int, now: float) -> None:
        """A request got a token."""
        self._places[index].first_token(now)

    def finish(self, index: int, now: float, outputs: int) -> None:
        """A request is over."""
        self._places.pop(index).leave(now, (outputs,))

    def stepped(self, scheduler: Scheduler, happened: Iterable[AnyEvent]) -> None:
        """A step has ended."""
        for event in happened:
            if isinstance(event, Admitted):
                place = self._places.get(int(event.request_id))
                if place is not None:
                    place.start(event.time)
        self.gate.learn(EngineView.of(scheduler))
