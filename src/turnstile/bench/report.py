"""The figures for people, in the shape in which ``vllm bench serve`` prints them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from turnstile.bench.metrics import FEW, METRICS

WIDTH = 56

HEADINGS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
    "worst10": "Longest Tenth of Gaps, per Request",
    "norm": "Normalised Latency, per Output Token",
    "queue": "Queue Time, as the Server Tells",
}
ROWS = (
    ("Successful requests:", "completed", "{:.0f}"),
    ("Failed requests:", "failed", "{:.0f}"),
    ("  of these refused for load:", "rejected", "{:.0f}"),
    ("Incomplete requests:", "incomplete", "{:.0f}"),
    ("Benchmark duration (s):", "duration_s", "{:.2f}"),
    ("Total input tokens:", "prompt_tokens", "{:.0f}"),
    ("  of these from a prefix cache:", "cached_tokens", "{:.0f}"),
    ("Total generated tokens:", "output_tokens", "{:.0f}"),
    ("Request throughput (req/s):", "request_throughput", "{:.2f}"),
    ("Output token throughput (tok/s):", "output_throughput", "{:.2f}"),
    ("Total token throughput (tok/s):", "total_token_throughput", "{:.2f}"),
    ("Peak output token throughput (tok/s):", "peak_output_throughput", "{:.0f}"),
    ("Peak concurrent requests:", "peak_concurrency", "{:.0f}"),
)
LOADS = (
    ("Maximum request concurrency:", ("users", "max_concurrency"), "{:.0f}"),
    ("Request rate configured (RPS):", ("rate",), "{:.2f}"),
)
SERVER_ROWS = (
    ("CPU time, all processes (s):", "cpu_s"),
    ("CPU time, API process (s):", "api_cpu_s"),
    ("API CPU per output token (µs):", "api_us_per_token"),
    ("Peak memory, PSS (MB):", "pss_peak_mb"),
)


def table(result: dict[str, Any]) -> str:
    """The table of a whole result, medians where it was repeated."""
    return "\n".join(_lines(result))


def _lines(result: dict[str, Any]) -> Iterator[str]:
    figures = result["median"]
    count = len(result["repetitions"])
    workload = result["workload"]
    yield " Serving Benchmark Result ".center(WIDTH, "=")
    yield f"{workload['name']}: {workload['summary']}".center(WIDTH)
    if count > 1:
        yield f"medians of {count} repetitions, same lengths, fresh text".center(WIDTH)
    for label, names, form in LOADS:
        value = next((workload[n] for n in names if workload.get(n) is not None), None)
        if value is not None:
            yield _row(label, value, form)
    for label, name, form in ROWS:
        yield _row(label, figures.get(name), form)
    for name in METRICS:
        if name != "queue" or figures[f"{name}_ms"]["count"]:
            yield from _metric(name, figures[f"{name}_ms"])
    if figures.get("goodput"):
        yield from _goodput(figures["goodput"])
    yield " Generator ".center(WIDTH, "-")
    yield _row("P99 lag behind schedule (ms):", figures["lag_ms"]["p99"], "{:.2f}")
    yield _row("CPU time (s):", figures.get("client_cpu_s"), "{:.2f}")
    if figures.get("server"):
        yield " Server processes ".center(WIDTH, "-")
        for label, key in SERVER_ROWS:
            yield _row(label, figures["server"][key], "{:.2f}")
    yield "=" * WIDTH
    yield "Latencies: completed requests; percentiles: linear."
    for reason, times in figures["reasons"].items():
        yield f"failed {times:.0f} ×: {reason}"
    for warning in figures["warnings"]:
        yield f"note: {warning}"


def _goodput(values: dict[str, Any]) -> Iterator[str]:
    yield " Goodput ".center(WIDTH, "-")
    for name, limit in values["limits_ms"].items():
        yield _row(f"Limit of {name} (ms):", limit, "{:g}")
    yield _row("Requests within all limits:", values["good"], "{:.0f}")
    yield _row("  of requests judged:", values["judged"], "{:.0f}")
    share = values["attainment"]
    yield _row("  share (%):", None if share is None else 100 * share, "{:.1f}")
    yield _row("Request goodput (req/s):", values["requests_per_s"], "{:.2f}")


def _metric(name: str, values: dict[str, Any]) -> Iterator[str]:
    yield f" {HEADINGS[name]} ".center(WIDTH, "-")
    short = name.upper()
    few = "*" if 0 < (values["count"] or 0) < FEW else ""
    yield _row(f"Mean {short} (ms):", values["mean"], "{:.2f}")
    yield _row(f"Median {short} (ms):", values["p50"], "{:.2f}")
    yield _row(f"P90 {short} (ms):", values["p90"], "{:.2f}")
    yield _row(f"P99 {short} (ms){few}:", values["p99"], "{:.2f}")
    if few:
        yield f"  * of {values['count']:.0f} samples: hardly more than the maximum"


def _row(label: str, value: float | None, form: str) -> str:
    text = "–" if value is None else form.format(value)
    return f"{label:<40}{text:>{WIDTH - 40}}"


class ReportError(ValueError):
    """The results cannot be shown; the message says why."""


COMPARED = (
    ("output tok/s", ("output_throughput",), True),
    ("requests/s", ("request_throughput",), True),
    *(
        (f"{name.upper()} {p} ms", (f"{name}_ms", p), False)
        for name in METRICS
        for p in ("p50", "p90", "p99")
    ),
    ("CPU s", ("server", "cpu_s"), False),
    ("API µs/token", ("server", "api_us_per_token"), False),
    ("PSS peak MB", ("server", "pss_peak_mb"), False),
)


def compare(first: dict[str, Any], second: dict[str, Any]) -> str:
    """Two results side by side, with the ratio of the second to the first.

    A ratio is marked where the second is worse by more than the repetitions of both spread.

    Raises
    ------
    ReportError
        If the two measured different work.
    """
    work = [{**each["workload"], "length seed": each["length_seed"]} for each in (first, second)]
    different = [
        f"{field} {work[0].get(field)} and {work[1].get(field)}"
        for field in work[0] | work[1]
        # The summary is words: the other fields say what was done.
        if field != "summary" and work[0].get(field) != work[1].get(field)
    ]
    if different:
        raise ReportError(f"The results are of different work: {'; '.join(different)}.")
    lines = [f"{'':<16}{'A':>12}{'B':>12}{'B/A':>8}"]
    for label, path, more_is_better in COMPARED:
        a, b = figure_at(first["median"], path), figure_at(second["median"], path)
        if a is None or b is None:
            continue
        ratio = b / a if a else float("nan")
        spreads = (_values(first, path), _values(second, path))
        worse = (
            (max(spreads[1]) < min(spreads[0]))
            if more_is_better
            else (min(spreads[1]) > max(spreads[0]))
        )
        lines.append(f"{label:<16}{a:>12.2f}{b:>12.2f}{ratio:>8.3f}{'  worse' if worse else ''}")
    for side, result in (("A", first), ("B", second)):
        lost = result["median"]["failed"] + result["median"]["incomplete"]
        if lost:
            lines.append(f"{side} left {lost:.0f} requests without a whole answer")
    return "\n".join(lines)


def cell(figures: dict[str, Any], path: tuple[str, ...], form: str) -> str:
    """The figure at this place as a table shows it; a dash where there is none."""
    value = figure_at(figures, path)
    return "–" if value is None else form.format(value)


def figure_at(figures: dict[str, Any], path: tuple[str, ...]) -> float | None:
    """The number that stands at this place among the figures, if there is one."""
    value: Any = figures
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, int | float) else None


def _values(result: dict[str, Any], path: tuple[str, ...]) -> list[float]:
    found = (figure_at(r, path) for r in result["repetitions"])
    return [v for v in found if v is not None]
