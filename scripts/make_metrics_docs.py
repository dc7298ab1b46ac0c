"""Writes docs/metrics.md from the table of metrics; `--check` says whether it is current."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from turnstile.server.watch.series import GROUPS, Series  # noqa: E402

TARGET = ROOT / "docs/metrics.md"
HEAD = """# Metrics

`GET /metrics` has the series below, in Prometheus' format, or in OpenMetrics' if the scraper asks
for it. Every series is there from the start, at 0. If the server has keys, scraping needs one
(`authorization` in the scrape configuration).

Most series also appear under the name they have in vLLM (last column), with the labels `model_name`
and `engine`, so that existing dashboards work. `--metrics-compat none` leaves those out.

Counters of the engine keep their values when its process is replaced. Histograms have vLLM's
buckets, and finer ones for short times. Besides these series there are `turnstile_build_info`,
`turnstile_engine_info` and `vllm:cache_config_info` (facts as labels, always 1), and Prometheus'
usual `process_*` of the API process. A [dashboard](../deploy/grafana/dashboard.json) and [alert
rules](../deploy/prometheus/alerts.yml) come with Turnstile; [observability](observability.md)
says what to do when one fires.

This page is made by `scripts/make_metrics_docs.py` from `server/watch/series.py`.
"""


def row(series: Series) -> str:
    """One line of a table."""
    labels = ""
    if series.label:
        values = ", ".join(series.values)
        labels = f"`{series.label}`" + (f": {values}" if values else "")
    suffix = "_total" if series.kind == "counter" else ""
    vllm = f"`vllm:{series.vllm}{suffix}`" if series.vllm else ""
    return f"| `{series.family}` | {series.kind} | {labels} | {series.help} | {vllm} |"


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, group in GROUPS.items():
        parts.append(f"\n## {title}\n| name | kind | label | what it says | in vLLM |\n")
        parts.append("|---|---|---|---|---|\n")
        parts += [row(series) + "\n" for series in group]
    return "".join(parts)


def stale() -> list[str]:
    """What is not as the table says."""
    if TARGET.exists() and TARGET.read_text() == page():
        return []
    return [f"{TARGET.relative_to(ROOT)} is not current: run scripts/make_metrics_docs.py"]


def main() -> int:
    """Write the page, or check it."""
    if "--check" in sys.argv:
        found = stale()
        print("\n".join(found) or "current")
        return 1 if found else 0
    TARGET.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
