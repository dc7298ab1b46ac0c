"""Numbers in sentences of the log and of answers."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """``1 request``, ``2 requests``, ``0 requests``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
