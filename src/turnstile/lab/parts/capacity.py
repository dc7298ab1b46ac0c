"""The headline: users that the same memory holds, with the same limits on their waits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from turnstile.bench.lengths import Lognormal
from turnstile.lab.capacity import (
    ATTAINMENT,
    Capacity,
    Trial,
    by_majority,
    find_capacity,
    try_users,
)
from turnstile.lab.continuous import ContinuousServer
from turnstile.lab.drive import Server
from turnstile.lab.load import Ask, make_asks
from turnstile.lab.model import LabModel
from turnstile.lab.policies import ORCA
from turnstile.lab.static import StaticServer
from turnstile.lab.story import Cell, Part, Plot, Series, Table

LONGEST = 256
RESERVATIONS = 8
MEMORY = RESERVATIONS * LONGEST
ROUNDS = 3
"""Requests of each user, the first of which is not judged."""
MOST_USERS = 128
LIMITS = {"ttft": 2000.0, "tpot": 200.0}
"""Milliseconds: begins within two seconds, and then keeps up with a reader."""
STEP_LIMITS = {"ttft": 150.0, "tpot": 2.0}
"""Steps, for the tiny model, whose seconds say nothing."""


def run(model: LabModel, part: Part) -> None:
    """Search for each kind of server."""
    limits, unit = limits_of(model)
    part.say(
        f"""The same memory for K and V, {MEMORY:,} tokens
        ({model.kv_bytes(MEMORY) / 2**20:,.1f} MiB), no request longer than {LONGEST}. Users ask
        again as soon as they are answered. A number of users is held if
        {100 * ATTAINMENT:.0f} % of their requests begin within {limits["ttft"]:g} {unit} and go on
        with a token every {limits["tpot"]:g} {unit} or sooner; it is found by doubling and
        halving."""
    )
    found = search(model)
    _show(part, found, unit)
    static, _, paged = (capacity.users for capacity in found.values())
    part.claim(
        f"All three have {MEMORY:,} tokens of memory, to the byte.",
        len({model.kv_bytes(MEMORY, size) for size in (16, LONGEST)}) == 1,
    )
    if model.is_tiny:
        part.claim(
            f"Counted in steps, continuous batching over pages holds {paged} users where static "
            f"batches over reservations hold {static}.",
            paged >= 3 * max(1, static),
        )


def limits_of(model: LabModel) -> tuple[dict[str, float], str]:
    """What users are promised, and in which unit."""
    return (STEP_LIMITS, "steps") if model.is_tiny else (LIMITS, "ms")


def search(model: LabModel) -> dict[str, Capacity]:
    """How many users each kind of server holds."""
    limits, _ = limits_of(model)

    def attempt(make: Callable[[], Server], users: int, draw: int) -> Trial:
        asks = _asks(model, users, draw)
        return try_users(make(), asks, users, limits, by_steps=model.is_tiny, seconds=model.seconds)

    def search_one(make: Callable[[], Server]) -> Capacity:
        return find_capacity(
            lambda users: by_majority(partial(attempt, make, users)), most=MOST_USERS
        )

    return {name: search_one(make) for name, make in _kinds(model, model.is_tiny).items()}


def _kinds(model: LabModel, by_steps: bool) -> dict[str, Callable[[], Server]]:
    patience = 1.0 if by_steps else 0.02
    return {
        "static, contiguous": lambda: StaticServer(
            model, memory_tokens=MEMORY, max_model_len=LONGEST, batch_size=RESERVATIONS,
            patience=patience,
        ),
        "continuous, contiguous": lambda: ContinuousServer(
            model, ORCA, memory_tokens=MEMORY, max_model_len=LONGEST, slots=MOST_USERS, budget=256
        ),
        "continuous, paged": lambda: ContinuousServer(
            model, memory_tokens=MEMORY, max_model_len=LONGEST, slots=MOST_USERS, budget=256
        ),
    }  # fmt: skip


def _asks(model: LabModel, users: int, draw: int) -> list[Ask]:
    return make_asks(
        Lognormal(28, 0.8, 4, 100), Lognormal(32, 0.8, 4, 128), ROUNDS * users, model.vocab_size,
        seed=1000 * draw + users, longest=LONGEST,
    )  # fmt: skip


def _show(part: Part, found: dict[str, Capacity], unit: str) -> None:
    rows: list[tuple[Cell, ...]] = []
    least = next(iter(found.values())).users
    for name, capacity in found.items():
        best = capacity.best
        rows.append(
            (
                name, capacity.users,
                capacity.users / least if least else None,
                best.outputs_per_step if best else None,
                best.figures["output_throughput"] if best and unit == "ms" else None,
                best.figures["ttft_ms"]["p90"] if best else None,
                best.figures["tpot_ms"]["p90"] if best else None,
            )
        )  # fmt: skip
    part.show(
        Table(
            "Users that the same memory holds",
            (
                "",
                "users",
                "times",
                "tokens a step",
                "tokens/s",
                f"TTFT p90, {unit}",
                f"TPOT p90, {unit}",
            ),
            tuple(rows),
            note="Each number of users is tried with two draws of the requests, and with a third "
            "where they disagree. The figures are those at the number found."
            + ("" if unit == "steps" else " They depend on the machine and what else it does."),
        )
    )
    part.show(
        Plot(
            "Requests that keep the limits",
            "users",
            "share, %",
            tuple(
                Series(
                    name,
                    [t.users for t in sorted(capacity.trials, key=lambda t: t.users)],
                    [100 * t.attainment for t in sorted(capacity.trials, key=lambda t: t.users)],
                )
                for name, capacity in found.items()
            ),
        )
    )
