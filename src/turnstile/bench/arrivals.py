"""When requests are meant to arrive.

In an open loop the arrivals do not wait for answers, as in production: a slow server then meets a
growing crowd, and the wait counts from the moment a request was *scheduled* to arrive. (A closed
loop hides that: its users politely stop asking while the server is slow.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A number of users, each of whom asks again as soon as the answer is complete.

    Parameters
    ----------
    users
        How many.
    ramp_s
        The users come one after another over this many seconds, evenly.
    """

    users: int
    ramp_s: float = 0.0

    def __post_init__(self) -> None:
        if self.users < 1:
            raise ValueError(f"a closed loop needs at least one user, got {self.users}")
        if self.ramp_s < 0:
            raise ValueError("the ramp must not be negative")


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
        if any(b < a for a, b in zip(self.times, self.times[1:], strict=False)):
            raise ValueError("arrival times must not fall")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ValueError("max_concurrency must be at least 1")


Arrivals = ClosedLoop | OpenLoop


def all_at_once(count: int) -> Seconds:
    """Every request at time 0."""
    return np.zeros(count)


def constant(rate: float, count: int) -> Seconds:
    """Arrivals 1/`rate` seconds apart, the first at 0."""
    _check_rate(rate)
    return np.arange(count) / rate


def gamma(rate: float, count: int, burstiness: float, rng: np.random.Generator) -> Seconds:
    """Arrivals with gamma-distributed gaps of mean 1/`rate`, the first after one gap.

    Parameters
    ----------
    burstiness
        Shape of the gamma distribution: 1 is a Poisson process, less comes in bursts, more comes
        regularly. The squared coefficient of variation of the gaps is 1/`burstiness`.
    """
    _check_rate(rate)
    if burstiness <= 0:
        raise ValueError(f"burstiness must be over 0, got {burstiness}")
    gaps = rng.gamma(burstiness, 1.0 / (rate * burstiness), count)
    return np.cumsum(gaps)


def poisson(rate: float, count: int, rng: np.random.Generator) -> Seconds:
    """Arrivals with independent exponential gaps of mean 1/`rate`, the first after one gap."""
    return gamma(rate, count, 1.0, rng)


def ramp(
    times: Seconds,
    rate: float,
    start: float,
    end: float,
    strategy: Literal["linear", "exponential"] = "linear",
) -> Seconds:
    """Bend arrivals of a constant mean rate so that the rate moves from `start` to `end`.

    The k-th arrival of the unit process keeps its place in units of expected arrivals: with the
    intensity r(t), an arrival at cumulated intensity u is moved to the t with ∫r = u (time change
    of a point process). The end rate is reached with the last arrival and would then stay.

    Parameters
    ----------
    times
        Arrivals drawn at the mean rate `rate` (1/s).
    """
    for value in (rate, start, end):
        _check_rate(value)
    if len(times) == 0:
        return times
    expected = times * rate
    total = float(expected[-1])
    if total <= 0 or math.isclose(start, end):
        return expected / start
    if strategy == "linear":
        # r(t) = start + s·t with s chosen so that r is `end` where the integral is `total`
        slope = (end**2 - start**2) / (2.0 * total)
        return np.asarray((np.sqrt(start**2 + 2.0 * slope * expected) - start) / slope)
    # r(t) = start·e^{gt}; the integral is (r − start)/g, hence g = (end − start)/total
    growth = (end - start) / total
    return np.asarray(np.log1p(growth * expected / start) / growth)


def _check_rate(rate: float) -> None:
    if not (rate > 0 and math.isfinite(rate)):
        raise ValueError(f"a rate must be over 0 and finite, got {rate}")
