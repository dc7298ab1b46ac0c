"""The alert rules, as a file for Prometheus."""

from __future__ import annotations

import json
from dataclasses import dataclass

from monitoring.queries import BY_NAME, now, total

RUNBOOK = "docs/observability.md"


@dataclass(frozen=True, kw_only=True)
class Alert:
    """A rule: what is wrong while ``expression`` holds for ``lasting``."""

    name: str
    expression: str
    lasting: str
    severity: str
    summary: str


def ninety_ninth(name: str) -> str:
    """The 99th percentile of a histogram in the last 5 minutes, of each server."""
    buckets = f"rate({BY_NAME[name].family}_bucket[5m])"
    return f"histogram_quantile(0.99, sum by (instance, le) ({buckets}))"


def of_the_engine() -> list[Alert]:
    """No engine, one that dies, one that hangs."""
    ready = now("engine_state", '{state="ready"}')
    restarts = BY_NAME["engine_restarts"].family
    running = now("requests_running", "")
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
            # Not > 3: increase() extrapolates to the whole window, three come out as 3.07.
            name="TurnstileEngineCrashLoop", severity="critical", lasting="0m",
            expression=f"increase({restarts}[15m]) > 3.5",
            summary="The engine of {{ $labels.instance }} keeps dying.",
        ),
        Alert(
            name="TurnstileStuck", severity="critical", lasting="2m",
            expression=f"{running} > 0 and on (instance) {total('steps', '', '2m')} == 0",
            summary="{{ $labels.instance }} has work, and no step ends.",
        ),
    ]  # fmt: skip


def of_requests() -> list[Alert]:
    """Requests that fail."""
    errors = total("requests", '{outcome="error"}', "5m")
    return [
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
            name="TurnstilePoolRepaired", severity="warning", lasting="0m",
            expression=f"increase({BY_NAME['pool_repairs'].family}[10m]) > 0",
            summary="The page pool of {{ $labels.instance }} did not balance and was repaired.",
        ),
    ]  # fmt: skip


def of_the_gate() -> list[Alert]:
    """Too many refusals, and forecasts that are wrong."""
    refused = f"sum by (instance) ({total('rejections', '', '5m')})"
    asked = f"sum by (instance) ({total('requests', '', '5m')})"
    return [
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
    ]  # fmt: skip


def of_load() -> list[Alert]:
    """More than the machine can do, or less than it should."""
    waiting, busy = now("requests_waiting", ""), now("step_busy_ratio", "")
    return [
        Alert(
            name="TurnstileSaturated", severity="info", lasting="15m",
            expression=f"{busy} > 0.95 and on (instance) {waiting} > 0",
            summary="{{ $labels.instance }} computes all the time, and requests wait.",
        ),
        Alert(
            name="TurnstileWaitingWhileIdle", severity="warning", lasting="5m",
            expression=f"{waiting} > 0 and on (instance) {busy} < 0.2",
            summary="Requests wait at {{ $labels.instance }} although it hardly computes.",
        ),
        Alert(
            name="TurnstileSlowFirstToken", severity="warning", lasting="10m",
            expression=f"{ninety_ninth('ttft_seconds')} > 10",
            summary="One first token in a hundred takes over 10 s at {{ $labels.instance }}.",
        ),
        Alert(
            name="TurnstileStutter", severity="warning", lasting="10m",
            expression=f"{ninety_ninth('itl_seconds')} > 1",
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


def alerts() -> list[Alert]:
    """All rules. Each has a section in the runbook."""
    return [*of_the_engine(), *of_requests(), *of_the_gate(), *of_load()]


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
