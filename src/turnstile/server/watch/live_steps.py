"""The last steps, and who came and went in them: :class:`StepTape`, another view of the events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from turnstile.core import events
from turnstile.core.events import AnyEvent, decode
from turnstile.engine.protocol import StepResult
from turnstile.server.watch.live_view import Told, Viewer

STEPS, HAPPENINGS = 64, 32
"""How many are kept for whoever comes to look."""


class StepTape:
    """What steps did while somebody watched.

    Parameters
    ----------
    who
        From an engine request id to the id its client knows, and its tenant.

    Attributes
    ----------
    version
        To be set by the owner: what is noted from now on belongs to it.
    """

    def __init__(self, who: Callable[[str], tuple[str, str]]) -> None:
        self.version = 0
        self._who = who
        self._steps: deque[tuple[int, Told]] = deque(maxlen=STEPS)
        self._happenings: deque[tuple[int, str | None, Told]] = deque(maxlen=HAPPENINGS)
        self._draft_tokens: int | None = None
        self._counts = {"entered": 0, "left": 0, "preempted": 0}
        self._preempted: deque[float] = deque(maxlen=1000)

    def hear(self, result: StepResult) -> None:
        """Take a step's message."""
        drafts, before = result.snapshot.draft_tokens, self._draft_tokens
        self._draft_tokens = drafts
        for kind, fields in result.events:
            event = decode(kind, fields)
            if isinstance(event, events.Stepped):
                self._stepped(event, max(0, drafts - before) if before is not None else 0)
            elif event is not None:
                self._happened(event)

    def engine_lost(self, now: float) -> None:
        """The engine is gone: what it had counted starts anew with the next one."""
        self._draft_tokens = 0
        self._note(now, "engine_lost", None, {})

    def preemptions_since(self, moment: float) -> int:
        """Preemptions after ``moment``, as far back as is known."""
        return sum(at >= moment for at in self._preempted)

    def told(self, viewer: Viewer, versions: range) -> Told:
        """What was noted in these versions."""
        return {
            "steps": [step for version, step in self._steps if version in versions],
            "happened": [
                happening if tenant is None or viewer.sees(tenant) else _anonymous(happening)
                for version, tenant, happening in self._happenings
                if version in versions
            ],
        }

    def _stepped(self, event: events.Stepped, drafts: int) -> None:
        drafts = min(drafts, event.tokens - event.prefill_tokens)
        step: Told = {
            "step": event.step,
            "seconds": round(event.seconds, 6),
            "prefill": event.prefill_tokens,
            "decode": event.tokens - event.prefill_tokens - drafts,
            "drafts": drafts,
            "sequences": event.sequences,
            **self._counts,
        }
        self._counts = dict.fromkeys(self._counts, 0)
        self._steps.append((self.version, step))

    def _happened(self, event: AnyEvent) -> None:
        match event:
            case events.Admitted():
                self._counts["entered"] += 1
                self._of(event, "entered", {"cached": event.cached, "waited": event.waited})
            case events.Preempted():
                self._counts["preempted"] += 1
                self._preempted.append(event.time)
                self._of(event, "preempted", {"lost": event.lost})
            case events.Finished():
                self._counts["left"] += 1
                self._of(event, "left", {"why": event.reason, "tokens": event.output_tokens})
            case events.Repaired():
                self._note(event.time, "repaired", None, {"recomputed": event.recomputed})

    def _of(self, event: events.Event, what: str, details: Told) -> None:
        name, tenant = self._who(event.request_id)
        who = {"id": name, "sample": event.index, "tenant": tenant}
        self._note(event.time, what, tenant, {**who, **details})

    def _note(self, now: float, what: str, tenant: str | None, details: Told) -> None:
        self._happenings.append((self.version, tenant, {"time": now, "what": what, **details}))


def _anonymous(happening: Told) -> Told:
    """Somebody else's: that it happened, and when."""
    return {"time": happening["time"], "what": happening["what"]}
