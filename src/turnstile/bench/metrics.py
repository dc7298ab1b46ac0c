"""Figures of one repetition, with the definitions they follow.

TTFT
    from the moment a request was due (in a closed loop: was sent) to its first text.
TPOT
    per request: (last text − first text) / (output tokens − 1).
ITL
    every gap between two events with text, pooled over the requests.
E2E
    from the moment a request was due to the end of its answer.
Worst gaps
    per request: the mean of the longest tenth of its gaps.
Normalised latency
    per request: E2E / output tokens.
Queue time
    per request, as the server's usage event tells it.
Goodput
    requests that met every limit, over the window. Refused and failed requests are misses; those
    cut off at the time limit count only where a limit was already broken.
Throughput
    all tokens seen in the window, also those of requests that did not end, over the window.

All latencies are of completed requests only; mean and percentiles of one metric are
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

METRICS = ("ttft", "tpot", "itl", "e2el", "worst10", "norm", "queue")
LIMITS = ("ttft", "tpot", "e2el", "worst10", "norm")

Figures = dict[str, Any]
Limits = dict[str, float]


def distribution(samples: Iterable[float]) -> dict[str, float | int | None]:
    """Mean, percentiles and extremes in milliseconds of samples in seconds; None where empty."""
    values = np.fromiter(samples, dtype=np.float64) * 1000.0
    names = ["mean", "std", *(f"p{p}" for p in PERCENTS), "min", "max"]
    if not len(values):
        return {"count": 0, **dict.fromkeys(names)}
    ranks = np.percentile(values, PERCENTS)
    numbers = [values.mean(), values.std(), *ranks, values.min(), values.max()]
    figures = {n: float(v) for n, v in zip(names, numbers, strict=True)}
    return {"count": len(values), **figures}


class LimitsError(ValueError):
    """A limit of --goodput cannot be read; the message says why."""


def measure(run: Run, limits: Limits | None = None) -> Figures:
    """All figures of one repetition, as they go into the JSON file."""
    return measure_records(run, records_of(run), limits)


def records_of(run: Run) -> list[Record]:
    """What became of each request, in the order they were sent."""
    return [read(attempt, run.start) for attempt in run.attempts]


def measure_records(run: Run, records: Sequence[Record], limits: Limits | None = None) -> Figures:
    """All figures of one repetition whose answers have been read already."""
    return summarize(records, run.end - run.start, limits) | {"client_cpu_s": run.client_cpu}


def parse_limits(words: Iterable[str]) -> Limits:
    """Read goodput limits such as ``ttft:500``, in milliseconds, as ``vllm bench serve`` does.

    Raises
    ------
    ValueError
        For another form, an unknown latency or a limit that is not positive.
    """
    limits: Limits = {}
    for word in words:
        name, _, value = word.partition(":")
        if name not in LIMITS:
            raise LimitsError(f"--goodput knows no {name!r}; write one of {', '.join(LIMITS)}")
        try:
            limits[name] = float(value)
        except ValueError:
            raise LimitsError(f"--goodput {word!r}: write NAME:MILLISECONDS") from None
        if not limits[name] > 0:
            raise LimitsError(f"--goodput {word!r}: a limit must be over 0 ms")
    return limits


def goodput(records: Sequence[Record], window: float, limits: Limits) -> Figures:
    """How many requests met all limits (milliseconds), of those that can be judged."""
    good = judged = 0
    for record in records:
        values = _judged_values(record)
        kept = all(1000.0 * (values[n] or 0.0) <= limit for n, limit in limits.items())
        if record.outcome == "incomplete" and kept:
            continue  # it might still have met them all
        judged += 1
        good += kept and record.outcome == "completed"
    return {
        "limits_ms": dict(limits),
        "good": good,
        "judged": judged,
        "attainment": good / judged if judged else None,
        "requests_per_s": _over(good, window),
    }


def _judged_values(record: Record) -> dict[str, float | None]:
    """Latencies in seconds; one that an answer of one token does not have is None."""
    values = {
        "ttft": record.ttft,
        "tpot": record.tpot,
        "e2el": record.e2e,
        "worst10": record.worst_gap,
        "norm": record.normalised,
    }
    if record.outcome == "incomplete":
        # Without an end these two are not known, and the wait so far is the least TTFT.
        values |= {"tpot": None, "norm": None}
        values["ttft"] = record.ttft if record.times else record.e2e
    return values


def summarize(records: Sequence[Record], window: float, limits: Limits | None = None) -> Figures:
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
        "worst10": [r.worst_gap for r in done if r.worst_gap is not None],
        "norm": [r.normalised for r in done if r.normalised is not None],
        "queue": [r.queue for r in done if r.queue is not None],
    }
    return {
        "duration_s": window,
        "completed": outcomes["completed"],
        "failed": outcomes["failed"],
        "rejected": sum(r.rejected for r in records),
        "incomplete": outcomes["incomplete"],
        "reasons": dict(Counter(r.reason for r in records if r.outcome == "failed").most_common()),
        "prompt_tokens": prompt,
        "cached_tokens": sum(r.cached_tokens or 0 for r in records),
        "output_tokens": output,
        "request_throughput": _over(outcomes["completed"], window),
        "output_throughput": _over(output, window),
        "total_token_throughput": _over(output + prompt, window),
        "peak_concurrency": peak_concurrency(records),
        "peak_output_throughput": peak_throughput(records),
        **{f"{name}_ms": distribution(values) for name, values in samples.items()},
        "lag_ms": distribution(r.sent - r.due for r in records),
        "warnings": warnings_of(records),
        **({"goodput": goodput(records, window, limits)} if limits else {}),
    }


def peak_concurrency(records: Sequence[Record]) -> int:
    """The most requests that were open at a time."""
    steps = sorted([(r.sent, 1) for r in records] + [(r.ended, -1) for r in records])
    return int(max(np.cumsum([change for _, change in steps]), default=0))


def peak_throughput(records: Sequence[Record]) -> float:
    """Tokens of the best second, counted from the start; events share their answer's tokens."""
    seconds: dict[int, float] = {}
    for record in records:
        share = record.output_tokens / len(record.times) if record.times else 0.0
        for moment in record.times:
            seconds[int(moment)] = seconds.get(int(moment), 0.0) + share
    return max(seconds.values(), default=0.0)


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
