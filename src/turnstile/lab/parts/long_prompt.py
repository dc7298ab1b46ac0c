"""Break it: a long prompt in one piece, while others stream."""

from __future__ import annotations

from turnstile.bench.lengths import Fixed
from turnstile.lab.drive import Run
from turnstile.lab.load import Ask, arriving, make_asks
from turnstile.lab.model import LabModel
from turnstile.lab.parts.common import Served, compare
from turnstile.lab.policies import TURNSTILE, WHOLE_PROMPTS
from turnstile.lab.story import Part, Plot, Series, Table

STREAMS = 6
LONG = 1200
BUDGET = 64
LONGEST = 1280


def run(model: LabModel, part: Part) -> None:
    """The same long prompt, whole and in chunks."""
    whole, chunks = compare(
        model, (WHOLE_PROMPTS, TURNSTILE), _asks(model), memory_tokens=2 * LONGEST,
        max_model_len=LONGEST, slots=8, budget=BUDGET,
    )  # fmt: skip
    part.say(
        f"""{STREAMS} answers stream when a prompt of {LONG:,} tokens arrives, and right behind it a
        short question. Computed in one piece, the prompt is one step that everybody waits for. In
        chunks, no step computes more than {BUDGET} tokens, and the short question goes first."""
    )
    part.show(_cost(whole, chunks))
    part.show(_steps(whole, chunks))
    part.claim(
        f"In one piece the prompt is a step of {_largest(whole.run):,} tokens; in chunks no step "
        f"has more than {BUDGET}.",
        _largest(whole.run) > LONG and _largest(chunks.run) <= BUDGET,
    )
    part.claim(
        f"Between two tokens of a stream the machine computes up to {_stall(whole.run):,} tokens "
        f"with the prompt in one piece, and {_stall(chunks.run)} with chunks.",
        10 * _stall(chunks.run) < _stall(whole.run),
    )
    if model.exact:
        part.claim("Cutting a prompt changes no token.", whole.run.tokens() == chunks.run.tokens())
    part.say(
        """Why: a step takes as long as the tokens in it, for everybody in it. The token budget
        bounds what anybody can do to everybody else."""
    )


def _asks(model: LabModel) -> list[Ask]:
    streams = make_asks(Fixed(8), Fixed(64), STREAMS, model.vocab_size, seed=1, name="s")
    novel = make_asks(Fixed(LONG), Fixed(8), 1, model.vocab_size, seed=2, name="long")
    short = make_asks(Fixed(8), Fixed(4), 1, model.vocab_size, seed=3, name="short")
    return [*streams, *arriving(novel, [10]), *arriving(short, [10])]


def _steps(whole: Served, chunks: Served) -> Plot:
    return Plot(
        "Tokens computed in each step",
        "step",
        "tokens",
        tuple(
            Series(name, range(len(o.run.steps)), [s.computed for s in o.run.steps])
            for name, o in (("whole", whole), ("chunks", chunks))
        ),
        form="steps",
    )


def _cost(whole: Served, chunks: Served) -> Table:
    rows = []
    for name, outcome in (("whole", whole), ("chunks", chunks)):
        rows.append(
            (
                name, len(outcome.run.steps), _largest(outcome.run), _stall(outcome.run),
                1000 * max(_gaps(outcome.run)), _behind(outcome.run, "short0"),
                _behind(outcome.run, "long0"),
            )
        )  # fmt: skip
    return Table(
        "A long prompt among streams",
        (
            "", "steps", "largest step", "longest gap", "longest gap, ms", "short one's wait",
            "long one's wait",
        ),
        tuple(rows),
        note="In tokens that the machine computes meanwhile, unless said otherwise: the largest "
        "step, the longest time between two tokens of a stream, the time from arrival to the "
        "first token. Milliseconds as measured here, once.",
    )  # fmt: skip


def _largest(run: Run) -> int:
    return max(step.computed for step in run.steps)


def _stall(run: Run) -> int:
    """Most tokens computed from one token of a stream to its next, that one's step included."""
    done = [0]
    for step in run.steps:
        done.append(done[-1] + step.computed)
    return max(
        done[b] - done[a]
        for answer in run.answers.values()
        if answer.ask.id.startswith("s") and answer.ask.id != "short0"
        for a, b in zip(answer.steps, answer.steps[1:], strict=False)
    )


def _gaps(run: Run) -> list[float]:
    return [
        b - a
        for answer in run.answers.values()
        for a, b in zip(answer.seconds, answer.seconds[1:], strict=False)
    ]


def _behind(run: Run, name: str) -> int:
    """Tokens computed from a request's arrival to its first token."""
    answer = run.answers[name]
    return sum(step.computed for step in run.steps[answer.arrival_step : answer.steps[0]])
