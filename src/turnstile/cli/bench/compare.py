"""``turnstile bench compare``."""

from __future__ import annotations

from pathlib import Path

from turnstile.cli.bench.running import load


def compare(first: Path, second: Path, /) -> int:
    """Show two results side by side, with the ratio of the second to the first.

    Parameters
    ----------
    first
        JSON file of `bench serve`.
    second
        Another one, of the same workload.
    """
    from turnstile.bench.report import compare as side_by_side

    table = side_by_side(load(first), load(second))
    print(f"A = {first}\nB = {second}\n{table}")
    return 0
