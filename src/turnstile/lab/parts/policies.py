"""Policies side by side: Orca, vLLM and ours, in the same bytes."""

from __future__ import annotations

import numpy as np

from turnstile.bench.arrivals import gamma
from turnstile.bench.lengths import Lognormal, Uniform
from turnstile.core.admission import ExpectedAdmission
from turnstile.lab.drive import percentile
from turnstile.lab.load import Ask, arriving, make_asks
from turnstile.lab.model import LabModel
from turnstile.lab.parts.common import Served, compare
from turnstile.lab.policies import GUARANTEED, ORCA, TURNSTILE, VLLM, Policy
from turnstile.lab.story import Part, Plot, Series, Table, share

REQUESTS = 240
LONGEST = 128
MAX_TOKENS = 104
MEMORY = 8 * LONGEST
QUANTILES = (0.95, 0.8, 0.65, 0.5, 0.35, 0.2)
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


def run_forecast(model: LabModel, part: Part) -> None:
    """How far to look ahead: the quantile of past lengths that admission counts on."""
    outcomes = compare(
        model, (_forecasting(quantile) for quantile in QUANTILES), _asks(model),
        memory_tokens=MEMORY, max_model_len=LONGEST, slots=48, budget=96,
    )  # fmt: skip
    part.say(
        f"""The same {REQUESTS} requests. Admission forecasts every answer at a quantile of those
        that its tenant got before. A high one lets fewer start, and nobody is ever thrown out; a
        low one fills the memory, and pays with work done twice and with streams that stop while
        their request waits to be computed again."""
    )
    rows = [
        (
            f"{100 * quantile:.0f} %", o.run.peak_sequences, len(o.run.steps), o.run.preemptions,
            o.recomputed, percentile((a.wait for a in o.run.answers.values()), 99),
            sum(a.longest_gap > 1 for a in o.run.answers.values()),
        )
        for quantile, o in zip(QUANTILES, outcomes, strict=True)
    ]  # fmt: skip
    part.show(
        Table(
            "What the forecast costs and saves",
            ("quantile", "at once", "steps", "preempted", "twice", "first p99", "stopped"),
            tuple(rows),
            note="Twice: tokens computed again. First p99: steps to the first token. Stopped: "
            "streams that stood still in the middle. The server's default is 50 %.",
        )
    )
    part.show(
        Plot(
            "Steps, and tokens computed twice",
            "quantile",
            "steps, tokens",
            (
                Series("steps", [], [len(o.run.steps) for o in outcomes]),
                Series("computed twice", [], [o.recomputed for o in outcomes]),
            ),
            form="bars",
            labels=tuple(f"{100 * quantile:.0f} %" for quantile in QUANTILES),
        )
    )
    cautious, default, bold = (outcomes[QUANTILES.index(q)] for q in (0.8, 0.5, 0.2))
    part.claim(
        f"The median is done in {len(default.run.steps)} steps where 80 % takes "
        f"{len(cautious.run.steps)}, and computes {default.recomputed:,} tokens twice where 20 % "
        f"computes {bold.recomputed:,}.",
        len(default.run.steps) < 0.85 * len(cautious.run.steps)
        and default.recomputed < 0.25 * bold.recomputed,
    )
    if model.exact:
        part.claim(
            "However often a request is thrown out, its tokens are the same.",
            all(o.run.tokens() == default.run.tokens() for o in outcomes),
        )


def _forecasting(quantile: float) -> Policy:
    return TURNSTILE.but(
        f"{100 * quantile:.0f} %",
        f"answers forecast at the {100 * quantile:.0f} % quantile",
        admission=lambda: ExpectedAdmission(quantile),
    )


def _asks(model: LabModel) -> list[Ask]:
    asks = make_asks(
        Uniform(6, 24), Lognormal(20, 0.8, 2, MAX_TOKENS), REQUESTS, model.vocab_size, seed=7,
        max_tokens=MAX_TOKENS,
    )  # fmt: skip
    return arriving(asks, gamma(RATE, REQUESTS, 1.0, np.random.default_rng(4)))


def _table(outcomes: list[Served]) -> Table:
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
