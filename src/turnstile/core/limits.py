"""What one tenant may use: :class:`TenantLimits`, and the :class:`Meter` that keeps count.

Token buckets that hold one minute's worth and fill evenly. Tokens are reserved at the door by
expectation (the prompt, and outputs as long as the tenant's usually are) and settled at the end by
what was really computed, so that nobody pays for a ``max_tokens`` that was never drawn; a bucket
may go below zero that way, and is then filled up first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

MINUTE = 60.0
CONCURRENT = "max_concurrent"
TOKENS = "tokens_per_minute"
REQUESTS = "requests_per_minute"
_MAX_PROMISES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """Bounds of one tenant; None for none.

    Attributes
    ----------
    max_concurrent
        Samples inside at once, waiting or running (prompts times ``n``).
    tokens_per_minute
        Prompt and output tokens.
    requests_per_minute
        HTTP requests, however many prompts they have.
    """

    max_concurrent: int | None = None
    tokens_per_minute: int | None = None
    requests_per_minute: int | None = None

    @property
    def any(self) -> bool:
        """Whether anything is limited."""
        return self != NO_LIMITS


NO_LIMITS = TenantLimits()


class Bucket:
    """Holds ``limit`` at most, fills by ``limit`` a minute."""

    __slots__ = ("_level", "_time", "limit")

    def __init__(self, limit: int, now: float) -> None:
        self.limit = limit
        self._level = float(limit)
        self._time = now

    def level(self, now: float) -> float:
        """What may be taken now; negative where more was used than expected."""
        filled = self._level + max(0.0, now - self._time) * self.limit / MINUTE
        return min(float(self.limit), filled)

    def take(self, amount: float, now: float) -> None:
        """Take ``amount``, or give back a negative one."""
        self._level = min(float(self.limit), self.level(now) - amount)
        self._time = max(now, self._time)

    def seconds_until(self, amount: float, now: float) -> float:
        """When ``amount`` will be there, 0 if it is; more than the bucket holds takes longer."""
        return max(0.0, amount - self.level(now)) * MINUTE / self.limit


@dataclass(frozen=True, slots=True)
class Allowance:
    """One limit as clients are told it: its size, what is left, seconds until it is whole."""

    limit: int
    remaining: int
    reset: float

    @classmethod
    def of(cls, bucket: Bucket, now: float) -> Allowance:
        """The state of a bucket."""
        remaining = max(0, int(bucket.level(now)))
        return cls(bucket.limit, remaining, bucket.seconds_until(bucket.limit, now))


@dataclass(frozen=True, slots=True)
class Excess:
    """The limit a request meets, and in how many seconds it would not; None: never."""

    reason: str
    bound: int
    seconds: float | None


class Meter:
    """What one tenant uses. New limits keep what is inside and start with full buckets."""

    def __init__(self, limits: TenantLimits, now: float) -> None:
        self.concurrent = 0
        self._promises: tuple[list[tuple[float, float]], ...] = ([], [])
        self.limits = TenantLimits()
        self.tokens: Bucket | None = None
        self.requests: Bucket | None = None
        self.set_limits(limits, now)

    def set_limits(self, limits: TenantLimits, now: float) -> None:
        """Other limits from now on."""
        if limits == self.limits:
            return
        if limits.tokens_per_minute != self.limits.tokens_per_minute:
            bound = limits.tokens_per_minute
            self.tokens = None if bound is None else Bucket(bound, now)
        if limits.requests_per_minute != self.limits.requests_per_minute:
            bound = limits.requests_per_minute
            self.requests = None if bound is None else Bucket(bound, now)
        self.limits = limits

    def enter(self, tokens: Sequence[float], samples: int, now: float) -> list[float]:
        """A request enters, with ``tokens`` for each of its prompts. Returns what was reserved."""
        self.concurrent += samples
        if self.requests is not None:
            self.requests.take(1, now)
        if self.tokens is None:
            return [0.0] * len(tokens)
        # One that expects more than a minute holds takes a full minute, and the rest at its end.
        share = min(1.0, self.tokens.limit / max(1.0, sum(tokens)))
        reserved = [share * each for each in tokens]
        self.tokens.take(sum(reserved), now)
        return reserved

    def leave(self, samples: int, reserved: float, used: float, now: float) -> None:
        """A prompt of it has ended, for which ``used`` tokens were computed."""
        self.concurrent -= samples
        if self.tokens is not None:
            self.tokens.take(used - reserved, now)

    def exceeded(
        self, prompt_tokens: int, tokens: float, samples: int, now: float
    ) -> Excess | None:
        """Which limit a request of this size meets now, if any; nothing is taken."""
        limits = self.limits
        bound = limits.max_concurrent
        if bound is not None and self.concurrent + samples > bound:
            return Excess(CONCURRENT, bound, None if samples > bound else 0.0)
        if self.requests is not None and self.requests.level(now) < 1:
            return Excess(REQUESTS, self.requests.limit, self._promise(self.requests, 1, now))
        if self.tokens is None:
            return None
        bound = self.tokens.limit
        if prompt_tokens > bound:
            return Excess(TOKENS, bound, None)
        amount = min(tokens, float(bound))
        if self.tokens.level(now) < amount:
            return Excess(TOKENS, bound, self._promise(self.tokens, amount, now))
        return None

    def _promise(self, bucket: Bucket, amount: float, now: float) -> float:
        """When to come back for ``amount``, after all those who were told so before."""
        promises = self._promises[bucket is self.tokens]
        while promises and promises[0][0] <= now:
            heapq.heappop(promises)
        before = sum(promised for _, promised in promises)
        seconds = bucket.seconds_until(before + amount, now)
        if len(promises) < _MAX_PROMISES:
            heapq.heappush(promises, (now + seconds, amount))
        return seconds


__all__ = ["NO_LIMITS", "Allowance", "Bucket", "Meter", "TenantLimits"]
