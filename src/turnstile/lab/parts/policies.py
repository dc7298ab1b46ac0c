"""Policies side by side: Orca, vLLM and ours, in the same bytes."""

from __future__ import annotations

import numpy as np

from turnstile.bench.arrivals import gamma
from turnstile.bench.lengths import Lognormal, Uniform
from turnstile.lab.drive import percentile
from turnstile.lab.load import Ask, arriving, make_asks
from turnstile.lab.model import LabModel
from turnstile.lab.parts.common import Outcome, compare
from turnstile.lab.policies import GUARANTEED, ORCA, TURNSTILE, VLLM
from turnstile.lab.story import Part, Plot, Series, Table, share

REQUESTS = 240
LONGEST = 128
MAX_TOKENS = 104
MEMORY = 8 * LONGEST
RATE = 1.2
"""Requests a step."""


def run(model: LabModel, part: Part) -> None:
    """The same arrivals under each."""
    asks = _asks(model)
    outcomes = compare(
        model, (ORCA, VLLM, GUARANTEED, TURNSTILE), asks, memory_tokens=MEMORY,
        max_model_len=LONGEST, slots=48, budget=96,
    )  # fmt: skip
    part.say(
        f"""{REQUESTS} requests arrive at {RATE} a step, each allowed {MAX_TOKENS} tokens and most
        of them done long before, in {MEMORY:,} tokens of memory. All four batch at every step; they
        differ in what they reserve, whom they let in and whom they throw out."""
    )
    part.show(_table(outcomes))
    part.show(
        Plot(
            "Requests in the batch",
            "step",
            "requests",
            tuple(
                Series(o.policy.name, range(len(o.run.steps)), [s.sequences for s in o.run.steps])
                for o in outcomes
            ),
            form="steps",
        )
    )
    orca, vllm, guaranteed, ours = outcomes
    part.claim(
        "Everybody is answered in full under each of them.",
        all(len(o.run.complete) == REQUESTS for o in outcomes),
    )
    part.claim(
        f"Pages hold {ours.run.peak_sequences} at once where reservations hold "
        f"{orca.run.peak_sequences}.",
        ours.run.peak_sequences > 2 * orca.run.peak_sequences,
    )
    part.claim(
        f"Looking ahead computes fewer tokens twice than optimism: {ours.recomputed:,} against "
        f"{vllm.recomputed:,}; guaranteed admission none.",
        ours.recomputed < vllm.recomputed and guaranteed.recomputed == 0,
    )
    if model.exact:
        part.claim(
            "Under all of them every request gets the same tokens.",
            all(o.run.tokens() == ours.run.tokens() for o in outcomes),
        )
    part.say(
        """Why: a reservation for the longest answer is mostly empty; a promise to everybody that
        fits now is broken later, at the price of work done twice. Measured lengths tell how many
        can start with a promise that mostly holds."""
    )


def _asks(model: LabModel) -> list[Ask]:
    asks = make_asks(
        Uniform(6, 24), Lognormal(20, 0.8, 2, MAX_TOKENS), REQUESTS, model.vocab_size, seed=7,
        max_tokens=MAX_TOKENS,
    )  # fmt: skip
    return arriving(asks, gamma(RATE, REQUESTS, 1.0, np.random.default_rng(4)))


def _table(outcomes: list[Outcome]) -> Table:
    rows = []
    for outcome in outcomes:
        run = outcome.run
        answers = list(run.answers.values())
        rows.append(
            (
                outcome.policy.name, run.peak_sequences, len(run.steps), run.preemptions,
                outcome.recomputed,
                share(sum(s.filled for s in run.steps), sum(s.reserved for s in run.steps)),
                percentile((a.wait for a in answers), 99),
                percentile((a.latency for a in answers), 99),
                max(a.longest_gap for a in answers),
            )
        )  # fmt: skip
    return Table(
        "The same arrivals, the same bytes",
        ("", "at once", "steps", "preempted", "twice", "useful", "first p99", "end p99", "gap"),
        tuple(rows),
        note="Twice: tokens computed again after a preemption. Useful: share of the memory taken "
        "that holds something. Then, in steps, from arrival to the first token and to the end "
        "(99th percentiles), and the longest gap between two tokens of a stream. "
        + "; ".join(f"{o.policy.name}: {o.policy.summary}" for o in outcomes)
        + ".",
    )
