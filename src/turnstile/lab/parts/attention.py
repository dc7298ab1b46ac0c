"""Attention over pages in three forms: equal, and timed."""

from __future__ import annotations

from turnstile.lab.attention import PAGE_SIZE, REPEATS, Problem, by_loop, by_native, by_reference
from turnstile.lab.model import LabModel
from turnstile.lab.story import Part, Table

TOLERANCE = 1e-4
LENGTHS = [1, 15, 16, 17, 60, 128, 200, 333]


def run(model: LabModel, part: Part) -> None:
    """Compute the same step in each form."""
    problem = Problem(LENGTHS)
    part.say(
        f"""{len(LENGTHS)} sequences of {min(LENGTHS)} to {max(LENGTHS)} tokens draw one token each:
        {problem.heads} heads, {problem.kv_heads} of K and V, K and V in {problem.num_pages} pages
        of {PAGE_SIZE} tokens in random order. The loop is for reading: it finds every token's page
        in the page table, one by one. The reference does all rows at once in plain torch and
        defines what is right. The native kernels serve."""
    )
    loop, reference = by_loop(problem), by_reference(problem)
    native, in_order = by_native(problem), by_native(problem, shuffled=False)
    rows: list[tuple[str, float | None, float | None, float | None]] = []
    worst = 0.0
    for name, result in (("loop", loop), ("reference", reference), ("native", native)):
        if result is None:
            rows.append((f"{name} (not built here)", None, None, None))
            continue
        difference = float((result.rows - loop.rows).abs().max())
        worst = max(worst, difference)
        rows.append((name, 1e6 * result.seconds, loop.seconds / result.seconds, 1e6 * difference))
    part.show(
        Table(
            "One step of attention",
            ("", "µs", "times faster", "differs by at most, millionths"),
            tuple(rows),
            note="One thread of the native kernels. As measured here: the loop once, the others at "
            f"their best of {REPEATS}.",
        )
    )
    part.claim(f"All forms agree to {TOLERANCE:g}.", worst < TOLERANCE)
    if native is not None and in_order is not None:
        part.claim(
            "With the pages in order, one after another, not a bit of the result is different.",
            bool((native.rows == in_order.rows).all()),
        )
