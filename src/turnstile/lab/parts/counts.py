"""Break it: shared pages without reference counts."""

from __future__ import annotations

from turnstile.bench.lengths import Uniform
from turnstile.lab.load import Ask, arriving, make_asks
from turnstile.lab.model import LabModel
from turnstile.lab.parts.common import Served, compare, wrong
from turnstile.lab.parts.prefix import LONGEST, REQUESTS, SYSTEM, shared_asks
from turnstile.lab.policies import NO_COUNTS, TURNSTILE, UncountedPool
from turnstile.lab.story import Part, Table

MEMORY = 384
STRANGERS = 16
SHOWN = 6


def run(model: LabModel, part: Part) -> None:
    """The same shared prefix, with counts and without."""
    asks = _asks(model)
    counted, uncounted = compare(
        model, (TURNSTILE, NO_COUNTS), asks, memory_tokens=MEMORY, max_model_len=LONGEST, slots=8
    )
    part.say(
        f"""{REQUESTS} requests hold the same {SYSTEM // 16} pages of a system prompt, in a memory
        of {MEMORY // 16} pages, and {STRANGERS} others come in between. Without reference counts
        the first to leave gives the pages back, though others still read them, and whoever needs
        room next writes its own K and V there."""
    )
    stolen = _stolen(uncounted)
    differing = wrong(counted.run, uncounted.run)
    part.show(
        Table(
            "Shared pages",
            ("", "complete", "wrong answers", "pages taken from their readers"),
            (
                ("with counts", len(counted.run.complete), 0, 0),
                ("without", len(uncounted.run.complete), len(differing), stolen),
            ),
        )
    )
    part.show(_wrong_answers(counted, uncounted, differing))
    part.claim(
        f"Without counts {stolen} pages are taken from requests that still read them.", stolen > 0
    )
    if model.exact:
        part.claim(
            f"{len(differing)} of {len(asks)} answers are wrong, and nothing has failed.",
            len(differing) > 0 and not uncounted.run.dead,
        )
        part.claim(
            "With counts every answer is the one the request gets on a machine of its own.",
            _alone(model, asks) == counted.run.tokens(),
        )
    part.say(
        """Why: a page that several read is nobody's to give away. The count says when the last one
        has left, and the audit after every step (free, held and cached pages add up; every count is
        the number of page tables that hold the page) would have found the first wrong one."""
    )


def _stolen(uncounted: Served) -> int:
    """Pages that were taken from those who still read them."""
    pool = uncounted.server.pool
    return pool.stolen if isinstance(pool, UncountedPool) else 0


def _alone(model: LabModel, asks: list[Ask]) -> dict[str, list[int]]:
    """The answers that the requests get one after the other, with room for all."""
    [served] = compare(
        model, (TURNSTILE,), asks, memory_tokens=64 * MEMORY, max_model_len=LONGEST, slots=1
    )
    return served.run.tokens()


def _wrong_answers(counted: Served, uncounted: Served, differing: dict[str, int]) -> Table:
    return Table(
        f"Wrong answers (the first {min(SHOWN, len(differing))})",
        ("", "wrong from token", "right", "given"),
        tuple(
            (
                name,
                at,
                str(counted.run.answers[name].tokens[at]),
                str(uncounted.run.answers[name].tokens[at]),
            )
            for name, at in list(differing.items())[:SHOWN]
        ),
        note="Token ids. No error is raised anywhere: another request's memory reads as well as "
        "one's own.",
    )


def _asks(model: LabModel) -> list[Ask]:
    shared = arriving(shared_asks(model), [2.0 * i for i in range(REQUESTS)])
    strangers = make_asks(
        Uniform(24, 72), Uniform(8, 24), STRANGERS, model.vocab_size, seed=5, name="s"
    )
    return [*shared, *arriving(strangers, [3.0 * i for i in range(STRANGERS)])]
