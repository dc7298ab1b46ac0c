"""Asks a running Prometheus what every panel of the dashboard asks, and says which get nothing.

    python scripts/try_dashboard.py http://127.0.0.1:9090 [--window 1m]

A panel without data is a name that changed, a label nobody sends, or a server nobody used: ratios
are 0 / 0 where nothing happened within the window.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
DASHBOARD = ROOT / "deploy/grafana/dashboard.json"


@dataclass(frozen=True)
class Answer:
    """What one line of a panel got: how many series, and how many of them hold a number."""

    panel: str
    expression: str
    series: int
    numbers: int
    missing: tuple[str, ...]
    """Labels its legend wants and no series carries."""

    @property
    def good(self) -> bool:
        return self.numbers > 0 and not self.missing


def lines() -> list[tuple[str, str, str]]:
    """Title, expression and legend of every line of the dashboard."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [
        (panel["title"], target["expr"], target["legendFormat"])
        for panel in panels
        for target in panel.get("targets", [])
    ]


def ask(prometheus: httpx.Client, expression: str, window: str) -> list[dict[str, Any]]:
    """The series of an expression, with Grafana's variables filled in."""
    query = expression.replace("$__rate_interval", window).replace("$instance", ".*")
    answer = prometheus.get("/api/v1/query", params={"query": query})
    told = answer.json()
    if told["status"] != "success":
        raise ValueError(f"{expression}: {told['error']}")
    found: list[dict[str, Any]] = told["data"]["result"]
    return found


def answers(prometheus: httpx.Client, window: str) -> list[Answer]:
    """What every line of the dashboard gets now."""
    told = []
    for panel, expression, legend in lines():
        series = ask(prometheus, expression, window)
        numbers = sum(not math.isnan(float(each["value"][1])) for each in series)
        wanted = {part.split("}}")[0] for part in legend.split("{{")[1:]}
        carried = {label for each in series for label in each["metric"]}
        missing = tuple(sorted(wanted - carried)) if series else ()
        told.append(Answer(panel, expression, len(series), numbers, missing))
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prometheus", help="its address")
    parser.add_argument("--window", default="1m", help="Grafana's $__rate_interval")
    arguments = parser.parse_args()
    with httpx.Client(base_url=arguments.prometheus, timeout=30.0) as prometheus:
        told = answers(prometheus, arguments.window)
    for answer in told:
        mark = "ok  " if answer.good else "NONE"
        print(f"{mark} {answer.panel}: {answer.numbers} of {answer.series}: {answer.expression}")
    empty = [answer for answer in told if not answer.good]
    print(f"{len(told)} lines, {len(empty)} without data")
    return 1 if empty else 0


if __name__ == "__main__":
    sys.exit(main())
