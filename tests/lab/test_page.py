"""The page holds all that was told, in itself, and its plots are where their values are."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.dom import minidom

import pytest

from turnstile.lab.page import render
from turnstile.lab.session import PageError, run_parts
from turnstile.lab.story import Claim, Part, Plot, Series, Table, show_cell
from turnstile.lab.svg import BOTTOM, HEIGHT, LEFT, MOST_POINTS, RIGHT, TOP, WIDTH, draw


def test_a_page_names_no_address_and_escapes_what_it_shows(tmp_path: Path) -> None:
    part = Part("one", "A <title>")
    part.say("5 < 6 & so on, says `bench <x>`")
    part.show(Table("T", ("a", "b"), (("<x>", 1234567),), note="n"))
    part.show(Plot("P", "x", "y", (Series("s<1>", [0, 1], [2, 3]),)))
    part.claim("true", True)
    part.claim("false", False)
    page = render([part], "a model")
    assert not re.findall(r"https?:|src=|<script|@import|url\(", page)
    for text in (
        "5 &lt; 6 &amp; so on",
        "<code>bench &lt;x&gt;</code>",
        "<td>&lt;x&gt;",
        "1,234,567",
        "s&lt;1&gt;",
        "1 of 2 claims",
    ):
        assert text in page
    HTMLParser().feed(page)
    assert "<x>" not in page


def test_lines_begin_and_end_at_the_corners_of_their_values() -> None:
    svg = draw(Plot("P", "x", "y", (Series("s", [0, 5, 10], [0, 50, 100]),)))
    minidom.parseString(svg)
    path = re.search(r'class="line c0" d="([^"]+)"', svg)
    assert path is not None
    points = [tuple(map(float, p.split())) for p in re.split("[ML]", path[1]) if p]
    assert points[0] == (LEFT, HEIGHT - BOTTOM)
    assert points[-1] == (WIDTH - RIGHT, TOP)
    assert points[1][1] == pytest.approx((TOP + HEIGHT - BOTTOM) / 2)


def test_steps_hold_their_value_and_bars_stand_on_the_ground() -> None:
    steps = draw(Plot("P", "x", "y", (Series("s", [0, 1], [1, 2]),), form="steps"))
    assert re.search(r'd="M[\d. ]+H[\d.]+V[\d.]+"', steps)
    series = (Series("a", [1, 2], [4, 0]), Series("b", [1, 2], [1, 2]))
    bars = draw(Plot("P", "x", "y", series, form="bars", labels=("one", "two")))
    minidom.parseString(bars)
    tops = [
        float(y) + float(height)
        for y, height in re.findall(
            r'class="bar c\d" x="[\d.]+" y="([\d.]+)".*?height="([\d.]+)"', bars
        )
    ]
    assert len(tops) == 4
    assert all(top == pytest.approx(HEIGHT - BOTTOM, abs=0.2) for top in tops)


def test_long_lines_are_thinned_but_keep_their_peaks() -> None:
    values = [0.0] * 50_000
    values[34_567] = 9.0
    svg = draw(Plot("P", "x", "y", (Series("s", range(50_000), values),)))
    assert svg.count("L") < MOST_POINTS
    assert f" {TOP + (HEIGHT - TOP - BOTTOM) / 10:.1f}" in svg, "the peak of 9 under a top of 10"


def test_empty_plots_are_drawn_all_the_same() -> None:
    minidom.parseString(draw(Plot("P", "x", "y", (Series("s", [], []),))))


def test_cells_are_shown_as_people_read_them() -> None:
    shown = [show_cell(c) for c in (None, "x", 1234567, 0.0, 0.1234, 12.34, 123.4, 12345.6, True)]
    assert shown == ["–", "x", "1,234,567", "0", "0.12", "12.3", "123", "12,346", "yes"]
    with pytest.raises(ValueError, match="2 cells under 1 heads"):
        Table("T", ("a",), ((1, 2),))


def test_a_part_run_with_a_page_writes_it(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert run_parts(["attention"], model="tiny", html=page) == 0
    text = page.read_text()
    assert "All forms agree" in text
    assert '<section id="attention">' in text
    for place in (tmp_path, tmp_path / "nowhere" / "report.html"):
        with pytest.raises(PageError, match="no file in a directory that exists"):
            run_parts(["attention"], model="tiny", html=place)


def test_failed_claims_are_those_that_do_not_hold() -> None:
    part = Part("p", "P", claims=[Claim("a", True), Claim("b", False)])
    assert [claim.text for claim in part.failed] == ["b"]
