"""Bounds on request bodies, checked before anything is parsed: :class:`BodyLimits`."""

from __future__ import annotations

from dataclasses import dataclass

from turnstile.server.errors import ApiError


@dataclass(slots=True)
class BodyLimits:
    """How much of a body is taken, how slowly it may come, and how much all bodies may hold.

    Attributes
    ----------
    one
        Most bytes of a body.
    together
        Most bytes of all bodies that are being read at a moment.
    seconds
        How long a client may take to send one.
    held
        Bytes of the bodies being read now.
    """

    one: int
    together: int
    seconds: float
    held: int = 0

    def take(self, num_bytes: int, so_far: int) -> None:
        """Count a piece of a body of which ``so_far`` bytes are there. Raises :class:`ApiError`
        413, or 503 where other clients' uploads have taken the memory.
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
        self.held += num_bytes


def too_large(limit: int) -> ApiError:
    """413. The connection stays open: closing it with data unread would reset it, and the client
    would see the reset instead of this answer. The server reads the rest and throws it away.
    """
    return ApiError(
        413,
        f"The request body is larger than {limit} bytes (--max-body-size).",
        code="request_too_large",
    )
