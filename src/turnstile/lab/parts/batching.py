"""Static batching against continuous batching: the same requests, the same slots."""

from __future__ import annotations

import numpy as np

from turnstile.bench.arrivals import gamma
from turnstile.bench.lengths import Lognormal, Uniform
from turnstile.lab.continuous import ContinuousServer
from turnstile.lab.drive import Answer, Run, drive, percentile
from turnstile.lab.load import Ask, arriving, make_asks
from turnstile.lab.model import LabModel
from turnstile.lab.policies import SEPARATE_PREFILL, TURNSTILE, Policy
from turnstile.lab.static import StaticServer
from turnstile.lab.story import Part, Plot, Series, Table, share

SLOTS = 8
LONGEST = 128
MEMORY = SLOTS * LONGEST
REQUESTS = 48
SHORT = 12
"""Answers of at most so many tokens count as short."""


def run(model: LabModel, part: Part) -> None:
    """Compare them."""
    asks = _asks(model)
    static = StaticServer(
        model, memory_tokens=MEMORY, max_model_len=LONGEST, batch_size=SLOTS, patience=16
    )
    runs = {"static": drive(static, asks, seconds=model.seconds)}
    policies = (SEPARATE_PREFILL, TURNSTILE)
    names = ("continuous, apart", "continuous, mixed")
    for name, policy in zip(names, policies, strict=True):
        runs[name] = drive(_continuous(model, policy), asks, seconds=model.seconds)
    short = sum(ask.length <= SHORT for ask in asks)
    part.say(
        f"""{REQUESTS} requests arrive one by one at {SLOTS} slots; {short} of them want at most
        {SHORT} tokens, the longest wants {max(ask.length for ask in asks)}. A static batch waits
        until it is full, pads every prompt to the longest, and holds its slots until the longest
        answer ends. With continuous batching whoever has finished leaves after any step, and the
        next one enters; its prompt is computed in a pass of its own (apart), or in chunks beside
        everybody's next token (mixed)."""
    )
    _work(part, runs, static)
    _speed(model, part, asks)
    _waits(part, runs)
    _stalls(part, runs)
    first = runs["static"]
    part.show(
        Plot(
            "Slots that work for somebody",
            "step",
            "slots",
            tuple(
                Series(name, range(len(each.steps)), [step.sequences for step in each.steps])
                for name, each in runs.items()
                if each is not runs[names[0]]
            ),
            form="steps",
        )
    )
    if model.exact:
        part.claim(
            "Every request gets the same tokens in a padded batch, joining and leaving at every "
            "step, with its prompt apart, mixed in or cut into chunks.",
            all(each.tokens() == first.tokens() for each in runs.values())
            and len(first.complete) == REQUESTS,
        )


def _asks(model: LabModel) -> list[Ask]:
    asks = make_asks(
        Uniform(4, 40), Lognormal(18, 1.0, 2, 88), REQUESTS, model.vocab_size, longest=LONGEST
    )
    return arriving(asks, gamma(0.3, REQUESTS, 1.0, np.random.default_rng(1)))


def _work(part: Part, runs: dict[str, Run], static: StaticServer) -> None:
    rows = []
    for name, each in runs.items():
        padding, idle = (static.padding, static.idle) if name == "static" else (0, 0)
        rows.append(
            (
                name, len(each.steps), each.computed, padding, idle,
                share(each.useful, each.computed),
            )
        )  # fmt: skip
    part.show(
        Table(
            "The work",
            ("", "steps", "tokens computed", "padding", "ended rows", "wanted"),
            tuple(rows),
        )
    )
    old, new = runs["static"], list(runs.values())[-1]
    part.claim(
        "Continuous batching computes no token in vain; static batching "
        f"{old.computed - old.useful:,}.",
        new.computed == new.useful == old.useful < old.computed,
    )
    part.claim(
        f"The same answers take fewer steps: {len(new.steps)} against {len(old.steps)}.",
        len(new.steps) < len(old.steps),
    )


def _speed(model: LabModel, part: Part, asks: list[Ask]) -> None:
    """Throughput, with everybody there from the start."""
    backlog = arriving(asks[: REQUESTS // 2], [0.0] * (REQUESTS // 2))
    static = StaticServer(model, memory_tokens=MEMORY, max_model_len=LONGEST, batch_size=SLOTS)
    rows = []
    for name, server in (
        ("static", static),
        ("continuous, mixed", _continuous(model, TURNSTILE, False)),
    ):
        each = drive(server, backlog, seconds=model.seconds)
        rows.append((name, len(each.steps), each.outputs, each.outputs / each.seconds))
    part.show(
        Table(
            f"The speed, with {len(backlog)} requests there from the start",
            ("", "steps", "tokens out", "tokens/s"),
            tuple(rows),
            note="Tokens a second as measured on this machine, once."
            + (" A tiny model's steps cost little but Python." if model.is_tiny else ""),
        )
    )


def _continuous(model: LabModel, policy: Policy, watched: bool = True) -> ContinuousServer:
    return ContinuousServer(
        model, policy, memory_tokens=MEMORY, max_model_len=LONGEST, slots=SLOTS, budget=64,
        watched=watched,
    )  # fmt: skip


def _waits(part: Part, runs: dict[str, Run]) -> None:
    rows = []
    for name, each in runs.items():
        answers = list(each.answers.values())
        figures = each.figures()
        rows.append(
            (
                name,
                *_percentiles(answers),
                *(figures["e2el_ms"][p] for p in ("p50", "p99")),
                percentile((a.latency for a in answers if a.ask.length <= SHORT), 50),
                percentile((a.wait for a in answers if a.ask.length <= SHORT), 50),
            )
        )
    part.show(
        Table(
            "The wait for an answer",
            (
                "",
                "p50, steps",
                "p99, steps",
                "p50, ms",
                "p99, ms",
                "short p50, steps",
                "short first token",
            ),
            tuple(rows),
            note=f"From arrival to the end. Short answers have at most {SHORT} tokens: in a "
            "static batch they stand behind the longest of the batch before, and of their own.",
        )
    )
    old, new = runs["static"], list(runs.values())[-1]
    medians = [
        percentile((a.latency for a in each.answers.values() if a.ask.length <= SHORT), 50) or 0
        for each in (old, new)
    ]
    part.claim(
        f"The median short answer is there after {medians[1]:.0f} steps, not {medians[0]:.0f}.",
        2 * medians[1] < medians[0],
    )


def _stalls(part: Part, runs: dict[str, Run]) -> None:
    rows = []
    for name, each in runs.items():
        gaps = [
            b - a for x in each.answers.values() for a, b in zip(x.steps, x.steps[1:], strict=False)
        ]
        rows.append(
            (name, len(gaps), sum(gap > 1 for gap in gaps), max(gaps),
             max(step.computed for step in each.steps))
        )  # fmt: skip
    part.show(
        Table(
            "Streams that stand still",
            ("", "gaps", "over one step", "longest, steps", "largest step, tokens"),
            tuple(rows),
            note="A prompt in a pass of its own costs everybody who streams that pass.",
        )
    )
    apart, mixed = list(runs.values())[1:]
    part.claim(
        "Prompts mixed into the batch never make a stream miss a step; prompts in passes of "
        f"their own do, for up to {max(a.longest_gap for a in apart.answers.values()) - 1}.",
        max(a.longest_gap for a in mixed.answers.values()) == 1
        and max(a.longest_gap for a in apart.answers.values()) > 1,
    )


def _percentiles(answers: list[Answer]) -> tuple[float | None, float | None]:
    latencies = [answer.latency for answer in answers]
    return percentile(latencies, 50), percentile(latencies, 99)
