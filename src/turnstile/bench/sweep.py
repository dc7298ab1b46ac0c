"""The same work at rising load: where a server stops keeping its promises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from turnstile.bench.http import Server
from turnstile.bench.report import cell
from turnstile.bench.session import FORMAT, Settings, bench
from turnstile.bench.workloads import Workload

Point = tuple[str, Workload]

ATTAINED = 0.99  # share of the requests within the limits at which a load counts as held

COLUMNS = (
    ("output tok/s", ("output_throughput",), "{:.1f}"),
    ("req/s", ("request_throughput",), "{:.2f}"),
    ("TTFT p50", ("ttft_ms", "p50"), "{:.0f}"),
    ("TTFT p99", ("ttft_ms", "p99"), "{:.0f}"),
    ("TPOT p50", ("tpot_ms", "p50"), "{:.1f}"),
    ("ITL p99", ("itl_ms", "p99"), "{:.0f}"),
    ("refused", ("rejected",), "{:.0f}"),
    ("lost", ("failed",), "{:.0f}"),
    ("in limits", ("goodput", "attainment"), "{:.1%}"),
)


async def sweep(
    server: Server,
    model: str | None,
    points: Sequence[Point],
    settings: Settings,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure every point in the given order; each has fresh text.

    Parameters
    ----------
    points
        Label and workload of each.

    Raises
    ------
    ServerError
        As :func:`turnstile.bench.session.bench`.
    """
    results = []
    for number, (label, workload) in enumerate(points):
        tell(f"{label} ({number + 1} of {len(points)})")
        own = asdict(settings) | {"text_seed": settings.text_seed + number}
        result = await bench(server, model, workload, Settings(**own), tell)
        results.append({"label": label, **result})
    return {"format": f"{FORMAT}-sweep", "points": results, "capacity": capacity(results)}


def capacity(points: Sequence[dict[str, Any]]) -> str | None:
    """Label of the last point before the first that broke its limits; None if the first did.

    A load above one that failed does not count, even where it passed by luck.
    """
    held = None
    for point in points:
        share = (point["median"].get("goodput") or {}).get("attainment")
        if share is None or share < ATTAINED:
            break
        held = str(point["label"])
    return held


def sweep_table(result: dict[str, Any]) -> str:
    """One line a point, times in milliseconds."""
    points = result["points"]
    width = max(12, *(len(p["label"]) + 2 for p in points))
    lines = [f"{'times in ms':<{width}}" + "".join(f"{name:>14}" for name, _, _ in COLUMNS)]
    for point in points:
        cells = (cell(point["median"], path, form) for _, path, form in COLUMNS)
        lines.append(f"{point['label']:<{width}}" + "".join(f"{cell:>14}" for cell in cells))
    if any("goodput" in p["median"] for p in points):
        held = result["capacity"] or "none of these loads"
        lines.append(f"Within the limits for {ATTAINED:.0%} of the requests up to: {held}")
    return "\n".join(lines)
