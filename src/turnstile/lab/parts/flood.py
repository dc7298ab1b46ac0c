"""Break it: first come, first served, while one tenant floods."""

from __future__ import annotations

from turnstile.bench.lengths import Fixed, Uniform
from turnstile.lab.drive import percentile
from turnstile.lab.load import Ask, arriving, make_asks
from turnstile.lab.model import LabModel
from turnstile.lab.parts.common import Served, compare
from turnstile.lab.policies import FIRST_COME, TURNSTILE
from turnstile.lab.story import Part, Plot, Series, Table

FLOOD, GUESTS = 80, 8
SLOTS = 8
EVERY = 12
LONGEST = 64


def run(model: LabModel, part: Part) -> None:
    """A flood, and a guest who asks now and then."""
    first, fair = compare(
        model, (FIRST_COME, TURNSTILE), _asks(model), memory_tokens=SLOTS * LONGEST,
        max_model_len=LONGEST, slots=SLOTS,
    )  # fmt: skip
    part.say(
        f"""One tenant sends {FLOOD} requests at once to {SLOTS} slots. Another asks a short
        question every {EVERY} steps. First come, first served means: behind the flood. With virtual
        token counters whoever was served less is next, and a slot is kept for a tenant that runs
        nothing."""
    )
    part.show(_waits(first, fair))
    part.show(_guests(first, fair))
    shortest = min(a.wait for a in first.of("guest"))
    longest = max(a.wait for a in fair.of("guest"))
    ends = [max(a.end_step for a in outcome.of("flood")) for outcome in (first, fair)]
    part.claim(
        f"The guest's longest wait with fair shares ({longest} steps) is far below its shortest "
        f"behind the flood ({shortest}).",
        4 * longest < shortest,
    )
    part.claim(
        f"The flood pays with {ends[1] - ends[0]} steps of {ends[0]}, and nobody is refused.",
        10 * ends[1] < 12 * ends[0] and len(fair.run.complete) == FLOOD + GUESTS,
    )
    part.say(
        """Why: a queue in order of arrival belongs to whoever fills it first. Counting what each
        tenant was given, in tokens, needs no limits and no knowledge of who behaves."""
    )


def _asks(model: LabModel) -> list[Ask]:
    flood = make_asks(
        Fixed(12), Uniform(12, 36), FLOOD, model.vocab_size, seed=1, name="f", tenant="flood"
    )
    guests = make_asks(
        Fixed(12), Fixed(12), GUESTS, model.vocab_size, seed=2, name="g", tenant="guest"
    )
    return [*flood, *arriving(guests, [5 + EVERY * i for i in range(GUESTS)])]


def _guests(first: Served, fair: Served) -> Plot:
    return Plot(
        "The guest's wait for a first token",
        "question",
        "steps",
        tuple(
            Series(o.policy.name, range(1, GUESTS + 1), [a.wait for a in o.of("guest")])
            for o in (first, fair)
        ),
        form="bars",
        labels=tuple(str(i) for i in range(1, GUESTS + 1)),
    )


def _waits(first: Served, fair: Served) -> Table:
    rows = []
    for outcome in (first, fair):
        for tenant in ("guest", "flood"):
            answers = outcome.of(tenant)
            waits = [a.wait for a in answers]
            rows.append(
                (
                    f"{outcome.policy.name}: {tenant}", len(answers), percentile(waits, 50),
                    max(waits), percentile((a.latency for a in answers), 50),
                    max(a.end_step for a in answers),
                )
            )  # fmt: skip
    return Table(
        "Who waits",
        ("", "requests", "first token p50", "at most", "whole answer p50", "last one ends at"),
        tuple(rows),
        note="In steps.",
    )
