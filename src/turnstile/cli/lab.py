"""``turnstile lab``: the path of the book, part by part, with everything computed on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

app = App(name="lab", help="See what each mechanism is for: with it and without it, side by side.")


class ModelChoiceError(ValueError):
    """Two models were asked for."""


@app.default
def lab(
    *parts: str,
    tiny: bool = False,
    all_parts: Annotated[bool, Parameter(name="--all")] = False,
    list_parts: Annotated[bool, Parameter(name="--list")] = False,
    html: Path | None = None,
    model: str | None = None,
    threads: int | None = None,
    processor_time: bool = False,
) -> int:
    """Run parts by name; the exit code is 1 if a claim does not hold.

    Parameters
    ----------
    parts
        Names of parts, in the order to run them (see --list).
    tiny
        Use a tiny random model, made in memory: seconds instead of minutes.
    all_parts
        Run every part.
    list_parts
        List the parts and do nothing.
    html
        Also write a page with everything that was shown, and plots, into this file.
    model
        A model to compute with. Default: the default model.
    threads
        Compute threads. Default: from CPU affinity and the container's quota.
    processor_time
        Where seconds are measured, count those the processor spends on this process, on one
        thread: what else the machine does then hardly shows.
    """
    from turnstile.lab.session import list_entries, run_parts
    from turnstile.lab.tiny import NAME

    if tiny and model is not None:
        raise ModelChoiceError("--tiny is a model of its own: give it or --model, not both.")
    if list_parts or not (parts or all_parts):
        list_entries()
        return 0
    return run_parts(
        None if all_parts else parts,
        model=NAME if tiny else model,
        threads=threads,
        html=html,
        processor_time=processor_time,
    )
