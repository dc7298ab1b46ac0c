"""The door: who may queue, and what the others are told. :class:`StaticGate` bounds the queue.

A place is reserved at the check itself, so that a burst cannot slip through between looking and
entering, and prompts of one request enter together or not at all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from turnstile.server.errors import ApiError


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one prompt will cost: tokens to compute, samples, and the most each may grow."""

    tenant: str
    prompt_tokens: int
    max_tokens: int
    n: int = 1


class Place:
    """A place in the queue, from acceptance until the prompt's last sample ends."""

    __slots__ = ("_gate", "left", "started", "work")

    def __init__(self, gate: Gate, work: Work) -> None:
        self._gate = gate
        self.work = work
        self.started = False
        self.left = False

    def start(self, now: float) -> None:
        """It got a slot. May be said again."""
        if not self.started and not self.left:
            self.started = True
            self._gate.on_start(self, now)

    def leave(self, now: float) -> None:
        """It ended, however. May be said again."""
        if not self.left:
            self.left = True
            self._gate.on_leave(self, now)


class Gate(ABC):
    """Decides at the door. Time is ``time.monotonic()`` and passed in."""

    @abstractmethod
    def enter(self, works: Sequence[Work], now: float) -> list[Place]:
        """Reserve a place for each, or raise :class:`ApiError` (503, 429) and reserve none."""

    @abstractmethod
    def on_start(self, place: Place, now: float) -> None:
        """Note that a place's work got its slot."""

    @abstractmethod
    def on_leave(self, place: Place, now: float) -> None:
        """Note that a place is free again."""

    @abstractmethod
    def rejections(self) -> dict[str, int]:
        """Requests refused so far, by reason."""


class StaticGate(Gate):
    """Bounds on waiting requests and waiting prompt tokens.

    Work that finds a free slot does not count as waiting, so a bound of 0 still serves.

    Parameters
    ----------
    slots
        Sequences the engine runs at once.
    max_requests, max_tokens
        The bounds; None for none.
    """

    REASONS = ("max_num_queued_reqs", "max_num_queued_tokens")
    _SMOOTHING = 0.2
    _RETRY_RANGE = (1.0, 60.0)

    def __init__(self, slots: int, max_requests: int | None, max_tokens: int | None) -> None:
        self._slots = slots
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._running = 0
        self._waiting = 0
        self._waiting_tokens = 0
        self._rejections = dict.fromkeys(self.REASONS, 0)
        self._last_start: float | None = None
        self._seconds_per_start = 1.0

    def enter(self, works: Sequence[Work], now: float) -> list[Place]:
        """Reserve places for all of ``works`` or none."""
        tokens = sum(work.prompt_tokens for work in works)
        free = max(0, self._slots - self._running)
        if self._max_requests is not None:
            room = self._max_requests + free - self._waiting
            if len(works) > room:
                ever = len(works) <= self._max_requests + self._slots
                raise self._refusal("max_num_queued_reqs", self._max_requests, ever)
        bound = self._max_tokens
        queues = self._waiting + len(works) > free
        if bound is not None and queues and self._waiting_tokens + tokens > bound:
            ever = len(works) <= self._slots or tokens <= bound
            raise self._refusal("max_num_queued_tokens", bound, ever)
        self._waiting += len(works)
        self._waiting_tokens += tokens
        return [Place(self, work) for work in works]

    def _refusal(self, reason: str, bound: int, ever: bool) -> ApiError:
        self._rejections[reason] += 1
        low, high = self._RETRY_RANGE
        wait = min(high, max(low, self._seconds_per_start * max(1, self._waiting) / 2))
        return ApiError(
            503,
            f"The queue is full ({self._waiting} requests and {self._waiting_tokens} prompt tokens "
            f"wait; {reason} is {bound}). Try again later."
            if ever
            else f"The request alone is more than the queue holds ({reason} is {bound}). "
            "Split it into smaller ones.",
            code="engine_overloaded",
            kind="overloaded",
            retry_after=wait if ever else None,
        )

    def on_start(self, place: Place, now: float) -> None:
        """Move a place from waiting to running, and learn how often that happens."""
        self._waiting -= 1
        self._waiting_tokens -= place.work.prompt_tokens
        self._running += place.work.n
        if self._last_start is not None:
            gap = now - self._last_start
            self._seconds_per_start += self._SMOOTHING * (gap - self._seconds_per_start)
        self._last_start = now

    def on_leave(self, place: Place, now: float) -> None:
        """Free the place."""
        if place.started:
            self._running -= place.work.n
        else:
            self._waiting -= 1
            self._waiting_tokens -= place.work.prompt_tokens

    def rejections(self) -> dict[str, int]:
        """Refused requests by the bound they met."""
        return dict(self._rejections)

    @property
    def load(self) -> int:
        """Requests inside, waiting or running (each sample that runs counts)."""
        return self._waiting + self._running
