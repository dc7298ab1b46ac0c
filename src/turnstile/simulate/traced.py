"""What a server's ``--trace`` says of its steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

LABEL = "ts 0 is second "
"""Begins the label of a trace that says when its times begin, on ``time.monotonic``'s clock."""
_IDLE = 0.01
"""Seconds between two passes from which on nobody was there in between: it is no planning."""

Floats = NDArray[np.float64]


class TraceError(ValueError):
    """This trace does not tell what it should; the message says why."""


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of a server, in order.

    Attributes
    ----------
    ends
        When the pass of each was over, in seconds of the monotonic clock.
    passes
        Seconds that it took.
    draws
        Rows that drew a token.
    """

    ends: Floats
    passes: Floats
    draws: NDArray[np.int64]

    def between(self, begin: float, end: float) -> Steps:
        """Those that ended then."""
        kept = (self.ends >= begin) & (self.ends <= end)
        return Steps(self.ends[kept], self.passes[kept], self.draws[kept])

    @property
    def turns(self) -> Floats:
        """Seconds of each whole turn: from the end of the step before, or of the pass alone where
        nobody was there until it.
        """
        gaps = np.diff(self.ends, prepend=-np.inf)
        return np.where(gaps - self.passes > _IDLE, self.passes, gaps)


def read_steps(path: Path) -> Steps:
    """The steps that a trace has of a server.

    Raises
    ------
    TraceError
        It is no trace, or does not say when it began.
    """
    try:
        told = msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
    except (OSError, msgspec.MsgspecError) as error:
        raise TraceError(f"{path} is no trace: {error}") from None
    labels = [str(e["args"]["labels"]) for e in told if e["name"] == "process_labels"]
    began = next((float(text.removeprefix(LABEL)) for text in labels if LABEL in text), None)
    if began is None:
        raise TraceError(f"{path} does not say when it began.")
    steps = [(e["ts"] + e["dur"], e["dur"], e["args"]["draws"]) for e in told if "dur" in e]
    ends, passes, draws = np.asarray(sorted(steps), dtype=np.float64).reshape(-1, 3).T
    return Steps(began + ends / 1e6, passes / 1e6, draws.astype(np.int64))
