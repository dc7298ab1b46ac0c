"""What the live map says beside the pages, once a second: :func:`server_state`.

Tenants, the waiting line with its reasons, latencies of the last minute, and the state of the
server in a sentence. Figures come from where ``/metrics`` and ``/v1/requests`` have theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from turnstile.core.events import WaitReason
from turnstile.engine.client import EngineState
from turnstile.engine.wording import counted
from turnstile.server.service import Phase, Service
from turnstile.server.watch.histogram import Histogram
from turnstile.server.watch.live_view import Told, Viewer
from turnstile.server.watch.metrics import Metrics
from turnstile.server.watch.request_view import View
from turnstile.server.watch.trails import Part

MINUTE = 60.0
MOST_LINES, MOST_TENANTS = 40, 40
"""Rows that a browser is sent; how many there are it is told too."""
LATELY = 10.0
"""Seconds in which a preemption is news."""


class LastMinute:
    """What the counters and the latencies were at each second of the last minute."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._ttft: deque[tuple[float, list[int]]] = deque()
        self._itl: deque[tuple[float, list[int]]] = deque()
        self._tokens: deque[tuple[float, int, int]] = deque()

    def sample(self, now: float) -> None:
        """Note how things stand; once a second."""
        metrics = self._metrics
        self._ttft.append((now, list(metrics.ttft.counts)))
        self._itl.append((now, list(metrics.itl.counts)))
        self._tokens.append((now, metrics.prompt_tokens, metrics.generated_tokens))
        for kept in (self._ttft, self._itl, self._tokens):
            while now - kept[0][0] > MINUTE:
                kept.popleft()

    def told(self) -> Told:
        """Throughput of the last seconds, latencies of all of it. None where there was nothing."""
        metrics = self._metrics
        prompt = generated = seconds = 0.0
        if len(self._tokens) > 1:
            last, first = self._tokens[-1], self._tokens[max(0, len(self._tokens) - 6)]
            seconds = last[0] - first[0]
            prompt, generated = last[1] - first[1], last[2] - first[2]
        return {
            "seconds": round(self._ttft[-1][0] - self._ttft[0][0], 1) if self._ttft else 0.0,
            "prompt_tokens_per_second": round(prompt / seconds, 1) if seconds else 0.0,
            "generated_tokens_per_second": round(generated / seconds, 1) if seconds else 0.0,
            "ttft": _quantiles(metrics.ttft, self._ttft),
            "itl": _quantiles(metrics.itl, self._itl),
        }


def _quantiles(histogram: Histogram, kept: deque[tuple[float, list[int]]]) -> Told:
    earlier = kept[0][1] if kept else histogram.counts
    counts = [now - then for now, then in zip(histogram.counts, earlier, strict=True)]
    return {
        "count": sum(counts),
        "p50": quantile(histogram.bounds, counts, 0.5),
        "p99": quantile(histogram.bounds, counts, 0.99),
    }


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The value below which ``share`` of the observations lie, taken to be even within a bucket as
    Prometheus does it; None where there are none.
    """
    wanted = share * sum(counts)
    if not wanted:
        return None
    below, least = 0, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and below + count >= wanted:
            return round(least + (bound - least) * (wanted - below) / count, 6)
        below, least = below + count, bound
    return bounds[-1]


def server_state(
    service: Service, viewer: Viewer, minute: LastMinute, preemptions_lately: int
) -> Told:
    """All that is told once a second."""
    metrics, engine = service.metrics, service.engine
    snapshot, info, gate = metrics.snapshot, engine.info, service.gate
    queries = metrics.engine_total("prefix_queries")
    drafted = metrics.engine_total("draft_tokens")
    return {
        "type": "server",
        "time": service.clock(),
        "all": viewer.tenant is None,
        "phase": str(service.phase),
        "engine": str(engine.state),
        "words": in_words(service, preemptions_lately),
        "model": service.model.name if service.model is not None else None,
        "epoch": metrics.epoch,
        "crashes": max(0, metrics.epoch - 1),
        "page_size": info.page_size if info else 0,
        "num_slots": info.max_num_seqs if info else 0,
        "counts": {
            "step": snapshot.step,
            "running": snapshot.running,
            "waiting": snapshot.waiting,
            "pages": snapshot.pages_total,
            "free": snapshot.pages_free,
            "held": snapshot.pages_held,
            "cached": snapshot.pages_cached,
            "preemptions": int(metrics.engine_total("preemptions")),
            "evictions": int(metrics.engine_total("evictions")),
            "rejections": sum(gate.rejections.values()) if gate is not None else 0,
            "prefix_hit_rate": metrics.engine_total("prefix_hits") / queries if queries else None,
            "drafts_accepted": metrics.engine_total("accepted_tokens") / drafted
            if drafted
            else None,
        },
        "minute": minute.told(),
        **_tenants(service, viewer),
        **_line(service, viewer),
    }


def in_words(service: Service, preemptions_lately: int) -> str:
    """How the server is, as a sentence or two for people."""
    snapshot, engine = service.metrics.snapshot, service.engine
    inside = counted(service.metrics.in_flight, "request")
    if service.phase is Phase.FAILED or engine.state is EngineState.DEAD:
        return "The engine has died and cannot be restarted."
    if service.phase is Phase.LOADING:
        loading = engine.loading
        far = f": {loading.stage}, {loading.fraction:.0%}" if loading is not None else ""
        return f"The model is being loaded{far}."
    if engine.state is EngineState.RECOVERING:
        words = "The engine died and is being restarted; the map starts anew."
        return (
            words if not service.metrics.in_flight else f"{words} {inside} will go on after that."
        )
    if service.phase is Phase.DRAINING:
        return f"Shutting down: {inside} may still finish."
    if not engine.healthy:
        return "No step has ended for a while although somebody waits for one."
    if not snapshot.running and not snapshot.waiting:
        kept = counted(snapshot.pages_cached, "page")
        return (
            f"Idle. {kept} cached for prompts that begin alike."
            if snapshot.pages_cached
            else "Idle."
        )
    return _busy(service, preemptions_lately)


def _busy(service: Service, preemptions_lately: int) -> str:
    snapshot, info = service.metrics.snapshot, service.engine.info
    slots = info.max_num_seqs if info is not None else 0
    words = f"{counted(snapshot.running, 'sequence')} in {slots} slots"
    reasons = service.metrics.waiting_by_reason()
    if snapshot.waiting:
        # Those not looked at yet wait for what the others wait for.
        why = max(reasons, key=lambda reason: (reason != WaitReason.QUEUED) * reasons[reason])
        why = why if reasons[why] else WaitReason.QUEUED
        words += f", {snapshot.waiting} waiting: {_WHY.get(why, why)}"
    words += "."
    if preemptions_lately:
        times = counted(preemptions_lately, "preemption")
        words += f" Pages ran out: {times} in the last {LATELY:.0f} s."
    return words


_WHY = {
    "queued": "the next step looks at them",
    "slots": "too few slots are free",
    "pages": "their pages would not fit",
    "tenant_turn": "other tenants are first",
    "behind_head": "the first of the queue does not fit yet",
    "prefix": "somebody computes the beginning they share",
    "preempted": "they gave their pages to older ones",
}


def _tenants(service: Service, viewer: Viewer) -> Told:
    """Who is active: counter, weight, and how many run and wait. Of others than one's own, sums."""
    counters = service.metrics.snapshot.tenants
    rows: dict[str, dict[str, float]] = {
        name: {"counter": counter, "weight": 1.0, "running": 0, "waiting": 0, "tokens": 0}
        for name, counter in counters.items()
    }
    for trail in service.requests.alive():
        row = rows.setdefault(
            trail.tenant, {"counter": 0.0, "weight": 1.0, "running": 0, "waiting": 0, "tokens": 0}
        )
        if trail.record is not None:
            row["weight"] = trail.record.jobs[0].generation.weight
            row["tokens"] += trail.record.num_output
        for sample in trail.samples.values():
            if sample.ended is None:
                waits = sample.waits or sample.part is Part.RECOVERY
                row["waiting" if waits else "running"] += 1
    seen = sorted(
        (name for name in rows if viewer.sees(name)),
        key=lambda name: (-rows[name]["running"] - rows[name]["waiting"], name),
    )
    others = [row for name, row in rows.items() if not viewer.sees(name)]
    return {
        "tenants": [{"tenant": name, **rows[name]} for name in seen[:MOST_TENANTS]],
        "more_tenants": max(0, len(seen) - MOST_TENANTS) + len(others),
        "others_running": sum(row["running"] for row in others),
        "others_waiting": sum(row["waiting"] for row in others),
    }


def _line(service: Service, viewer: Viewer) -> Told:
    """Those who wait, in the order in which they should start."""
    view = View(service)
    line = [trail for trail in view.line() if viewer.sees(trail.tenant)]
    return {
        "line": [
            {"id": trail.id, "tenant": trail.tenant, **waits}
            for trail in line[:MOST_LINES]
            if (waits := view.waits(trail)) is not None
        ],
        "more_in_line": max(0, len(line) - MOST_LINES),
    }
