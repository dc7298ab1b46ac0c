"""The dashboard as a file for Grafana's import."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from monitoring.panels import ROWS, Panel
from monitoring.queries import BY_NAME


def panel_json(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    """A panel as Grafana has it."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "fillOpacity": 30 if panel.stack else 5,
            "stacking": {"mode": "normal" if panel.stack else "none"},
        }
    if panel.thresholds:
        steps = [{"value": value, "color": color} for value, color in panel.thresholds]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    targets = [
        {
            "refId": chr(ord("A") + k), "datasource": source, "expr": expression,
            "legendFormat": legend,
            **({"format": "heatmap"} if panel.kind == "heatmap" else {}),
        }
        for k, (expression, legend) in enumerate(panel.lines)
    ]  # fmt: skip
    options: dict[str, Any] = {
        "heatmap": {"calculate": False, "yAxis": {"unit": panel.unit}},
        "stat": {"reduceOptions": {"calcs": ["lastNotNull"]}},
    }.get(panel.kind, {"legend": {"displayMode": "list", "placement": "bottom"}})
    return {
        "id": number, "type": panel.kind, "title": panel.title, "description": panel.text,
        "datasource": source, "gridPos": place, "targets": targets, "options": options,
        "fieldConfig": {"defaults": defaults, "overrides": []},
    }  # fmt: skip


def panels() -> Iterator[dict[str, Any]]:
    """All panels, row after row."""
    y, number = 0, 0
    for title, row in ROWS.items():
        number += 1
        place = {"x": 0, "y": y, "w": 24, "h": 1}
        yield {"id": number, "type": "row", "title": title, "gridPos": place, "panels": []}
        y += 1
        small = row[0].kind == "stat"
        width, height = (24 // len(row), 4) if small else (8, 8)
        for k, panel in enumerate(row):
            number += 1
            line, column = divmod(k, 24 // width)
            place = {"x": column * width, "y": y + line * height, "w": width, "h": height}
            yield panel_json(panel, number, place)
        y += height * -(-len(row) // (24 // width))


def dashboard() -> str:
    """The dashboard, as a file for Grafana's import."""
    ready = BY_NAME["engine_state"].family
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"},
        {
            "name": "instance", "type": "query", "label": "Server", "multi": True,
            "includeAll": True, "refresh": 2,
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "query": f"label_values({ready}, instance)",
            "current": {"text": "All", "value": "$__all"},
        },
    ]  # fmt: skip
    document = {
        "title": "Turnstile", "uid": "turnstile", "tags": ["turnstile", "llm"],
        "schemaVersion": 39, "timezone": "browser", "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"}, "templating": {"list": variables},
        "panels": list(panels()),
    }  # fmt: skip
    return json.dumps(document, indent=1) + "\n"
