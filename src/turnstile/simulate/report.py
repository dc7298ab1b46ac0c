"""The figures for people: one line a simulated point."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from turnstile.simulate.capacity import Bisection
from turnstile.simulate.figures import Figures, Limits
from turnstile.simulate.run import Plant

Point = dict[str, Any]

COLUMNS = (
    "load", "machine", "req/s", "tok/s", "TTFT p50", "p99", "TPOT p50", "p99", "ITL p99",
    "E2E p50", "p99", "pages", "busy", "batch", "preempted", "refused", "good", "$/Mtok",
)  # fmt: skip


def point(load: str, plant: Plant, figures: Figures, price: float | None) -> Point:
    """One simulated point as it goes into the JSON file."""
    setup = plant.setup
    return {
        "load": load,
        "machine": {
            "page_size": setup.page_size,
            "num_pages": setup.num_pages,
            "max_num_seqs": setup.scheduler.max_num_seqs,
            "max_num_batched_tokens": setup.scheduler.max_num_batched_tokens,
            "admission": setup.admission,
            "scheduling_policy": setup.policy,
            "prefix_caching": setup.prefix_caching,
            "replicas": plant.replicas,
            "router": plant.router if plant.replicas > 1 else None,
        },
        "figures": figures,
        "cost_per_million_tokens": cost(figures, plant.replicas, price),
    }


def cost(figures: Figures, replicas: int, price: float | None) -> dict[str, float] | None:
    """What a million tokens cost at ``price`` an hour and machine: of output, and of all."""
    if price is None or not figures["output_throughput"]:
        return None
    a_second = price * replicas / 3600.0
    return {
        "output": 1e6 * a_second / figures["output_throughput"],
        "all": 1e6 * a_second / figures["total_token_throughput"],
    }


def table(points: Seq[Point]) -> str:
    """All points, in columns. Latencies are in milliseconds."""
    rows = [list(COLUMNS), *(_row(p, points) for p in points)]
    keep = [i for i in range(len(COLUMNS)) if any(row[i] for row in rows[1:])]
    widths = [max(len(row[i]) for row in rows) for i in keep]
    lines = []
    for row in rows:
        cells = [
            row[i].ljust(w) if n < 2 else row[i].rjust(w)
            for n, (i, w) in enumerate(zip(keep, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.append("TTFT, TPOT, ITL and E2E in milliseconds.")
    return "\n".join(lines)


def _row(at: Point, points: Seq[Point]) -> list[str]:
    figures = at["figures"]
    machine = figures["machine"]
    good = figures.get("goodput")
    price = at["cost_per_million_tokens"]
    lost = figures["rejected"] + figures["failed"]
    return [
        at["load"],
        _differences(at, points),
        f"{figures['request_throughput']:.2f}",
        f"{figures['output_throughput']:.0f}",
        *(_ms(figures["ttft_ms"][p]) for p in ("p50", "p99")),
        *(_ms(figures["tpot_ms"][p]) for p in ("p50", "p99")),
        _ms(figures["itl_ms"]["p99"]),
        *(_ms(figures["e2el_ms"][p]) for p in ("p50", "p99")),
        f"{machine['mean_page_use']:.0%}",
        f"{machine['busy_ratio']:.0%}",
        f"{machine['mean_batch']:.0f}",
        str(machine["preemptions"]),
        str(lost) if lost else "",
        f"{good['attainment']:.1%}{'' if good['kept'] else ' ✗'}" if good else "",
        f"{price['output']:.2f}" if price else "",
    ]


def _differences(at: Point, points: Seq[Point]) -> str:
    """What sets this machine apart from the others of the table."""
    words = []
    for name, value in at["machine"].items():
        if name != "num_pages" and any(p["machine"][name] != value for p in points):
            said = value if isinstance(value, str) else f"{name.replace('_', ' ')} {value}"
            words.append(said)
    return ", ".join(words)


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def beyond_measured(points: Seq[Point], measured: int | None) -> str | None:
    """A warning where larger batches were simulated than the timing was fitted to, else None."""
    largest = max((p["figures"]["machine"]["peak_batch"] for p in points), default=0)
    if measured is None or largest <= measured:
        return None
    return (
        f"warning: up to {largest} sequences were in a step, and what was measured had at most "
        f"{measured}: beyond that the times are extrapolated. Measure at that load first: "
        f"turnstile bench serve --max-concurrency {largest}."
    )


def describe_capacity(kind: str, found: Bisection, limits: Limits) -> str:
    """The capacity in a sentence."""
    promised = ", ".join(f"{name} {value:g} ms" for name, value in limits.milliseconds.items())
    promised = f"{promised} for {limits.share:.0%} of the requests"
    if found.figures is None:
        least = min(value for value, _ in found.tried)
        return f"Capacity: even {least:g} {kind} does not keep {promised}."
    value = f"{found.value:.0f}" if kind == "users" else f"{found.value:.3g}"
    if found.broken is None:
        return f"Capacity: more than {value} {kind} keep {promised}."
    broken = f"{found.broken:.0f}" if kind == "users" else f"{found.broken:.3g}"
    return f"Capacity: {value} {kind} keep {promised}; {broken} do not."
