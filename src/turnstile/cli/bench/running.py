"""Running a measurement and writing its file."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from turnstile.cli.bench.options import Reporting

EXIT_FAILURES = 1

Result = dict[str, Any]
Draw = Callable[[Result, Path], None]


def run(measurement: Coroutine[Any, Any, Result]) -> Result:
    """Run it on uvloop where there is one, which costs the generator half the CPU time."""
    loops: Any = import_module("uvloop") if find_spec("uvloop") else asyncio
    with asyncio.Runner(loop_factory=loops.new_event_loop) as runner:
        return runner.run(measurement)


def write(path: Path, result: Result) -> None:
    """Write the JSON file, and say where it is."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1))
    tell(f"written: {path}")


def publish(result: Result, saving: Reporting, what: str, picture: Draw) -> None:
    """Write the file, and draw the picture where one is wanted."""
    detailed = saving.save_detailed
    write(saving.path(what), result if detailed else without_details(result))
    if saving.plot is not None:
        picture(result, saving.plot)
        tell(f"drawn: {saving.plot}")


def without_details(result: Result) -> Result:
    """The result without its single requests."""
    kept = {name: value for name, value in result.items() if name != "details"}
    for several in ("points", "workloads"):
        if several in kept:
            kept[several] = [without_details(one) for one in kept[several]]
    return kept


def load(path: Path) -> Result:
    """Read a result of ``bench serve``. Raises :class:`ReportError` for anything else."""
    from turnstile.bench.report import ReportError
    from turnstile.bench.session import FORMAT

    try:
        result: Any = msgspec.json.decode(path.read_bytes())
    except msgspec.DecodeError:
        result = None
    if not isinstance(result, dict) or result.get("format") != FORMAT:
        raise ReportError(f"{path} is not a result of turnstile bench serve.")
    if "error" in result:
        raise ReportError(f"{path} holds no figures: {result['error']}")
    return result


def tell(text: str) -> None:
    """Say how far it is, where figures do not go."""
    print(text, file=sys.stderr)
