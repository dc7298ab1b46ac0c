"""Every change the core makes, as small typed values.

Metrics, traces, ``/v1/requests``, the dashboard and the simulator's output are views of this one
stream. Times are seconds on the clock that was passed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum


class WaitReason(StrEnum):
    """Why a sequence is not running."""

    QUEUED = "queued"
    SLOTS = "slots"
    PAGES = "pages"
    TENANT_TURN = "tenant_turn"
    BEHIND_HEAD = "behind_head"
    PREFIX = "prefix"
    PREEMPTED = "preempted"


@dataclass(frozen=True, slots=True)
class Event:
    """Something happened to one sequence at ``time``."""

    time: float
    request_id: str
    index: int


@dataclass(frozen=True, slots=True)
class Queued(Event):
    """Entered the fair queue; ``tokens`` are what is to be computed before its first output."""

    tenant: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Waiting(Event):
    """The scheduler looked at it and could not start it."""

    reason: WaitReason


@dataclass(frozen=True, slots=True)
class Admitted(Event):
    """Got a slot. ``cached`` tokens came from the prefix cache, ``pages`` it holds already."""

    tenant: str
    cached: int
    pages: int
    waited: float


@dataclass(frozen=True, slots=True)
class Forked(Event):
    """A sibling of sample ``parent`` came to be; ``shared`` pages are held by both."""

    parent: int
    shared: int


@dataclass(frozen=True, slots=True)
class Decoding(Event):
    """It has caught up: its prompt, or what a preemption lost, is computed. From here on it gets
    one token a step. ``computed`` tokens are in its pages.
    """

    computed: int


@dataclass(frozen=True, slots=True)
class Preempted(Event):
    """Lost its slot and pages to another; ``lost`` computed tokens are to be done again."""

    lost: int
    times: int


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """Left for good."""

    tenant: str
    reason: str
    prompt_tokens: int
    output_tokens: int
    cached: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class Stepped:
    """A step was committed: how many tokens, sequences and draws, and how long it took."""

    time: float
    step: int
    tokens: int
    prefill_tokens: int
    sequences: int
    draws: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Repaired:
    """The books did not balance and were written anew: so many sequences that ran are computed
    again, the others keep ``pages`` pages.
    """

    time: float
    recomputed: int
    pages: int


AnyEvent = (
    Queued | Waiting | Admitted | Forked | Decoding | Preempted | Finished | Stepped | Repaired
)

Encoded = tuple[str, list[object]]
"""An event as it travels: its class's name and its fields, in order."""

_KINDS: dict[str, type[AnyEvent]] = {
    kind.__name__: kind
    for kind in (
        Queued,
        Waiting,
        Admitted,
        Forked,
        Decoding,
        Preempted,
        Finished,
        Stepped,
        Repaired,
    )
}

_FIELDS = {name: tuple(field.name for field in fields(kind)) for name, kind in _KINDS.items()}
"""Looked up once: there are several events a step."""


def encode(event: AnyEvent) -> Encoded:
    """Turn an event into plain values."""
    kind = type(event).__name__
    return kind, [getattr(event, name) for name in _FIELDS[kind]]


def decode(kind: str, values: Sequence[object]) -> AnyEvent | None:
    """Undo :func:`encode`; None for a kind or a shape that is not known here."""
    known = _KINDS.get(kind)
    if known is None or len(values) != len(_FIELDS[kind]):
        return None
    event: AnyEvent = known(*values)  # type: ignore[arg-type]
    if isinstance(event, Waiting):
        try:
            return replace(event, reason=WaitReason(event.reason))
        except ValueError:
            return None
    return event
