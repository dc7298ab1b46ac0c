"""How many tokens each prompt and each answer has: distributions of whole token counts."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.int64]


class LengthError(ValueError):
    """No such lengths can be drawn; the message says why."""


class LengthDistribution(Protocol):
    """Something that draws token counts."""

    def draw(self, count: int, rng: np.random.Generator) -> Lengths:
        """Return `count` token counts, each at least 1."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same number of tokens."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise LengthError(f"a length must be at least 1 token, got {self.tokens}")

    def draw(self, count: int, rng: np.random.Generator) -> Lengths:
        """Return `count` times the same length; the generator is left untouched."""
        return np.full(count, self.tokens, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Any number of tokens from `low` to `high`, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise LengthError(
                f"a uniform length needs 1 <= low <= high, got {self.low}…{self.high}"
            )

    def draw(self, count: int, rng: np.random.Generator) -> Lengths:
        """Return `count` independent lengths."""
        return rng.integers(self.low, self.high, size=count, endpoint=True, dtype=np.int64)


def around(tokens: int, ratio: float) -> LengthDistribution:
    """Lengths between (1 − ratio) and (1 + ratio) times `tokens`, as vLLM's random dataset has.

    Raises
    ------
    ValueError
        Unless 0 ≤ ratio < 1.
    """
    if not 0 <= ratio < 1:
        raise LengthError(f"--random-range-ratio must be at least 0 and below 1, got {ratio}")
    if ratio == 0:
        return Fixed(tokens)
    return Uniform(max(1, math.floor(tokens * (1 - ratio))), math.ceil(tokens * (1 + ratio)))


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Lengths whose logarithm is normal: many short, few long, as in chat traffic.

    Parameters
    ----------
    median
        Median in tokens.
    sigma
        Standard deviation of the natural logarithm.
    low, high
        Bounds in tokens; draws outside are moved to the bound.
    """

    median: float
    sigma: float
    low: int = 1
    high: int = 2**31 - 1

    def __post_init__(self) -> None:
        # Written so that NaN fails too: it would be drawn as the least 64-bit integer.
        if not 0 < self.median < math.inf or not 0 <= self.sigma < math.inf:
            raise LengthError("a lognormal length needs median > 0 and sigma >= 0, both finite")
        if not 1 <= self.low <= self.high:
            raise LengthError(f"bounds need 1 <= low <= high, got {self.low}…{self.high}")

    def draw(self, count: int, rng: np.random.Generator) -> Lengths:
        """Return `count` independent lengths, rounded to whole tokens, then bounded."""
        drawn = rng.lognormal(math.log(self.median), self.sigma, count)
        return np.clip(np.round(drawn), self.low, self.high).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """The inverse of a distribution function known at a few knots.

    Between two knots the logarithm of the length is linear in the probability, so that long
    tails keep their shape. Knots may repeat a value (an atom of the distribution).

    Parameters
    ----------
    percents
        Strictly rising, from 0 to 100.
    values
        Token counts at these percents, never falling, all positive.
    cap
        Longest length to return, for servers with a short context; None for no cap.
    """

    percents: tuple[float, ...]
    values: tuple[float, ...]
    cap: int | None = None

    def __post_init__(self) -> None:
        percents, values = np.asarray(self.percents), np.asarray(self.values)
        if len(percents) != len(values) or len(percents) < 2:
            raise LengthError("quantiles need as many values as percents, and at least two")
        if percents[0] != 0 or percents[-1] != 100 or np.any(np.diff(percents) <= 0):
            raise LengthError("the percents of quantiles must rise from 0 to 100")
        if values[0] <= 0 or np.any(np.diff(values) < 0):
            raise LengthError("the values of quantiles must be positive and never fall")

    def at(self, probability: NDArray[np.float64]) -> NDArray[np.float64]:
        """Evaluate the inverse distribution function at probabilities in 0…1; any shape."""
        logs = np.interp(probability * 100.0, self.percents, np.log(self.values))
        return np.asarray(np.exp(logs), dtype=np.float64)

    def draw(self, count: int, rng: np.random.Generator) -> Lengths:
        """Return `count` independent lengths, rounded to whole tokens."""
        lengths = np.maximum(np.round(self.at(rng.random(count))), 1.0)
        if self.cap is not None:
            lengths = np.minimum(lengths, self.cap)
        return lengths.astype(np.int64)


@cache
def _trace_file() -> dict[str, object]:
    text = resources.files(__package__).joinpath("data/trace_quantiles.json").read_text("utf-8")
    loaded: dict[str, object] = json.loads(text)
    return loaded


def trace_names() -> tuple[str, ...]:
    """Names of the traces whose lengths are known."""
    traces = _trace_file()["traces"]
    assert isinstance(traces, dict)
    return tuple(traces)


def trace_lengths(name: str, cap: int | None = None) -> tuple[Quantiles, Quantiles]:
    """Prompt and output lengths of a named public trace.

    Prompt and output are drawn independently of each other, as the knots do not tell how they
    go together (their measured correlations are small but for the summarisation trace).

    Raises
    ------
    ValueError
        If there is no trace of that name.
    """
    content = _trace_file()
    traces, percents = content["traces"], content["quantiles_pct"]
    assert isinstance(traces, dict)
    assert isinstance(percents, list)
    if name not in traces:
        raise LengthError(f"no trace named {name!r}; known are {', '.join(traces)}")
    knots = tuple(float(p) for p in percents)
    trace = traces[name]
    return (
        Quantiles(knots, tuple(trace["prompt_q"]), cap),
        Quantiles(knots, tuple(trace["output_q"]), cap),
    )


def parse_lengths(text: str) -> LengthDistribution:
    """Read a distribution from a word on the command line.

    Accepted: `128` (fixed), `16-64` (uniform), `lognormal:96:0.8:16:768` (median, sigma and
    optional bounds), `azure_conv_2023:prompt` or `azure_conv_2023:output` (a trace).

    Raises
    ------
    ValueError
        If the word is none of these.
    """
    head, *rest = text.strip().split(":")
    try:
        if head == "lognormal" and 2 <= len(rest) <= 4:
            bounds = [int(part) for part in rest[2:]]
            return Lognormal(float(rest[0]), float(rest[1]), *bounds)
        if not rest and "-" in head:
            low, high = head.split("-")
            return Uniform(int(low), int(high))
        if not rest:
            return Fixed(int(head))
    except LengthError as error:
        raise LengthError(f"{text!r} is not a length: {error}") from None
    except (TypeError, ValueError):
        pass  # no numbers where they should be
    if len(rest) == 1 and rest[0] in ("prompt", "output"):
        return trace_lengths(head)[rest[0] == "output"]
    raise LengthError(
        f"{text!r} is not a length; write 128, 16-64, lognormal:MEDIAN:SIGMA[:LOW:HIGH] "
        "or TRACE:prompt, TRACE:output"
    )
