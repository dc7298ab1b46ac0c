"""Writes the Grafana dashboard and the alert rules; `--check` says whether they are current.

Every metric is looked up in the table of `server/series.py`: one that is not there is an error here
and not an empty panel there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from turnstile.server.series import SERIES  # noqa: E402

DASHBOARD = ROOT / "deploy/grafana/dashboard.json"
ALERTS = ROOT / "deploy/prometheus/alerts.yml"
RUNBOOK = "docs/observability.md"
BY_NAME = {series.name: series for series in SERIES}
HERE = '{instance=~"$instance"}'
WINDOW = "$__rate_interval"


# -- expressions ------------------------------------------------------------------------------


def now(name: str, selector: str = HERE) -> str:
    """The value of a gauge."""
    series = BY_NAME[name]
    assert series.kind == "gauge", name
    return f"{series.family}{selector}"


def total(name: str, selector: str = HERE, window: str = WINDOW) -> str:
    """The rate of a counter."""
    series = BY_NAME[name]
    assert series.kind == "counter", name
    return f"rate({series.family}{selector}[{window}])"


def quantile(name: str, q: float, selector: str = HERE, window: str = WINDOW) -> str:
    """A quantile of a histogram."""
    series = BY_NAME[name]
    assert series.kind == "histogram", name
    buckets = f"rate({series.family}_bucket{selector}[{window}])"
    return f"histogram_quantile({q}, sum by (le) ({buckets}))"


def mean(name: str) -> str:
    """The mean of a histogram."""
    family = BY_NAME[name].family
    return " / ".join(f"sum(rate({family}_{part}{HERE}[{WINDOW}]))" for part in ("sum", "count"))


def per(above: str, below: str, quantity: str) -> str:
    """One counter of the gate for each of another."""
    selector = f'{{instance=~"$instance", quantity="{quantity}"}}'
    return f"sum({total(above, selector)}) / sum({total(below, selector)})"


# -- panels -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A picture: its lines are (expression, legend)."""

    title: str
    text: str
    lines: list[tuple[str, str]]
    unit: str = "short"
    kind: str = "timeseries"
    stack: bool = False
    most: float | None = None
    thresholds: list[tuple[float | None, str]] = field(default_factory=list)


def latency(title: str, name: str, text: str) -> Panel:
    """Quantiles of a histogram of seconds."""
    lines = [(quantile(name, q), label) for q, label in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))]
    return Panel(title=title, text=text, lines=[*lines, (mean(name), "mean")], unit="s")


def heat(title: str, name: str, text: str) -> Panel:
    """How a histogram's values are spread over time."""
    family = BY_NAME[name].family
    expression = f"sum by (le) (increase({family}_bucket{HERE}[{WINDOW}]))"
    return Panel(title=title, text=text, lines=[(expression, "{{le}}")], kind="heatmap")


def rows() -> dict[str, list[Panel]]:
    """The dashboard, row by row."""
    return {
        "At a glance": [
            Panel(
                title="Ready", kind="stat", text="1 while the engine takes work.",
                lines=[(now("engine_state", '{instance=~"$instance", state="ready"}'), "ready")],
                thresholds=[(None, "red"), (1, "green")],
            ),
            Panel(
                title="Busy", kind="stat", unit="percentunit", most=1,
                text="Share of the last minute spent inside steps: what the machine is paid for.",
                lines=[(now("step_busy_ratio"), "busy")],
            ),
            Panel(
                title="KV cache in use", kind="stat", unit="percentunit", most=1,
                text="Held pages over all pages. Cached pages do not count: they can be taken.",
                lines=[(now("kv_usage_ratio"), "held")],
                thresholds=[(None, "green"), (0.85, "orange"), (0.97, "red")],
            ),
            Panel(
                title="Engine restarts", kind="stat", text="Engines that replaced a dead one.",
                lines=[(f"increase({BY_NAME['engine_restarts'].family}{HERE}[1h])", "last hour")],
                thresholds=[(None, "green"), (1, "orange"), (3, "red")],
            ),
        ],
        "What clients feel": [
            latency("Time to first token", "ttft_seconds", "Arrival to first token."),
            latency("Inter-token latency", "itl_seconds", "Gaps between tokens of a sample."),
            latency("Time per output token", "tpot_seconds", "Mean gap of each request."),
            latency("End to end", "e2e_seconds", "Arrival to last token."),
            latency("Queue time", "queue_seconds", "Arrival to a slot."),
            Panel(
                title="How requests end", stack=True, unit="reqps",
                text="`refused`: by the gate or as wrong. `abort`: the client left.",
                lines=[(f"sum by (outcome) ({total('requests')})", "{{outcome}}")],
            ),
        ],
        "Load": [
            Panel(
                title="Token throughput", unit="short", text="Tokens a second.",
                lines=[
                    (f"sum({total('prompt_tokens')})", "prompt"),
                    (f"sum({total('cached_prompt_tokens')})", "prompt, from the cache"),
                    (f"sum({total('generated_tokens')})", "generated"),
                ],
            ),
            Panel(
                title="Scheduler state", text="Sequences with and without a slot.",
                lines=[(now("requests_running"), "running"), (now("requests_waiting"), "waiting")],
            ),
            Panel(
                title="Why they wait", stack=True,
                text="`/v1/requests` says it of each request.",
                lines=[(now("waiting_by_reason"), "{{reason}}")],
            ),
            Panel(
                title="Refusals", stack=True, unit="reqps", text="By the bound that was met.",
                lines=[(f"sum by (reason) ({total('rejections')})", "{{reason}}")],
            ),
            Panel(
                title="Where the time of requests goes", stack=True, unit="s",
                text="Seconds of ended requests a second, by what they were spent on.",
                lines=[(f"sum by (part) ({total('request_part_seconds')})", "{{part}}")],
            ),
            Panel(
                title="Prefill and decode time", unit="s", text="Means.",
                lines=[(mean("prefill_seconds"), "prefill"), (mean("decode_seconds"), "decode")],
            ),
            heat("Prompt lengths", "request_prompt_tokens", "Tokens."),
            heat("Output lengths", "request_output_tokens", "Tokens."),
            heat("Longest sample", "request_largest_output_tokens", "Tokens, of each request."),
        ],
        "The gate": [
            Panel(
                title="Predicted and actual wait", unit="s",
                text="Means over those let in. Where the lines part the gate refuses wrongly.",
                lines=[
                    (per(f"gate_{kind}_seconds", "gate_predictions", "wait"), kind)
                    for kind in ("predicted", "actual")
                ],
            ),
            Panel(
                title="Predicted and actual TTFT", unit="s", text="The same to the first token.",
                lines=[
                    (per(f"gate_{kind}_seconds", "gate_predictions", "ttft"), kind)
                    for kind in ("predicted", "actual")
                ],
            ),
            Panel(
                title="Coverage of the predicted p90", unit="percentunit", most=1,
                text="Share of the actual values within the predicted 90th percentile.",
                lines=[
                    (per("gate_covered_predictions", "gate_predictions", quantity), quantity)
                    for quantity in ("wait", "ttft")
                ],
                thresholds=[(None, "red"), (0.8, "green")],
            ),
        ],
        "Memory": [
            Panel(
                title="Pages", stack=True, text="Of the KV pool, by state.",
                lines=[(now("pages"), "{{state}}")],
            ),
            Panel(
                title="Waste and headroom",
                text="Unused room in held pages, and steps until the pool is full if nobody ends.",
                lines=[
                    (now("unused_token_slots"), "unused token slots"),
                    (now("headroom_steps"), "headroom, steps"),
                ],
            ),
            Panel(
                title="Preemption", text="A second.",
                lines=[
                    (f"sum({total('preemptions')})", "preemptions"),
                    (f"sum({total('recomputed_tokens')})", "tokens to recompute"),
                    (f"sum({total('evictions')})", "cached pages evicted"),
                ],
            ),
            Panel(
                title="Prefix cache hit rate", unit="percentunit", most=1,
                text="Tokens found over tokens looked up.",
                lines=[
                    (f"sum({total('prefix_hit_tokens')}) / sum({total('prefix_query_tokens')})",
                     "hits"),
                ],
            ),
        ],
        "The engine": [
            Panel(
                title="Busy share", unit="percentunit", most=1, text="Time inside steps.",
                lines=[
                    (f"sum({total('step_busy_seconds')})", "now"),
                    (now("step_busy_ratio"), "last minute"),
                ],
            ),
            heat("Tokens a step", "step_tokens", "Tokens of a forward pass."),
            Panel(
                title="Step time", unit="s", text="Mean seconds of a forward pass.",
                lines=[(f"sum({total('step_busy_seconds')}) / sum({total('steps')})", "mean")],
            ),
            Panel(
                title="Fitted cost of a step", unit="s",
                text="What the gate predicts with: per step, token, query-key pair, sequence.",
                lines=[(now("step_cost_seconds"), "{{per}}")],
            ),
            Panel(
                title="Faults", text="A second.",
                lines=[
                    (f"sum({total('bad_rows')})", "rows that failed"),
                    (f"sum({total('recovered_requests')})", "requests that outlived an engine"),
                ],
            ),
            Panel(
                title="Memory of the processes", unit="bytes", text="Resident.",
                lines=[
                    (now("engine_resident_bytes"), "engine"),
                    (f"process_resident_memory_bytes{HERE}", "API"),
                ],
            ),
        ],
        "Tenants": [
            Panel(
                title="Tokens given", stack=True, text="A second, by tenant.",
                lines=[(f"sum by (tenant) ({total('tenant_generated_tokens')})", "{{tenant}}")],
            ),
            Panel(
                title="Prompt tokens", stack=True, text="A second, by tenant.",
                lines=[(f"sum by (tenant) ({total('tenant_prompt_tokens')})", "{{tenant}}")],
            ),
            Panel(
                title="Mean wait for a slot", unit="s", text="Of requests that ended, by tenant.",
                lines=[
                    (
                        f"sum by (tenant) ({total('tenant_queue_seconds')})"
                        f" / sum by (tenant) ({total('tenant_requests')})",
                        "{{tenant}}",
                    )
                ],
            ),
            Panel(
                title="Requests", stack=True, unit="reqps", text="Let in, by tenant.",
                lines=[(f"sum by (tenant) ({total('tenant_requests')})", "{{tenant}}")],
            ),
        ],
    }  # fmt: skip


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
    for title, row in rows().items():
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


# -- alerts -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Alert:
    """A rule: what is wrong while ``expression`` holds for ``lasting``."""

    name: str
    expression: str
    lasting: str
    severity: str
    summary: str


def alerts() -> list[Alert]:
    """All rules. Each has a section in the runbook."""
    ready = now("engine_state", '{state="ready"}')
    errors = total("requests", '{outcome="error"}', "5m")
    restarts = BY_NAME["engine_restarts"].family
    waiting, running = now("requests_waiting", ""), now("requests_running", "")
    refused = f"sum by (instance) ({total('rejections', '', '5m')})"
    asked = f"sum by (instance) ({total('requests', '', '5m')})"

    def slow(name: str) -> str:
        buckets = f"rate({BY_NAME[name].family}_bucket[5m])"
        return f"histogram_quantile(0.99, sum by (instance, le) ({buckets}))"

    return [
        Alert(
            name="TurnstileDown", severity="critical", lasting="1m",
            expression='up{job="turnstile"} == 0',
            summary="{{ $labels.instance }} does not answer its scrapes.",
        ),
        Alert(
            name="TurnstileEngineNotReady", severity="critical", lasting="2m",
            expression=f"{ready} == 0",
            summary="{{ $labels.instance }} has had no engine that takes work for 2 minutes.",
        ),
        Alert(
            name="TurnstileEngineRestarted", severity="warning", lasting="0m",
            expression=f"increase({restarts}[15m]) > 0",
            summary="The engine of {{ $labels.instance }} died and was replaced; streams went on.",
        ),
        Alert(
            name="TurnstileEngineCrashLoop", severity="critical", lasting="0m",
            expression=f"increase({restarts}[15m]) > 3",
            summary="The engine of {{ $labels.instance }} keeps dying.",
        ),
        Alert(
            name="TurnstileStuck", severity="critical", lasting="2m",
            expression=f"{running} > 0 and on (instance) {total('steps', '', '2m')} == 0",
            summary="{{ $labels.instance }} has work, and no step ends.",
        ),
        Alert(
            name="TurnstileErrors", severity="warning", lasting="5m",
            expression=f"{errors} > 0",
            summary="Requests to {{ $labels.instance }} end in errors of the server.",
        ),
        Alert(
            name="TurnstileBadRows", severity="warning", lasting="0m",
            expression=f"increase({BY_NAME['bad_rows'].family}[10m]) > 0",
            summary="The model of {{ $labels.instance }} gave NaN, or a row failed otherwise.",
        ),
        Alert(
            name="TurnstileRefusing", severity="warning", lasting="5m",
            expression=f"{refused} / {asked} > 0.05",
            summary="{{ $labels.instance }} turns away more than one request in twenty.",
        ),
        Alert(
            name="TurnstileForecastOff", severity="info", lasting="30m",
            expression=(
                f"{total('gate_covered_predictions', '', '30m')}"
                f" < 0.7 * {total('gate_predictions', '', '30m')}"
            ),
            summary="The gate of {{ $labels.instance }} predicts {{ $labels.quantity }} badly.",
        ),
        Alert(
            name="TurnstileSaturated", severity="info", lasting="15m",
            expression=f"{now('step_busy_ratio', '')} > 0.95 and on (instance) {waiting} > 0",
            summary="{{ $labels.instance }} computes all the time, and requests wait.",
        ),
        Alert(
            name="TurnstileWaitingWhileIdle", severity="warning", lasting="5m",
            expression=f"{waiting} > 0 and on (instance) {now('step_busy_ratio', '')} < 0.2",
            summary="Requests wait at {{ $labels.instance }} although it hardly computes.",
        ),
        Alert(
            name="TurnstileSlowFirstToken", severity="warning", lasting="10m",
            expression=f"{slow('ttft_seconds')} > 10",
            summary="One first token in a hundred takes over 10 s at {{ $labels.instance }}.",
        ),
        Alert(
            name="TurnstileStutter", severity="warning", lasting="10m",
            expression=f"{slow('itl_seconds')} > 1",
            summary="One token in a hundred comes over 1 s late at {{ $labels.instance }}.",
        ),
        Alert(
            name="TurnstileThrashing", severity="warning", lasting="10m",
            expression=(
                f"{total('recomputed_tokens', '', '10m')}"
                f" > 0.2 * {total('prompt_tokens', '', '10m')}"
            ),
            summary="{{ $labels.instance }} computes much again that it lost to preemption.",
        ),
    ]  # fmt: skip


def rules() -> str:
    """The rules, as a file for Prometheus."""
    lines = [
        "# Made by scripts/make_dashboard.py; what to do about each is in " + RUNBOOK + ".",
        "groups:",
        "  - name: turnstile",
        "    rules:",
    ]
    for alert in alerts():
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {json.dumps(alert.expression)}",
            f"        for: {alert.lasting}",
            "        labels:",
            f"          severity: {alert.severity}",
            "        annotations:",
            f"          summary: {json.dumps(alert.summary)}",
            f"          runbook: {RUNBOOK}#{alert.name.lower()}",
        ]
    return "\n".join(lines) + "\n"


def stale() -> list[str]:
    """What is not as the table says."""
    made = {DASHBOARD: dashboard(), ALERTS: rules()}
    return [
        f"{path.relative_to(ROOT)} is not current: run scripts/make_dashboard.py"
        for path, text in made.items()
        if not path.exists() or path.read_text() != text
    ]


def main() -> int:
    """Write the files, or check them."""
    if "--check" in sys.argv:
        found = stale()
        print("\n".join(found) or "current")
        return 1 if found else 0
    for path, text in ((DASHBOARD, dashboard()), (ALERTS, rules())):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
