"""A hundred users, in a closed loop and in an open one, by the clock."""

from __future__ import annotations

import numpy as np

from turnstile.bench.arrivals import gamma
from turnstile.bench.lengths import Lognormal, Uniform
from turnstile.bench.metrics import Figures
from turnstile.lab.continuous import ContinuousServer
from turnstile.lab.drive import Run, drive
from turnstile.lab.load import ClosedLoad, arriving, make_asks
from turnstile.lab.model import LabModel
from turnstile.lab.story import Cell, Part, Plot, Series, Table

USERS = 100
REQUESTS = 200
LONGEST = 256
MEMORY = 100 * 128
SHARE_OF_CAPACITY = 0.8
LIMITS = {"ttft": 2000.0, "tpot": 200.0}
"""Milliseconds: an answer that begins within two seconds and then keeps up with a reader."""


def run(model: LabModel, part: Part) -> None:
    """Both loops."""
    asks = make_asks(
        Uniform(16, 64), Lognormal(40, 0.6, 4, 160), REQUESTS, model.vocab_size, longest=LONGEST
    )
    closed_server = _server(model)
    closed = drive(closed_server, ClosedLoad(asks, USERS), by_steps=False, seconds=model.seconds)
    rate = SHARE_OF_CAPACITY * REQUESTS / closed.seconds
    times = gamma(rate, REQUESTS, 1.0, np.random.default_rng(9))
    open_server = _server(model)
    opened = drive(open_server, arriving(asks, times), by_steps=False, seconds=model.seconds)
    part.say(
        f"""In a closed loop {USERS} users each ask again as soon as they have their answer: a slow
        server slows its users down. In an open loop requests arrive at random, here at
        {100 * SHARE_OF_CAPACITY:.0f} % of what the closed loop got through ({rate:.1f} requests a
        second), whatever the server does. {REQUESTS} requests, {MEMORY:,} tokens of memory, up to
        {USERS} at once. The clock runs from the moment a request was due."""
    )
    part.show(_table(closed, opened))
    part.show(
        Plot(
            "Requests in the batch",
            "step",
            "requests",
            (
                Series(
                    "closed loop", range(len(closed.steps)), [s.sequences for s in closed.steps]
                ),
                Series("open loop", range(len(opened.steps)), [s.sequences for s in opened.steps]),
            ),
            form="steps",
        )
    )
    part.claim(f"All {USERS} users are served in the same steps.", closed.peak_sequences == USERS)
    part.claim(
        f"All {2 * REQUESTS} answers are complete, and no page is held after them.",
        len(closed.complete) == len(opened.complete) == REQUESTS
        and closed_server.pool.num_held == open_server.pool.num_held == 0,
    )
    if model.exact:
        part.claim(
            "Whoever else was there, every request got the same tokens.",
            closed.tokens() == opened.tokens(),
        )


def _server(model: LabModel) -> ContinuousServer:
    return ContinuousServer(
        model, memory_tokens=MEMORY, max_model_len=LONGEST, slots=USERS, budget=512
    )


def _table(closed: Run, opened: Run) -> Table:
    figures = [each.figures(LIMITS) for each in (closed, opened)]
    rows: list[tuple[Cell, ...]] = [
        ("requests/s", *(f["request_throughput"] for f in figures)),
        ("tokens out/s", *(f["output_throughput"] for f in figures)),
        ("most at once", *(each.peak_sequences for each in (closed, opened))),
    ]
    for name, key in (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("end to end", "e2el_ms")):
        rows += [
            (f"{name} {percent}, ms", *(f[key][percent] for f in figures))
            for percent in ("p50", "p99")
        ]
    rows.append(("goodput, requests/s", *(f["goodput"]["requests_per_s"] for f in figures)))
    rows.append(("kept both limits", *(_attained(f) for f in figures)))
    return Table(
        f"{USERS} users",
        ("", "closed loop", "open loop"),
        tuple(rows),
        note=f"Limits: TTFT {LIMITS['ttft'] / 1000:g} s, TPOT {LIMITS['tpot']:g} ms. As measured "
        "here, once; the definitions are those of `turnstile bench`.",
    )


def _attained(figures: Figures) -> str:
    return f"{100 * figures['goodput']['attainment']:.0f} %"
