"""The lab as one page of HTML that holds everything: no script, no font, no address elsewhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from turnstile import __version__
from turnstile.lab.story import Part, Plot, Table, show_cell
from turnstile.lab.svg import draw

_STYLE = """
:root { color-scheme: light dark; --text: #1c1e21; --dim: #5f6670; --line: #d9dde3; --back: #fff;
  --good: #1a7f4b; --bad: #c0392b; --c0: #2f6fde; --c1: #e0752d; --c2: #2b9a66; --c3: #9b51c8;
  --c4: #8a8f98; --c5: #c9a400; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e8eb; --dim: #9aa3ad; --line: #33383f;
  --back: #15181c; --good: #4cc38a; --bad: #ff7b6b; --c0: #6ea0ff; --c1: #ff9d5c; --c2: #5fd39b;
  --c3: #c58af0; --c4: #a6adb6; --c5: #e6c84a; } }
body { font: 16px/1.55 system-ui, sans-serif; color: var(--text); background: var(--back);
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { line-height: 1.2; } h2 { margin-top: 3rem; border-top: 1px solid var(--line);
  padding-top: 1.2rem; } h3 { margin-bottom: .4rem; font-size: 1rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .92rem; }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
code { font-size: .92em; }
.note, nav, footer { color: var(--dim); font-size: .88rem; } nav a { margin-right: 1rem;
  white-space: nowrap; } nav { display: flex; flex-wrap: wrap; }
.claims { list-style: none; padding: 0; } .claims li { margin: .3rem 0; }
.holds b { color: var(--good); } .fails b { color: var(--bad); }
figure { margin: 1.2rem 0; } svg { width: 100%; height: auto; }
svg .grid { stroke: var(--line); } svg .tick { font-size: 11px; fill: var(--dim); }
svg .axis { font-size: 12px; fill: var(--dim); }
svg .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.legend span { margin-right: 1.2rem; white-space: nowrap; } .legend i { display: inline-block;
  width: .8rem; height: .8rem; border-radius: 2px; margin-right: .35rem; vertical-align: -1px; }
""" + "".join(
    f".line.c{i} {{ stroke: var(--c{i}); }} .bar.c{i} {{ fill: var(--c{i}); }} "
    f".legend i.c{i} {{ background: var(--c{i}); }}\n"
    for i in range(6)
)


def render(parts: Sequence[Part], model: str) -> str:
    """The whole page. ``model`` says what computed it."""
    links = "".join(f'<a href="#{escape(p.name)}">{escape(p.title)}</a> ' for p in parts)
    claims = sum(len(part.claims) for part in parts)
    failed = sum(len(part.failed) for part in parts)
    verdict = f"{claims - failed} of {claims} claims hold."
    body = "".join(_part(part) for part in parts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Turnstile: the lab</title><style>{_STYLE}</style></head><body>"
        f"<h1>Turnstile: the lab</h1><p>Computed on {escape(model)}. {verdict} Claims are about "
        "tokens, steps and pages; seconds are as measured, once.</p>"
        f"<nav>{links}</nav>{body}<footer><p>turnstile {__version__}</p></footer></body></html>\n"
    )


def _part(part: Part) -> str:
    blocks = "".join(_block(block) for block in part.blocks)
    claims = "".join(
        f'<li class="{"holds" if c.holds else "fails"}"><b>{"holds" if c.holds else "fails"}</b> '
        f"{escape(c.text)}</li>"
        for c in part.claims
    )
    listed = f'<ul class="claims">{claims}</ul>' if claims else ""
    return (
        f'<section id="{escape(part.name)}"><h2>{escape(part.title)}</h2>{blocks}{listed}</section>'
    )


def _prose(text: str) -> str:
    """A sentence; what stands between backticks is code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _block(block: str | Table | Plot) -> str:
    if isinstance(block, str):
        return f"<p>{_prose(block)}</p>"
    if isinstance(block, Plot):
        names = "".join(
            f'<span><i class="c{i}"></i>{escape(s.name)}</span>' for i, s in enumerate(block.series)
        )
        return (
            f"<figure><h3>{escape(block.title)}</h3>{draw(block)}"
            f'<figcaption class="legend">{names}</figcaption></figure>'
        )
    heads = "".join(f"<th>{escape(column)}</th>" for column in block.columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(show_cell(cell))}</td>" for cell in row) + "</tr>"
        for row in block.rows
    )
    note = f'<p class="note">{_prose(block.note)}</p>' if block.note else ""
    return (
        f'<h3>{escape(block.title)}</h3><div class="wide"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{note}"
    )
