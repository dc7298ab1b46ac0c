"""Results as pictures: SVG or PNG, with matplotlib (the extra ``bench``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

SUFFIXES = (".svg", ".png", ".pdf")
BINS = 120  # of the time axis, at most
BIN_S = 0.25  # shorter ones would show single steps

Result = dict[str, Any]


class PlotError(RuntimeError):
    """No picture can be drawn; the message says what is missing."""


def check(path: Path) -> None:
    """Find out before a measurement whether its picture can be drawn.

    Raises
    ------
    PlotError
        For an unknown kind of file, or without matplotlib.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise PlotError(f"--plot {path}: the name must end in {', '.join(SUFFIXES)}")
    _pyplot()


def plot(result: Result, path: Path) -> None:
    """Draw a measurement: the latencies' distributions, and the run over time.

    Raises
    ------
    PlotError
        As :func:`check`.
    """
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    figure.suptitle(f"{result['workload']['name']}: {result['workload']['summary']}")
    details = result["details"]
    _cumulated(axes[0][0], {"TTFT": _flat(details, "ttfts")}, "seconds from due to first text")
    _cumulated(axes[0][1], {"gaps": _gaps(details)}, "seconds between two events (ITL)")
    _over_time(axes[1][0], details[-1])
    _requests(axes[1][1], details[-1])
    figure.savefig(path)
    pyplot.close(figure)


def plot_sweep(result: Result, path: Path) -> None:
    """Draw a sweep: throughput and latencies over the loads.

    Raises
    ------
    PlotError
        As :func:`check`.
    """
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    labels = [point["label"] for point in result["points"]]
    medians = [point["median"] for point in result["points"]]
    axes[0].plot(labels, [m["output_throughput"] for m in medians], marker="o")
    axes[0].set(ylabel="output tokens/s", xlabel="load")
    for axis, name, title in ((axes[1], "ttft_ms", "TTFT, ms"), (axes[2], "itl_ms", "ITL, ms")):
        drawn: list[float] = []
        for rank in ("p50", "p99"):
            values = [m[name][rank] or np.nan for m in medians]
            drawn += values
            axis.plot(labels, values, marker="o", label=rank)
        axis.set(ylabel=title, xlabel="load")
        if np.isfinite(drawn).any():
            _logarithmic(axis)
        axis.legend()
    if result["capacity"] in labels:
        for axis in axes:
            axis.axvline(labels.index(result["capacity"]), color="grey", linestyle=":")
    figure.savefig(path)
    pyplot.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise PlotError(
            "--plot needs matplotlib, which is not installed; in the source tree: "
            "pip install -e '.[bench]'"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _logarithmic(axis: Any) -> None:
    """A logarithmic axis of plain numbers, between powers of ten too where there is room."""
    from matplotlib.ticker import LogFormatter

    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(LogFormatter())
    axis.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(1.5, 0.5)))


def _flat(details: Sequence[Result], name: str) -> list[float]:
    return [v for detail in details for v in detail[name] if v is not None]


def _gaps(details: Sequence[Result]) -> list[float]:
    return [gap for detail in details for gaps in detail["itls"] for gap in gaps]


def _cumulated(axis: Any, series: dict[str, list[float]], label: str) -> None:
    """Share of the samples up to each value; the axis of shares shows the tail."""
    for name, samples in series.items():
        if samples:
            axis.ecdf(samples, label=f"{name} ({len(samples)})")
    axis.set(xlabel=label, ylabel="share of samples")
    if any(series.values()):
        axis.axhline(0.5, color="grey", linewidth=0.5)
        axis.axhline(0.99, color="grey", linewidth=0.5)
        axis.legend(loc="lower right")


def _over_time(axis: Any, detail: Result) -> None:
    """Tokens a second and open requests, over one repetition."""
    events = [
        start + ttft + offset
        for start, ttft, gaps in zip(
            detail["start_times"], detail["ttfts"], detail["itls"], strict=True
        )
        if ttft is not None
        for offset in np.concatenate([[0.0], np.cumsum(gaps)])
    ]
    end = max(detail["end_times"], default=1.0)
    bins = min(BINS, max(1, int(end / BIN_S)))
    counts, edges = np.histogram(events, bins=bins, range=(0.0, max(end, 1e-9)))
    axis.plot(edges[:-1], counts / np.diff(edges), linewidth=1)
    axis.set(xlabel="seconds", ylabel="events with text a second")
    running = axis.twinx()
    changes = sorted(
        [(t, 1) for t in detail["start_times"]] + [(t, -1) for t in detail["end_times"]]
    )
    running.step(
        [t for t, _ in changes],
        np.cumsum([c for _, c in changes]),
        where="post",
        color="grey",
        linewidth=0.8,
    )
    running.set_ylabel("requests open")


def _requests(axis: Any, detail: Result) -> None:
    """Each request as a line from its due moment to its end, grey until its first text."""
    for row, (start, ttft, end, outcome) in enumerate(
        zip(
            detail["start_times"],
            detail["ttfts"],
            detail["end_times"],
            detail["outcomes"],
            strict=True,
        )
    ):
        first = end if ttft is None else start + ttft
        axis.hlines(row, start, first, color="lightgrey", linewidth=1)
        axis.hlines(row, first, end, color="C0" if outcome == "completed" else "C3", linewidth=1)
    axis.set(xlabel="seconds", ylabel="request, grey while it waits")
