"""Bounds on request bodies, checked before anything is parsed: :class:`BodyLimits`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from turnstile.server.errors import ApiError
from turnstile.server.http.turns import Turns


@dataclass(slots=True)
class BodyLimits:
    """How much of a body is taken, how slowly it may come, and how much all bodies may hold.

    Attributes
    ----------
    one
        Most bytes of a body.
    together
        Most bytes of all bodies that are being read at a moment.
    each
        Most of them of one tenant.
    seconds
        How long a client may take to send one.
    by_tenant
        Bytes of the bodies being read now.
    turns
        In which those that have come are parsed.
    """

    one: int
    together: int
    each: int
    seconds: float
    by_tenant: Counter[str] = field(default_factory=Counter)
    turns: Turns = field(default_factory=Turns)

    @property
    def held(self) -> int:
        """Bytes of all bodies being read now."""
        return self.by_tenant.total()

    def take(self, num_bytes: int, so_far: int, tenant: str) -> None:
        """Count a piece of a body of which ``so_far`` bytes are there. Raises :class:`ApiError`
        413, 503 where other clients' uploads have taken the memory, or 429 where the tenant's own
        have taken its part.
        """
        if so_far > self.one:
            raise too_large(self.one)
        if self.held + num_bytes > self.together:
            raise ApiError(
                503,
                "Too many large requests are being sent at once. Try again in a moment.",
                code="engine_overloaded",
                kind="overloaded",
                retry_after=1.0,
            )
        if self.by_tenant[tenant] + num_bytes > self.each:
            raise ApiError(
                429,
                f"{tenant} may send {self.each} bytes at once, and this request would be more. "
                "Try again in a moment.",
                code="rate_limit_exceeded",
                retry_after=1.0,
            )
        self.by_tenant[tenant] += num_bytes

    def give_back(self, num_bytes: int, tenant: str) -> None:
        """So much of the tenant's bodies is no longer in memory."""
        self.by_tenant[tenant] -= num_bytes
        if not self.by_tenant[tenant]:
            del self.by_tenant[tenant]


def too_large(limit: int) -> ApiError:
    """413. The connection stays open: closing it with data unread would reset it, and the client
    would see the reset instead of this answer. The server reads the rest and throws it away.
    """
    return ApiError(
        413,
        f"The request body is larger than {limit} bytes (--max-body-size).",
        code="request_too_large",
    )
