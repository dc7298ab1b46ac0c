"""Who must go when the pages run out."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from turnstile.core.fairness import QueuePolicy
from turnstile.core.request import Sequence

VictimPolicy = Callable[[Seq[Sequence], QueuePolicy, int], Sequence | None]
"""Given those running in order of admission, the queue and ``pin_after``: who must go, if any.

It may name the sequence that needs the page, which then waits itself. It is asked again until
there are enough pages, so it should spare the oldest: then somebody always progresses.
"""


def choose_victim(running: Seq[Sequence], queue: QueuePolicy, pin_after: int) -> Sequence | None:
    """The sequence whose pages and slot go to others; None if only the oldest runs.

    The lowest priority goes first, then the most-served tenant, then the least computed work
    lost, then the youngest. Never the oldest running, so that somebody always progresses; one
    that was preempted ``pin_after`` times only when there is nobody else.

    ``running`` is in order of admission. O(running), and only when pages run out.
    """
    candidates = running[1:]
    if not candidates:
        return None
    spared = [s for s in candidates if s.preemptions < pin_after]
    return max(
        spared or candidates,
        key=lambda s: (
            s.request.priority,
            queue.served(s.request.tenant),
            -s.computed,
            s.arrival_order,
        ),
    )


def choose_newest(running: Seq[Sequence], queue: QueuePolicy, pin_after: int) -> Sequence | None:
    """The one admitted last goes first, whoever it is: vLLM's first-come-first-served order."""
    return running[-1] if len(running) > 1 else None


PREEMPTION_POLICIES: dict[str, VictimPolicy] = {"fair": choose_victim, "newest": choose_newest}
