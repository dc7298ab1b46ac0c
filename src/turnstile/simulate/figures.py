"""The figures of a simulation, by the definitions and names of :mod:`turnstile.bench.metrics`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnstile.bench.metrics import PERCENTS, LimitsError, distribution
from turnstile.simulate.history import COMPLETED, FAILED, REFUSED, History
from turnstile.simulate.load import Load

Figures = dict[str, Any]
Floats = NDArray[np.float64]

LATENCIES = ("ttft", "tpot", "e2el", "norm")


@dataclass(frozen=True, slots=True)
class Limits:
    """What users are promised: limits of latencies in milliseconds, and for how many of them.

    ``share`` of the requests must keep every limit; refused and failed ones keep none.
    """

    milliseconds: Mapping[str, float]
    share: float = 0.99

    def __post_init__(self) -> None:
        for name, value in self.milliseconds.items():
            if name not in LATENCIES:
                raise LimitsError(
                    f"No limit {name!r} is known; write one of {', '.join(LATENCIES)}."
                )
            if not value > 0:
                raise LimitsError(f"The limit of {name} must be over 0 ms, not {value}.")
        if not 0 < self.share <= 1:
            raise LimitsError(f"The share of requests must be over 0 and at most 1: {self.share}.")


def measure(
    history: History, load: Load, num_pages: int, limits: Limits | None, machines: int = 1
) -> Figures:
    """All figures of a run that has ended."""
    status = np.frombuffer(history.status, dtype=np.uint8)
    done = status == COMPLETED
    times = latencies(history)
    tokens = _array(history.tokens)
    duration = float(history.end - np.nanmin(_array(history.due)))
    output, prompt = int(tokens.sum()), int(load.prompts[done].sum())
    figures: Figures = {
        "duration_s": duration,
        "requests": len(load),
        "completed": int(done.sum()),
        "failed": int((status == FAILED).sum()),
        "rejected": int((status == REFUSED).sum()),
        "prompt_tokens": prompt,
        "cached_tokens": int(_array(history.cached)[done].sum()),
        "output_tokens": output,
        "request_throughput": _over(int(done.sum()), duration),
        "output_throughput": _over(output, duration),
        "total_token_throughput": _over(output + prompt, duration),
    }
    for name in (*LATENCIES, "queue"):
        figures[f"{name}_ms"] = distribution(times[name][done & np.isfinite(times[name])])
    figures["itl_ms"] = weighted_distribution(
        _array(history.gaps) * 1000.0, _array(history.gap_counts)
    )
    figures["machine"] = {
        "steps": history.steps,
        "busy_ratio": _over(history.busy, duration * machines),
        "mean_batch": _over(history.row_seconds, history.busy),
        "peak_batch": history.peak_rows,
        "mean_page_use": _over(history.page_seconds, history.busy * num_pages),
        "peak_page_use": history.peak_pages / num_pages,
        "preemptions": history.preemptions,
    }
    if limits is not None:
        figures["goodput"] = goodput(times, done, duration, limits)
    return figures


def latencies(history: History) -> dict[str, Floats]:
    """Seconds per request; NaN where a request has no such latency."""
    due, first, last = (_array(a) for a in (history.due, history.first, history.last))
    ended, started, tokens = _array(history.ended), _array(history.started), _array(history.tokens)
    more = np.where(tokens > 1, tokens - 1, np.nan)
    return {
        "ttft": first - due,
        "tpot": (last - first) / more,
        "e2el": ended - due,
        "norm": (ended - due) / np.where(tokens > 0, tokens, np.nan),
        "queue": started - due,
    }


def goodput(
    times: Mapping[str, Floats], done: NDArray[Any], duration: float, limits: Limits
) -> Figures:
    """How many requests kept all limits; a latency that an answer of one token lacks is kept."""
    good = done.copy()
    for name, limit in limits.milliseconds.items():
        good &= ~(times[name] * 1000.0 > limit)
    count = int(good.sum())
    share = count / len(done)
    return {
        "limits_ms": dict(limits.milliseconds),
        "share": limits.share,
        "good": count,
        "attainment": share,
        "requests_per_s": _over(count, duration),
        "kept": share >= limits.share,
    }


def weighted_distribution(values: Floats, counts: NDArray[np.int64]) -> Figures:
    """:func:`turnstile.bench.metrics.distribution` of values that occur ``counts`` times."""
    names = ["mean", "std", *(f"p{p}" for p in PERCENTS), "min", "max"]
    if not len(values):
        return {"count": 0, **dict.fromkeys(names)}
    order = np.argsort(values, kind="stable")
    values, ends = values[order], np.cumsum(counts[order])
    total = int(ends[-1])
    mean = float(np.average(values, weights=counts[order]))
    std = float(np.sqrt(np.average((values - mean) ** 2, weights=counts[order])))
    ranks = np.asarray(PERCENTS) / 100.0 * (total - 1)
    low = values[np.searchsorted(ends, np.floor(ranks), side="right")]
    high = values[np.searchsorted(ends, np.ceil(ranks), side="right")]
    percentiles = low + (high - low) * (ranks - np.floor(ranks))
    numbers = [mean, std, *percentiles.tolist(), values[0], values[-1]]
    return {"count": total, **{n: float(v) for n, v in zip(names, numbers, strict=True)}}


def _array(values: Any) -> NDArray[Any]:
    return np.frombuffer(values, dtype=values.typecode)


def _over(amount: float, by: float) -> float:
    return amount / by if by > 0 else 0.0
