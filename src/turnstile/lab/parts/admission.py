"""Break it: no admission control, and no preemption. The same requests in the same memory."""

from __future__ import annotations

from turnstile.bench.lengths import Lognormal, Uniform
from turnstile.lab.drive import Answer
from turnstile.lab.load import Ask, make_asks
from turnstile.lab.model import LabModel
from turnstile.lab.parts.common import Served, compare
from turnstile.lab.policies import GUARANTEED, NO_PREEMPTION, TURNSTILE, UNCHECKED, VLLM, Policy
from turnstile.lab.story import Part, Plot, Series, Table

REQUESTS = 24
MAX_TOKENS = 96
LONGEST = 128
MEMORY = 640
SHOWN = 8


def run(model: LabModel, part: Part) -> None:
    """Admission control off: who dies, and when."""
    asks = _asks(model)
    unchecked, guaranteed, ours = _compare(model, asks, (UNCHECKED, GUARANTEED, TURNSTILE))
    part.say(
        f"""{REQUESTS} requests, each allowed {MAX_TOKENS} tokens, meet a memory of {MEMORY} tokens
        in pages of 16. Without admission control all of them start, because every prompt fits; all
        of them grow; and the memory runs out in the middle of answers. Whoever needs a page at that
        moment fails, with all it has computed."""
    )
    part.show(_table("Admission control", (unchecked, guaranteed, ours)))
    part.show(_deaths(unchecked.run.dead))
    part.show(_memory((unchecked, ours)))
    dead = unchecked.run.dead
    part.claim(
        f"Without admission control {len(dead)} of {REQUESTS} answers die half way, the first at "
        f"step {min((a.end_step for a in dead), default=0)}.",
        len(dead) > 0 and all(0 < len(a.tokens) < a.ask.length for a in dead),
    )
    part.claim(
        "With it nobody dies, in the same memory.",
        not ours.run.dead and len(ours.run.complete) == REQUESTS,
    )
    part.claim(
        "Guaranteed admission does it without a preemption.",
        guaranteed.run.preemptions == 0 and len(guaranteed.run.complete) == REQUESTS,
    )
    part.say(
        """Why: a prompt that fits says nothing about its answer. Admission has to ask what all who
        run, and the newcomer, will need at their worst moment together."""
    )


def run_preemption(model: LabModel, part: Part) -> None:
    """No preemption: hope without a way back."""
    asks = _asks(model)
    hopeful, optimistic, ours = _compare(model, asks, (NO_PREEMPTION, VLLM, TURNSTILE))
    part.say(
        f"""The same {REQUESTS} requests. A server may let in whoever's prompt fits now, if it can
        take pages back: a preempted request loses its pages, keeps what it has said, and computes
        itself again later. Without that way back, hope kills."""
    )
    part.show(_table("Preemption", (hopeful, optimistic, ours)))
    part.claim(
        f"Without preemption {len(hopeful.run.dead)} answers die.", len(hopeful.run.dead) > 0
    )
    part.claim(
        f"With it nobody dies: {optimistic.run.preemptions} preemptions cost "
        f"{optimistic.recomputed:,} tokens computed twice.",
        not optimistic.run.dead
        and len(optimistic.run.complete) == REQUESTS
        and optimistic.run.preemptions > 0,
    )
    part.claim(
        f"Looking ahead needs less of it: {ours.run.preemptions} preemptions, "
        f"{ours.recomputed:,} tokens.",
        not ours.run.dead and ours.recomputed < optimistic.recomputed,
    )
    if model.exact:
        part.claim(
            "Who was preempted gets the tokens it would have got.",
            ours.run.tokens() == optimistic.run.tokens(),
        )
    part.say(
        """Why: lengths are not known beforehand, so some forecast will be wrong. Preemption is what
        makes a wrong forecast cost time and not answers."""
    )


def _asks(model: LabModel) -> list[Ask]:
    return make_asks(
        Uniform(6, 16), Lognormal(48, 0.5, 8, MAX_TOKENS), REQUESTS, model.vocab_size, seed=2,
        max_tokens=MAX_TOKENS,
    )  # fmt: skip


def _compare(model: LabModel, asks: list[Ask], policies: tuple[Policy, ...]) -> list[Served]:
    return compare(model, policies, asks, memory_tokens=MEMORY, max_model_len=LONGEST)


def _table(title: str, outcomes: tuple[Served, ...]) -> Table:
    return Table(
        title,
        ("", "complete", "died", "most at once", "steps", "preempted", "computed twice", "in vain"),
        tuple(
            (
                o.policy.name, len(o.run.complete), len(o.run.dead), o.run.peak_sequences,
                len(o.run.steps), o.run.preemptions, o.recomputed,
                sum(len(a.ask.prompt) + len(a.tokens) for a in o.run.dead),
            )
            for o in outcomes
        ),
        note="; ".join(f"{o.policy.name}: {o.policy.summary}" for o in outcomes)
        + ". In vain: tokens computed for those who died.",
    )  # fmt: skip


def _deaths(dead: list[Answer]) -> Table:
    listed = sorted(dead, key=lambda a: a.end_step)
    return Table(
        f"Who dies without admission control (the first {min(SHOWN, len(listed))})",
        ("", "at step", "had said", "of", "why"),
        tuple(
            (a.ask.id, a.end_step, len(a.tokens), a.ask.length, a.error or "")
            for a in listed[:SHOWN]
        ),
    )


def _memory(outcomes: tuple[Served, ...]) -> Plot:
    return Plot(
        f"Memory taken, of {MEMORY} tokens",
        "step",
        "tokens",
        tuple(
            Series(o.policy.name, range(len(o.run.steps)), [s.reserved for s in o.run.steps])
            for o in outcomes
        ),
        form="steps",
    )
