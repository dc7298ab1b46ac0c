"""What a part of the lab tells: sentences, tables, plots and claims, as plain values.

The terminal (:mod:`turnstile.lab.terminal`) and the page (:mod:`turnstile.lab.page`) show the same
values; a part computes and knows neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Cell = str | int | float | None
"""One value of a table; None shows as a dash."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under columns. ``note`` says what a reader must know to read it."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.title}: {len(row)} cells under {len(self.columns)} heads.")


@dataclass(frozen=True, slots=True)
class Series:
    """A named line of a plot; ``xs`` and ``ys`` are equally long."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True, slots=True)
class Plot:
    """Series over one pair of axes. ``form`` ``steps`` holds each value until the next x; for
    ``bars`` every series has one value a label of ``labels``.
    """

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    form: Literal["line", "steps", "bars"] = "line"
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that must be so: about tokens, steps and pages, never about seconds."""

    text: str
    holds: bool


@dataclass(slots=True)
class Part:
    """One part of the lab, told in order."""

    name: str
    title: str
    blocks: list[str | Table | Plot] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Add a paragraph."""
        self.blocks.append(" ".join(text.split()))

    def show(self, block: Table | Plot) -> None:
        """Add a table or a plot."""
        self.blocks.append(block)

    def claim(self, text: str, holds: bool) -> None:
        """Add a claim, checked by whoever runs the part."""
        self.claims.append(Claim(" ".join(text.split()), bool(holds)))

    @property
    def failed(self) -> list[Claim]:
        """The claims that do not hold."""
        return [claim for claim in self.claims if not claim.holds]


def show_cell(cell: Cell) -> str:
    """A cell as people read it: thousands apart, three significant digits."""
    if cell is None:
        return "–"
    if isinstance(cell, str):
        return cell
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int) or abs(cell) >= 1000:
        return f"{cell:,.0f}"
    if abs(cell) >= 100 or cell == 0:
        return f"{cell:.0f}"
    return f"{cell:.1f}" if abs(cell) >= 10 else f"{cell:.2f}"


def share(part: float, whole: float) -> str:
    """``part`` of ``whole`` in percent; a dash where there is no whole."""
    return f"{100 * part / whole:.1f} %" if whole else "–"
