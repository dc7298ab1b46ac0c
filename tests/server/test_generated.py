"""The dashboard and the alert rules speak of metrics that exist, in expressions that parse."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from turnstile.server.watch.series import SERIES

ROOT = Path(__file__).parents[2]
BY_FAMILY = {series.family: series for series in SERIES}
FUNCTIONS = {"rate", "increase", "sum", "histogram_quantile", "min_over_time"}
WORDS = FUNCTIONS | {"by", "on", "and", "or", "le"}
FOREIGN = {"up": {"job"}, "process_resident_memory_bytes": set()}
"""Metrics that are not ours: Prometheus' own, and prometheus_client's."""
TOKEN = re.compile(
    r'\s*(?:(?P<text>"[^"]*")|(?P<window>\[(?:\$__rate_interval|\d+[smh])\])'
    r"|(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)|(?P<number>\d+(?:\.\d+)?)"
    r"|(?P<sign>==|!=|>=|<=|=~|!~|[-+*/(){},=<>]))"
)


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def tokens(expression: str) -> list[tuple[str, str]]:
    found, at = [], 0
    while at < len(expression.rstrip()):
        match = TOKEN.match(expression, at)
        assert match, f"{expression!r} breaks at {expression[at:]!r}"
        assert match.lastgroup
        found.append((match.lastgroup, match.group(match.lastgroup)))
        at = match.end()
    return found


def check(expression: str) -> None:
    """As much of a parse as needs no Prometheus: brackets, names, kinds, windows, labels."""
    parts = tokens(expression)
    opened: list[str] = []
    for _, text in parts:
        if text in ("(", "{"):
            opened.append(text)
        elif text in (")", "}"):
            assert opened, expression
            assert opened.pop() + text in ("()", "{}"), expression
    assert not opened, expression
    for k, (kind, text) in enumerate(parts):
        after = [part[1] for part in parts[k + 1 :]]
        if kind == "name" and text in FUNCTIONS:
            assert after[0] in ("(", "by"), expression
        elif kind == "name" and text not in WORDS and not _is_label(parts, k):
            _check_metric(expression, text, list(parts[k + 1 :]), parts[:k])
        elif kind == "window":
            assert parts[k - 1][0] == "name" or parts[k - 1][1] == "}", expression
    if "histogram_quantile" in expression:
        assert re.search(r"sum by \((?:\w+, )*le\)", expression), expression


def _is_label(parts: list[tuple[str, str]], k: int) -> bool:
    """Within {…}, or the labels after by and on."""
    before = [text for _, text in parts[:k]]
    braces = before.count("{") - before.count("}")
    if braces:
        return True
    opening = len(before) - 1 - before[::-1].index("(") if "(" in before else -1
    closed = opening >= 0 and ")" in before[opening:]
    return opening > 0 and not closed and before[opening - 1] in ("by", "on")


def _check_metric(
    expression: str, name: str, after: list[tuple[str, str]], before: list[tuple[str, str]]
) -> None:
    if name in FOREIGN:
        return
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    series = BY_FAMILY.get(name) or BY_FAMILY.get(base)
    assert series is not None, f"{name} is no metric of ours: {expression}"
    assert (series.kind == "histogram") == (name != series.family), f"{name}: {expression}"
    texts = [text for _, text in after]
    labels: dict[str, str] = {}
    if texts[:1] == ["{"]:
        inside = texts[1 : texts.index("}")]
        for place in range(0, len(inside), 4):
            label, sign, value = inside[place : place + 3]
            assert sign in ("=", "=~"), expression
            labels[label] = value.strip('"')
        after = after[texts.index("}") + 1 :]
    for label, value in labels.items():
        if label != "instance":
            assert label == series.label, f"{name} has no label {label}"
            assert value in series.values, f"{name} never says {label}={value}"
    windowed = bool(after) and after[0][0] == "window"
    function = before[-2][1] if len(before) > 1 and before[-1][1] == "(" else ""
    if series.kind in ("counter", "histogram"):
        assert windowed, f"{name} only grows: take its rate: {expression}"
        assert function in ("rate", "increase"), expression
    else:
        assert function not in ("rate", "increase"), f"{name} is a gauge: {expression}"


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "deploy/grafana/dashboard.json").read_text())
    return found


def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())
    found: list[dict[str, Any]] = [rule for group in document["groups"] for rule in group["rules"]]
    return found


@pytest.mark.parametrize("name", ["make_dashboard", "make_metrics_docs"])
def test_what_is_generated_is_current(name: str) -> None:
    assert script(name).stale() == []


def test_every_panel_asks_for_metrics_that_exist() -> None:
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    assert len(panels) > 25
    for panel in panels:
        assert panel["targets"], panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        for target in panel["targets"]:
            check(target["expr"])
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert label in target["expr"] or label in _labels_of(target["expr"])
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(dashboard()["panels"])


def _labels_of(expression: str) -> set[str]:
    names = {text for kind, text in tokens(expression) if kind == "name"}
    return {BY_FAMILY[name].label or "" for name in names if name in BY_FAMILY}


def test_no_two_panels_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells


# The panels that people who come from vLLM look for.
def test_the_usual_panels_are_there() -> None:
    asked = " ".join(
        target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])
    )
    for name in (
        "e2e_seconds", "ttft_seconds", "itl_seconds", "tpot_seconds", "queue_seconds",
        "prefill_seconds", "decode_seconds", "requests_running", "requests_waiting",
        "kv_usage_ratio", "prompt_tokens", "generated_tokens", "request_prompt_tokens",
        "request_output_tokens", "request_largest_output_tokens",
    ):  # fmt: skip
        assert f"turnstile_{name}" in asked, name


def test_every_alert_is_well_formed_and_has_its_page() -> None:
    runbook = (ROOT / "docs/observability.md").read_text()
    names = set()
    for rule in rules():
        check(rule["expr"])
        assert re.search(r" (==|>|<) ", rule["expr"]), "an alert compares something"
        assert re.fullmatch(r"\d+[smh]", rule["for"])
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
        assert f"\n### {rule['alert']}\n" in runbook
        assert rule["annotations"]["runbook"].endswith(f"#{rule['alert'].lower()}")
        names.add(rule["alert"])
    assert len(names) == len(rules()) > 10


@pytest.mark.parametrize(
    "wrong",
    [
        "rate(turnstile_steps_total[5m]",
        "rate(turnstile_nothing_total[5m])",
        "rate(turnstile_requests_running[5m])",
        "turnstile_steps_total > 0",
        "turnstile_steps > 0",
        'turnstile_engine_state{state="asleep"} == 0',
        'turnstile_engine_state{mood="ready"} == 0',
        "histogram_quantile(0.5, sum(rate(turnstile_ttft_seconds_bucket[5m])))",
        "rate(turnstile_ttft_seconds[5m])",
        "rate(turnstile_steps_total[five])",
    ],
)
def test_the_check_finds_what_is_wrong(wrong: str) -> None:
    with pytest.raises(AssertionError):
        check(wrong)
