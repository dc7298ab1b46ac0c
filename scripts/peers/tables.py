"""Medians over the rounds, and ratios to the best peer."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from peers.catalog import Peer

from turnstile.bench.report import figure_at

Figures = dict[str, Any]

# label, where it lies in the figures, whether more is better
ROWS: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    ("output tok/s", ("output_throughput",), True),
    ("TTFT p50 ms", ("ttft_ms", "p50"), False),
    ("TTFT p99 ms", ("ttft_ms", "p99"), False),
    ("TPOT p50 ms", ("tpot_ms", "p50"), False),
    ("TPOT p99 ms", ("tpot_ms", "p99"), False),
    ("ITL p99 ms", ("itl_ms", "p99"), False),
    ("E2E p50 ms", ("e2el_ms", "p50"), False),
    ("peak PSS MB", ("server", "pss_peak_mb"), False),
    ("CPU s", ("server", "cpu_s"), False),
    ("start s", ("start_s",), False),
    ("not completed", (), False),
)


def medians(rounds: Sequence[Figures]) -> dict[str, float]:
    """The median of each row over the rounds that have it, and how many requests all lost."""
    found = {}
    for label, path, _ in ROWS:
        values = [v for v in (figure_at(r, path) for r in rounds) if v is not None]
        if values:
            found[label] = statistics.median(values)
    # A median would hide what was lost in one round of three.
    found["not completed"] = float(sum(r["failed"] + r["incomplete"] for r in rounds))
    return found


def losses(rounds: Sequence[Figures]) -> dict[str, int]:
    """Why requests failed, and how many of all rounds for each reason."""
    found: Counter[str] = Counter()
    for figures in rounds:
        found.update(figures.get("reasons", {}))
        if figures["incomplete"]:
            found["cut off by the time limit"] += int(figures["incomplete"])
    return dict(found)


def ratios(figures: Mapping[str, Mapping[str, float]], peers: Sequence[Peer]) -> Figures:
    """For each of ours: each row over the best peer's, of any precision and of the same."""
    found: Figures = {}
    for ours in (p for p in peers if p.ours and p.name in figures):
        others = [p for p in peers if not p.ours and p.name in figures]
        same = [p for p in others if p.precision == ours.precision]
        found[ours.name] = {
            "any precision": _against(figures, ours, others),
            f"{ours.precision} only": _against(figures, ours, same),
        }
    return found


def _against(
    figures: Mapping[str, Mapping[str, float]], ours: Peer, others: Sequence[Peer]
) -> dict[str, float]:
    found = {}
    for label, _, more in ROWS:
        mine = figures[ours.name].get(label)
        theirs = [figures[p.name][label] for p in others if label in figures[p.name]]
        best = (max(theirs) if more else min(theirs)) if theirs else 0
        if mine is not None and best:
            found[label] = mine / best
    return found


def table(figures: Mapping[str, Mapping[str, float]], peers: Sequence[Peer]) -> Iterator[str]:
    """Rows of medians, a column a peer; then the ratios."""
    names = [p.name for p in peers if p.name in figures]
    width = max(14, *(len(name) + 2 for name in names))
    yield f"{'':<14}" + "".join(f"{name:>{width}}" for name in names)
    for label, _, _ in ROWS:
        cells = (figures[name].get(label) for name in names)
        yield f"{label:<14}" + "".join(
            f"{'–' if cell is None else format(cell, '.1f'):>{width}}" for cell in cells
        )
    for ours, kinds in ratios(figures, peers).items():
        for kind, found in kinds.items():
            if found:
                listed = ", ".join(
                    f"{label} {value:.2f} ×"
                    for label, value in found.items()
                    if label not in ("start s", "CPU s", "not completed")
                )
                yield f"{ours} / best peer, {kind}: {listed}"
