"""What is around the engine, measured: from the end of each step to its tokens at the clients.

The server's ``--trace`` says when each step ended, the load generator when each token came. Without
preemption an answer's tokens are of steps one after the other, so which step brought each can be
told; how much later they came, against how many came, is a :class:`Front`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from turnstile.core.cost import least_squares
from turnstile.simulate.setup import Front
from turnstile.simulate.traced import Floats, Steps

_FURTHEST = 64
"""Steps by which a first token may come later than the end of its own: no client is so slow."""
_ROUNDS, _CLOSE = 20, 1e-5
"""Of reweighting; and seconds below which an error is as good as none."""


class DeliveryError(ValueError):
    """The delivery cannot be told from this; the message says why."""


@dataclass(slots=True)
class _Arrivals:
    """What came of one step: how much later each token, and how many begin or end an answer."""

    delays: list[float] = field(default_factory=list)
    turning: int = 0


def fit_front(steps: Steps, answers: Seq[Seq[float]]) -> Front:
    """The front that delivers as was measured.

    The least sum of absolute errors over the steps, in the mean delay of each one's tokens: what
    came much later now and then, because the machine did something else, does not count more than
    that it was late.

    Parameters
    ----------
    answers
        When each token of each answer was with its client, on the clock of the steps.

    Raises
    ------
    DeliveryError
        Hardly any of the answers can be told to be of these steps.
    """
    arrivals, matched = _match(steps, answers)
    if matched < max(1, len(answers) // 2):
        raise DeliveryError(f"Only {matched} of {len(answers)} answers are of the traced steps.")
    delays = np.asarray([np.mean(a.delays) for a in arrivals.values()])
    rows = steps.draws[list(arrivals)]
    turning = np.asarray([a.turning for a in arrivals.values()])
    features = np.stack([np.ones(len(rows)), rows / 100.0, turning / 10.0], axis=1)
    weights = np.ones(len(rows))
    for _ in range(_ROUNDS):
        weighted = features * weights[:, None]
        found = least_squares(weighted.T @ features, weighted.T @ delays)
        weights = 1.0 / np.maximum(np.abs(delays - features @ found), _CLOSE)
    delivery, per_row, per_request = (found / [1.0, 100.0, 10.0]).tolist()
    return Front(per_request=per_request, delivery=delivery, per_row=per_row)


def _match(steps: Steps, answers: Seq[Seq[float]]) -> tuple[dict[int, _Arrivals], int]:
    """What came of each step, and how many answers that is from."""
    found: dict[int, _Arrivals] = defaultdict(_Arrivals)
    matched = 0
    for answer in answers:
        times = np.asarray(answer)
        first = _first_step(steps.ends, times)
        if first is None:
            continue
        matched += 1
        delays = times - steps.ends[first : first + len(times)]
        for number, delay in enumerate(delays.tolist()):
            arrivals = found[first + number]
            arrivals.delays.append(delay)
            arrivals.turning += number in (0, len(times) - 1)
    return found, matched


def _first_step(ends: Floats, times: Floats) -> int | None:
    """The latest step with which all tokens come after the step that they are of."""
    latest = min(int(np.searchsorted(ends, times[0])) - 1, len(ends) - len(times))
    for first in range(latest, max(-1, latest - _FURTHEST), -1):
        if (times >= ends[first : first + len(times)]).all():
            return first
    return None
