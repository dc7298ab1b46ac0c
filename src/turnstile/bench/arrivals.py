"""When requests are meant to arrive.

In an open loop the arrivals do not wait for answers, as in production: a slow server then meets a
growing crowd, and the wait counts from the moment a request was *scheduled* to arrive. (A closed
loop hides that: its users politely stop asking while the server is slow.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]


class ArrivalError(ValueError):
    """Requests cannot come like this; the message says why."""


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A number of users, each of whom asks again as soon as the answer is complete.

    Parameters
    ----------
    users
        How many.
    """

    users: int

    def __post_init__(self) -> None:
        if self.users < 1:
            raise ArrivalError(f"a closed loop needs at least one user, got {self.users}")


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Arrivals at given moments, whatever the server does.

    Parameters
    ----------
    times
        Seconds after the start, never falling.
    max_concurrency
        At most this many requests at a time; an arrival over it waits in the generator, and the
        wait counts. None for no limit.
    """

    times: tuple[float, ...]
    max_concurrency: int | None = None

    def __post_init__(self) -> None:
        if any(later < earlier for earlier, later in pairwise(self.times)):
            raise ArrivalError("arrival times must not fall")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ArrivalError(
                f"at least one request must be open at a time, got {self.max_concurrency}"
            )


Arrivals = ClosedLoop | OpenLoop


def all_at_once(count: int) -> Seconds:
    """Every request at time 0."""
    return np.zeros(count)


def gamma(rate: float, count: int, burstiness: float, rng: np.random.Generator) -> Seconds:
    """Arrivals with gamma-distributed gaps of mean 1/`rate`, the first after one gap.

    Parameters
    ----------
    burstiness
        Shape of the gamma distribution: 1 is a Poisson process, less comes in bursts, more comes
        regularly. The squared coefficient of variation of the gaps is 1/`burstiness`.
    """
    check_gaps(rate, burstiness)
    gaps = rng.gamma(burstiness, 1.0 / (rate * burstiness), count)
    return np.cumsum(gaps)


@dataclass(frozen=True, slots=True)
class Ramp:
    """An open loop whose rate moves over time.

    Parameters
    ----------
    strategy
        Whether the rate moves linearly or exponentially in time. (vLLM's flags of this name move
        it over the number of requests sent.)
    start, end
        Arrivals per second at the beginning and at the last request.
    """

    strategy: Literal["linear", "exponential"]
    start: float
    end: float

    def __post_init__(self) -> None:
        check_gaps(self.start)
        check_gaps(self.end)

    def bend(self, times: Seconds) -> Seconds:
        """Bend arrivals of mean rate 1/s.

        The k-th arrival keeps its place in units of expected arrivals: with the intensity r(t), an
        arrival at cumulated intensity u is moved to the t with ∫r = u (time change of a point
        process).
        """
        if len(times) == 0:
            return times
        total = float(times[-1])
        if total <= 0 or math.isclose(self.start, self.end):
            return times / self.start
        if self.strategy == "linear":
            # r(t) = start + s·t with s chosen so that r is `end` where the integral is `total`
            slope = (self.end**2 - self.start**2) / (2.0 * total)
            root = np.sqrt(self.start**2 + 2.0 * slope * times)
            return np.asarray((root - self.start) / slope)
        # r(t) = start·e^{gt}; the integral is (r − start)/g, hence g = (end − start)/total
        growth = (self.end - self.start) / total
        return np.asarray(np.log1p(growth * times / self.start) / growth)


def check_gaps(rate: float, burstiness: float = 1.0) -> None:
    """Raise :class:`ArrivalError` unless gaps of this rate and shape can be drawn."""
    if not (rate > 0 and math.isfinite(rate)):
        raise ArrivalError(f"a rate must be over 0 and finite, got {rate:g} a second")
    if not (burstiness > 0 and math.isfinite(burstiness)):
        raise ArrivalError(f"burstiness must be over 0 and finite, got {burstiness:g}")
