"""Figures of one repetition, with the definitions they follow.

TTFT
    from the moment a request was due (in a closed loop: was sent) to its first text.
TPOT
    per request: (last text − first text) / (output tokens − 1).
ITL
    every gap between two events with text, pooled over the requests.
E2E
    from the moment a request was due to the end of its answer.
Throughput
    all tokens seen in the window, also those of requests that did not end, over the window.

TTFT, TPOT, ITL and E2E are of completed requests only; mean and percentiles of one metric are
over the same samples. Percentiles interpolate linearly between ranks (numpy's default).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from turnstile.bench.drive import Run
from turnstile.bench.records import Record, read

PERCENTS = (50, 90, 99)
FEW = 100  # below so many samples the 99th percentile is little more than the maximum

METRICS = ("ttft", "tpot", "itl", "e2el")

Figures = dict[str, Any]


def distribution(samples: Iterable[float]) -> dict[str, float | int | None]:
    """Mean, percentiles and extremes in milliseconds of samples in seconds; None where empty."""
    values = np.fromiter(samples, dtype=np.float64) * 1000.0
    names = ["mean", *(f"p{p}" for p in PERCENTS), "min", "max"]
    if not len(values):
        return {"count": 0, **dict.fromkeys(names)}
    numbers = [values.mean(), *np.percentile(values, PERCENTS), values.min(), values.max()]
    figures = {n: float(v) for n, v in zip(names, numbers, strict=True)}
    return {"count": len(values), **figures}


def measure(run: Run) -> Figures:
    """All figures of one repetition, as they go into the JSON file."""
    return summarize([read(a, run.start) for a in run.attempts], run.end - run.start) | {
        "client_cpu_s": run.client_cpu
    }


def summarize(records: Sequence[Record], window: float) -> Figures:
    """The figures of these requests in a window of so many seconds."""
    done = [r for r in records if r.outcome == "completed"]
    output = sum(r.output_tokens for r in records)
    prompt = sum(r.prompt_tokens for r in records)
    outcomes = Counter(r.outcome for r in records)
    samples = {
        "ttft": [r.ttft for r in done if r.ttft is not None],
        "tpot": [r.tpot for r in done if r.tpot is not None],
        "itl": [gap for r in done for gap in r.gaps],
        "e2el": [r.e2e for r in done],
    }
    return {
        "duration_s": window,
        "completed": outcomes["completed"],
        "failed": outcomes["failed"],
        "incomplete": outcomes["incomplete"],
        "reasons": dict(Counter(r.reason for r in records if r.outcome == "failed").most_common()),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "request_throughput": _over(outcomes["completed"], window),
        "output_throughput": _over(output, window),
        "total_token_throughput": _over(output + prompt, window),
        "peak_concurrency": peak_concurrency(records),
        **{f"{name}_ms": distribution(values) for name, values in samples.items()},
        "lag_ms": distribution(r.sent - r.due for r in records),
        "warnings": warnings_of(records),
    }


def peak_concurrency(records: Sequence[Record]) -> int:
    """The most requests that were open at a time."""
    steps = sorted([(r.sent, 1) for r in records] + [(r.ended, -1) for r in records])
    return int(max(np.cumsum([change for _, change in steps]), default=0))


def warnings_of(records: Sequence[Record]) -> list[str]:
    """What a reader of the figures must know about how they came about."""
    found = []
    done = [r for r in records if r.outcome == "completed"]
    uncounted = sum(r.counted == "events" for r in done)
    if uncounted:
        found.append(f"{uncounted} answers came without usage: their events were counted as tokens")
    merged = [r for r in done if r.counted == "usage" and len(r.times) != r.output_tokens]
    if merged:
        events, tokens = sum(len(r.times) for r in merged), sum(r.output_tokens for r in merged)
        found.append(
            f"{len(merged)} answers brought {tokens} tokens in {events} events with text: "
            "ITL is between events, not tokens"
        )
    return found


def _over(amount: float, window: float) -> float:
    return amount / window if window > 0 else 0.0


def median_of(repetitions: Sequence[Figures]) -> Figures:
    """The median of every number over the repetitions, None where one repetition has none.

    Reasons and warnings are gathered.
    """
    merged: Figures = {}
    for name, first in repetitions[0].items():
        values = [r[name] for r in repetitions]
        if name == "reasons":
            merged[name] = dict(sum((Counter(v) for v in values), Counter[str]()))
        elif name == "warnings":
            merged[name] = list(dict.fromkeys(w for v in values for w in v))
        elif isinstance(first, dict):
            merged[name] = median_of(values)
        elif any(not isinstance(v, int | float) for v in values):
            merged[name] = None
        else:
            merged[name] = float(np.median(values))
    return merged
