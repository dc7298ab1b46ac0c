"""Plots as SVG, drawn here: a page that holds them needs nothing else, and no library did it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from turnstile.lab.story import Plot, Series, show_cell

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 12, 44
MOST_POINTS = 1200
"""Points of a line that are drawn; more would be finer than a pixel."""


def draw(plot: Plot) -> str:
    """The plot as one ``<svg>`` element. Colours are classes ``c0``, ``c1``…: the page has them."""
    bars = plot.form == "bars"
    top = _nice_top(max((max(s.ys, default=0.0) for s in plot.series), default=0.0))
    if bars:
        low, high = 0.0, float(len(plot.labels))
    else:
        low = min((min(s.xs, default=0.0) for s in plot.series), default=0.0)
        high = max((max(s.xs, default=1.0) for s in plot.series), default=1.0)
    frame = _Frame(float(low), float(high) if high > low else low + 1.0, top)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(plot.title)}">',
        *_horizontals(frame),
        *(_bar_labels(plot, frame) if bars else _verticals(frame)),
        f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}" '
        f'text-anchor="middle">{escape(plot.x_label)}</text>',
        f'<text class="axis" transform="translate(14 {(TOP + HEIGHT - BOTTOM) / 2:.0f}) '
        f'rotate(-90)" text-anchor="middle">{escape(plot.y_label)}</text>',
    ]
    for index, series in enumerate(plot.series):
        if bars:
            parts += _bars(series, index, len(plot.series), frame)
        else:
            parts.append(_line(series, index, frame, plot.form == "steps"))
    return "".join([*parts, "</svg>"])


class _Frame:
    """Maps values to places: x in ``low … high``, y in ``0 … top``."""

    def __init__(self, low: float, high: float, top: float) -> None:
        self.low, self.high, self.top = low, high, top

    def x(self, value: float) -> float:
        return LEFT + (value - self.low) / (self.high - self.low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.top * (HEIGHT - TOP - BOTTOM)


def _nice_step(span: float, most: int) -> float:
    """The smallest 1, 2 or 5 times a power of ten that cuts ``span`` into at most ``most``."""
    raw = span / most
    scale = 10.0 ** math.floor(math.log10(raw))
    return next(m * scale for m in (1, 2, 5, 10) if m * scale >= raw * (1 - 1e-9))


def _nice_top(largest: float) -> float:
    if largest <= 0:
        return 1.0
    step = _nice_step(largest, 5)
    return math.ceil(largest / step - 1e-9) * step


def _horizontals(frame: _Frame) -> list[str]:
    step = _nice_step(frame.top, 5)
    parts = []
    for i in range(round(frame.top / step) + 1):
        y = frame.y(i * step)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">'
            f"{_number(i * step)}</text>"
        )
    return parts


def _verticals(frame: _Frame) -> list[str]:
    step = _nice_step(frame.high - frame.low, 8)
    first = math.ceil(frame.low / step - 1e-9)
    parts = []
    while first * step <= frame.high + 1e-9 * step:
        x = frame.x(first * step)
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">'
            f"{_number(first * step)}</text>"
        )
        first += 1
    return parts


def _bar_labels(plot: Plot, frame: _Frame) -> list[str]:
    return [
        f'<text class="tick" x="{frame.x(i + 0.5):.1f}" y="{HEIGHT - BOTTOM + 16}" '
        f'text-anchor="middle">{escape(label)}</text>'
        for i, label in enumerate(plot.labels)
    ]


def _number(value: float) -> str:
    return show_cell(round(value)) if abs(value - round(value)) < 1e-9 else f"{value:g}"


def _line(series: Series, index: int, frame: _Frame, steps: bool) -> str:
    xs, ys = _thinned(series.xs, series.ys)
    commands = []
    for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
        if i and steps:
            commands.append(f"H{frame.x(x):.1f}V{frame.y(y):.1f}")
        else:
            commands.append(f"{'L' if i else 'M'}{frame.x(x):.1f} {frame.y(y):.1f}")
    title = f"<title>{escape(series.name)}</title>"
    return f'<path class="line c{index}" d="{"".join(commands)}">{title}</path>'


def _thinned(xs: Sequence[float], ys: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most :data:`MOST_POINTS` points: of each group the largest value, so peaks stay."""
    group = max(1, math.ceil(len(xs) / MOST_POINTS))
    if group == 1:
        return list(xs), list(ys)
    starts = range(0, len(xs), group)
    return [xs[i] for i in starts], [max(ys[i : i + group]) for i in starts]


def _bars(series: Series, index: int, count: int, frame: _Frame) -> list[str]:
    width = (frame.x(1) - frame.x(0)) * 0.8 / count
    parts = []
    for i, value in enumerate(series.ys):
        x = frame.x(i + 0.1) + index * width
        y = frame.y(value)
        parts.append(
            f'<rect class="bar c{index}" x="{x:.1f}" y="{y:.1f}" width="{width * 0.92:.1f}" '
            f'height="{max(0.0, frame.y(0) - y):.1f}"><title>{escape(series.name)}: '
            f"{show_cell(value)}</title></rect>"
        )
    return parts
