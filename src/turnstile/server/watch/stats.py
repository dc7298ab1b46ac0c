"""The throughput line people grep for, in vLLM's words; silent while nothing happens."""

from __future__ import annotations

import logging

from turnstile.server.watch.metrics import Metrics

logger = logging.getLogger("turnstile.stats")


class ThroughputLine:
    """Remembers the counters of the line before."""

    def __init__(self, metrics: Metrics, now: float) -> None:
        self._metrics = metrics
        self._time = now
        self._prompt = 0
        self._generated = 0

    def write(self, now: float) -> str | None:
        """Log the line for the time since the last one and return it; None where nothing was done
        in that time and nobody is inside.
        """
        metrics = self._metrics
        seconds = max(now - self._time, 1e-9)
        prompt = metrics.prompt_tokens - self._prompt
        generated = metrics.generated_tokens - self._generated
        preemptions = metrics.engine_total("preemptions")
        snapshot = metrics.snapshot
        active = bool(prompt or generated or snapshot.running or snapshot.waiting)
        line = None
        if active:
            line = _line(metrics, prompt / seconds, generated / seconds, preemptions)
            logger.info("%s", line)
        self._time = now
        self._prompt, self._generated = metrics.prompt_tokens, metrics.generated_tokens
        return line


def _line(metrics: Metrics, prompt: float, generated: float, preemptions: float) -> str:
    snapshot = metrics.snapshot
    queries = metrics.engine_total("prefix_queries")
    hits = metrics.engine_total("prefix_hits")
    drafted = metrics.engine_total("draft_tokens")
    accepted = metrics.engine_total("accepted_tokens")
    usage = snapshot.pages_held / snapshot.pages_total if snapshot.pages_total else 0.0
    device = (metrics.info.device if metrics.info else "cpu").partition(":")[0]
    device = {"cpu": "CPU", "cuda": "GPU"}.get(device, device)
    preempted = f"Preemptions: {preemptions:.0f}, " if preemptions else ""
    return (
        f"Engine 000: Avg prompt throughput: {prompt:.1f} tokens/s, "
        f"Avg generation throughput: {generated:.1f} tokens/s, "
        f"Running: {snapshot.running} reqs, Waiting: {snapshot.waiting} reqs, "
        f"{preempted}{device} KV cache usage: {usage:.1%}, "
        f"Prefix cache hit rate: {hits / queries if queries else 0.0:.1%}"
        f"{f', Drafts accepted: {accepted / drafted:.1%}' if drafted else ''}"
    )
