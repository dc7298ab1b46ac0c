"""Runs parts of the lab one after another, shows them, and says whether every claim holds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from turnstile.lab.model import open_model
from turnstile.lab.page import render
from turnstile.lab.parts import ENTRIES, PARTS
from turnstile.lab.story import Part
from turnstile.lab.terminal import tell

WIDTH = 100
"""Columns where the output is no terminal."""


class UnknownPartError(ValueError):
    """There is no part of that name."""


class MissingPackageError(RuntimeError):
    """A part needs a package that is not installed."""


class PageError(ValueError):
    """The page cannot be written there."""


def make_console() -> Console:
    """A console whose tables are not cut where the output is a file."""
    width = None if sys.stdout.isatty() else WIDTH
    return Console(highlight=False, width=width)


def list_entries() -> None:
    """Print the names of the parts."""
    console = make_console()
    for entry in ENTRIES:
        console.print(f"[bold]{entry.name:12}[/bold] {escape(entry.title)}")
    console.print(
        "\nturnstile lab NAME…, or --all; --tiny for a tiny model; --html FILE for a page"
    )


def run_parts(
    names: Iterable[str] | None,
    *,
    model: str | None = None,
    threads: int | None = None,
    html: Path | None = None,
    processor_time: bool = False,
) -> int:
    """Run the named parts (None: all of them); returns the exit code.

    Raises
    ------
    UnknownPartError
        Naming what there is.
    MissingPackageError
        A part cannot be run here.
    PageError
        ``html`` is not a place for a file.
    """
    wanted = list(PARTS if names is None else names)
    _check(wanted, html)
    console = make_console()
    began = time.perf_counter()
    lab_model = open_model(model, threads=threads, processor_time=processor_time)
    console.print(f"[bold]The lab[/bold], on {escape(lab_model.describe())}")
    told: list[Part] = []
    for name in wanted:
        part = PARTS[name].run(lab_model)
        tell(part, console)
        told.append(part)
    if html is not None:
        html.write_text(render(told, lab_model.describe()), encoding="utf-8")
        console.print(f"\nThe page is in {escape(str(html))}.")
    return _judge(told, time.perf_counter() - began, console)


def _check(names: Iterable[str], html: Path | None) -> None:
    """Refuse now, and not after minutes of work, what cannot be run or written."""
    for name in names:
        if name not in PARTS:
            raise UnknownPartError(f"The lab has no part {name!r}; it has {', '.join(PARTS)}.")
        if missing := PARTS[name].missing:
            raise MissingPackageError(
                f"The part {name!r} needs {missing}, which is not installed (pip install "
                f"{missing}); the other parts can be run by their names."
            )
    if html is not None and (html.is_dir() or not html.parent.is_dir()):
        raise PageError(f"--html {html}: that is no file in a directory that exists.")


def _judge(told: Iterable[Part], seconds: float, console: Console) -> int:
    """Say whether every claim holds; returns the exit code."""
    claims = [claim for part in told for claim in part.claims]
    failed = sum(len(part.failed) for part in told)
    console.print()
    console.print(
        f"{len(claims) - failed} of {len(claims)} claims hold, after {seconds:.0f} s."
        if not failed
        else f"[bold red]{failed} of {len(claims)} claims fail[/bold red], after {seconds:.0f} s."
    )
    return 1 if failed else 0
