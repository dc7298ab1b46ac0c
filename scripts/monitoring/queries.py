"""Expressions over Turnstile's metrics, in the language of Prometheus.

Every metric is looked up in the table of `server/watch/series.py`: one that is not there, or is of
another kind, is an error here and not an empty panel or a silent alert later.
"""

from __future__ import annotations

from turnstile.server.watch.series import SERIES

BY_NAME = {series.name: series for series in SERIES}
HERE = '{instance=~"$instance"}'
WINDOW = "$__rate_interval"


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
