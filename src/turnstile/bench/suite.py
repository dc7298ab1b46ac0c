"""The standard workloads one after another, in one table, with the distance to the roofline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from turnstile import __version__
from turnstile.bench.client import ServerError, ask, ask_text
from turnstile.bench.http import Pool, Server
from turnstile.bench.report import cell
from turnstile.bench.roofline import Demand, ModelCost, Peaks, measure_peaks, roofline_line
from turnstile.bench.session import Settings, bench
from turnstile.bench.workloads import Workload
from turnstile.models.source import resolve

FORMAT = "turnstile-bench-suite-1"

Result = dict[str, Any]
Tell = Callable[[str], None]

COLUMNS = (
    ("output tok/s", ("output_throughput",), "{:.0f}"),
    ("TTFT p50", ("ttft_ms", "p50"), "{:.0f}"),
    ("p99", ("ttft_ms", "p99"), "{:.0f}"),
    ("TPOT p50", ("tpot_ms", "p50"), "{:.1f}"),
    ("p99", ("tpot_ms", "p99"), "{:.1f}"),
    ("ITL p99", ("itl_ms", "p99"), "{:.0f}"),
    ("PSS MB", ("server", "pss_peak_mb"), "{:.0f}"),
    ("API µs/tok", ("server", "api_us_per_token"), "{:.0f}"),
    ("lost", ("failed",), "{:.0f}"),
)


class _Engine:
    """What a Turnstile server says of its engine."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def info(self) -> Result | None:
        """The engine's own words, or None for another server or an engine without a roofline."""
        pool = Pool(self._server)
        try:
            told = await ask(pool, "GET", "/server_info")
        except ServerError:
            return None
        finally:
            pool.close()
        engine = told.get("engine")
        model = (told.get("engine_config") or {}).get("model")
        if not isinstance(engine, dict) or engine.get("backend") != "native" or model is None:
            return None
        return {**engine, "path": model}

    async def counters(self) -> dict[str, float]:
        """Steps and the seconds spent in them, so far."""
        pool = Pool(self._server)
        try:
            text = await ask_text(pool, "/metrics")
        finally:
            pool.close()
        found = {}
        for line in text.splitlines():
            name, _, value = line.rpartition(" ")
            if name in ("turnstile_steps_total", "turnstile_step_busy_seconds_total"):
                found[name.removeprefix("turnstile_").removesuffix("_total")] = float(value)
        return found


async def suite(
    server: Server,
    model: str | None,
    workloads: Sequence[Workload],
    settings: Settings,
    tell: Tell = lambda text: None,
    repeats: Sequence[int] | None = None,
) -> Result:
    """Measure every workload, and what the machine does at best before and after each.

    Parameters
    ----------
    repeats
        Repetitions of each workload; those of the settings for all otherwise.

    Raises
    ------
    ServerError
        As :func:`turnstile.bench.session.bench`.
    """
    engine = _Engine(server)
    info = await engine.info()
    peaks = None
    if info is not None:
        tell("measuring what the machine does at best")
        peaks = measure_peaks(info["weight_format"], info["threads"])
    results, spent = [], []
    for number, workload in enumerate(workloads):
        tell(f"{workload.name}: {workload.summary}")
        before = await engine.counters() if info is not None else {}
        repeat = settings.repeat if repeats is None else repeats[number]
        own = replace(settings, text_seed=settings.text_seed + number, repeat=repeat)
        if number:
            own = replace(own, warmup=0)  # the server is warm, and steps would be counted
        results.append(await bench(server, model, workload, own, tell))
        after = await engine.counters() if info is not None else {}
        spent.append({name: after[name] - value for name, value in before.items()})
        if info is not None and peaks is not None:
            peaks = peaks.better(measure_peaks(info["weight_format"], info["threads"]))
    if info is not None and peaks is not None:
        for result, counters in zip(results, spent, strict=True):
            result["roofline"] = _shares(result, counters, info, peaks)
    return {
        "format": FORMAT,
        "turnstile": __version__,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "engine": info,
        "peaks": None if peaks is None else _as_dict(peaks),
        "workloads": results,
    }


def _shares(result: Result, counters: dict[str, float], info: Result, peaks: Peaks) -> Result:
    """Shares of the machine's best over the repetitions together."""
    kv_token_bytes = info["kv_bytes"] / (info["num_pages"] * info["page_size"])
    cost = ModelCost.of(resolve(info["path"]).config, info["weight_format"], kv_token_bytes)
    lengths = [
        pair
        for detail in result["details"]
        for pair in zip(detail["input_lens"], detail["output_lens"], strict=True)
    ]
    seconds = sum(r["duration_s"] for r in result["repetitions"])
    cached = sum(r["cached_tokens"] for r in result["repetitions"])
    demand = Demand.of(cost, lengths, cached, counters.get("steps", 0.0))
    busy = counters.get("step_busy_seconds")
    shares: Result = demand.shares(peaks, seconds)
    return shares | {"busy_share": None if busy is None else busy / seconds}


def _as_dict(peaks: Peaks) -> Result:
    return {
        "level": peaks.level,
        "weight_format": peaks.weight_format,
        "threads": peaks.threads,
        "operations_per_s": peaks.operations,
        "bytes_per_s": peaks.bandwidth,
    }


def suite_table(result: Result) -> str:
    """A line a workload, times in milliseconds, medians; then the roofline."""
    lines = [f"{'':<5}" + "".join(f"{name:>13}" for name, _, _ in COLUMNS)]
    for own in result["workloads"]:
        cells = (cell(own["median"], path, form) for _, path, form in COLUMNS)
        lines.append(f"{own['workload']['name']:<5}" + "".join(f"{cell:>13}" for cell in cells))
    lines.append(f"{_runs(result['workloads'])}; times in ms.")
    peaks = result["peaks"]
    if peaks is None:
        lines.append("No roofline: the server is no Turnstile with native kernels.")
        return "\n".join(lines)
    lines.append(
        f"Roofline ({peaks['weight_format']}, {peaks['level']}, {peaks['threads']} threads): at "
        f"best {peaks['operations_per_s'] / 1e9:,.0f} G operations/s and "
        f"{peaks['bytes_per_s'] / 1e9:.0f} GB/s, measured before and after each"
    )
    lines += [
        roofline_line(own["workload"]["name"], own["roofline"]) for own in result["workloads"]
    ]
    rooflines = [own["roofline"] for own in result["workloads"]]
    if any(max(r["operations_share"], r["bandwidth_share"]) > 1 for r in rooflines):
        lines.append("note: over 100 %: others took the machine while its best was measured")
    return "\n".join(lines)


def _runs(workloads: Sequence[Result]) -> str:
    """How often each was measured."""
    counts = {own["workload"]["name"]: len(own["repetitions"]) for own in workloads}
    most = max(counts.values())
    fewer = ", ".join(f"{name} {count}" for name, count in counts.items() if count < most)
    text = f"Medians of {most} runs" if most > 1 else "One run each"
    return f"{text} ({fewer})" if fewer else text
