"""How much a property test tries: :func:`examples`."""

from __future__ import annotations

from hypothesis import settings

_USUAL = 100
"""Hypothesis' own default, and that of the profile ``suite``."""


def examples(count: int) -> int:
    """So many in an ordinary run; in the proportion of its profile to the usual in another
    (``--hypothesis-profile=thorough``: ten times as many).
    """
    return max(1, count * settings().max_examples // _USUAL)
