"""The failure unit is the request: what of a step goes wrong, and whose answer it ends.

Each test lets one request fail beside five that must not notice, over a real tiny model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.serving import Answer, Engine
from tiny_models import make_tiny_llama
from turnstile.core.plan import Plan
from turnstile.core.request import Sequence
from turnstile.engine.executor import ChunkResult
from turnstile.engine.params import SamplingParams
from turnstile.engine.runner import Runner
from turnstile.engine.sampler import BAD_LOGITS
from turnstile.kernels.base import FlatBatch, FloatArray
from turnstile.text.errors import GrammarError
from turnstile.text.grammar import GrammarState

PROMPT = list(range(30, 60))
REGEX = "%llguidance {}\nstart: /[a-z]+/"


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    torch.set_num_threads(1)
    return Engine(make_tiny_llama(tmp_path))


def crowd(engine: Engine) -> None:
    """Five requests; two of them fork from a page that is partly full."""
    for k in range(4):
        engine.submit(f"r{k}", [*PROMPT, k], temperature=float(k % 2), seed=k)
    engine.submit("pair", PROMPT[:21], n=2, temperature=1.0)


def beside(engine: Engine, misfortune: Callable[[], None]) -> dict[tuple[str, int], Answer]:
    """The answers of a crowd in which something goes wrong, once they are known to be the same as
    without it; the pool's books balance after every step.
    """
    crowd(engine)
    expected = {key: (a.tokens, a.logprobs, a.finish) for key, a in engine.run().items()}
    engine.answers.clear()
    misfortune()
    crowd(engine)
    answers = engine.run()
    got = {key: (a.tokens, a.logprobs, a.finish) for key, a in answers.items() if key in expected}
    assert got == expected
    assert engine.snapshot.pages_held == 0
    return answers


def runner_of(engine: Engine) -> Runner:
    runner = engine.loop.executor
    assert isinstance(runner, Runner)
    return runner


def holds(plan: Plan, name: str) -> bool:
    return any(chunk.sequence.request.id == name for chunk in plan.chunks)


def test_a_row_of_nan_ends_its_request_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(engine)
    execute, forward = runner.execute, runner._decoder.forward
    plans: list[Plan] = []

    def watched(plan: Plan) -> list[ChunkResult]:
        plans.append(plan)
        return execute(plan)

    def poisoned(batch: FlatBatch, kv: object) -> FloatArray:
        logits = forward(batch, kv)  # type: ignore[arg-type]
        row = 0
        for chunk in plans[-1].chunks:
            if chunk.sequence.request.id == "bad" and chunk.sequence.num_outputs == 2:
                logits[row] = np.nan
            row += bool(chunk.samples)
        return logits

    monkeypatch.setattr(runner, "execute", watched)
    monkeypatch.setattr(runner._decoder, "forward", poisoned)
    answers = beside(engine, lambda: engine.submit("bad", PROMPT))
    assert answers["bad", 0].error == BAD_LOGITS
    assert len(answers["bad", 0].tokens) == 2
    assert engine.snapshot.bad_rows == 1


def test_a_grammar_that_cannot_be_followed_ends_its_request_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill, calls = GrammarState.fill_mask, []

    def failing(state: GrammarState, mask: object) -> None:
        calls.append(state)
        if len(calls) == 3:
            raise GrammarError("the grammar cannot be followed: a test says so")
        fill(state, mask)  # type: ignore[arg-type]

    monkeypatch.setattr(GrammarState, "fill_mask", failing)
    answers = beside(engine, lambda: engine.submit("bad", PROMPT, grammar=REGEX))
    assert "cannot be followed" in (answers["bad", 0].error or "")
    assert len(answers["bad", 0].tokens) == 2


@pytest.mark.parametrize("error", [GrammarError("it does not compile"), RuntimeError("boom")])
def test_a_request_that_cannot_be_set_up_ends_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    runner = runner_of(engine)
    add = runner.add

    def failing(sequence: Sequence, params: SamplingParams, seed: int) -> None:
        if sequence.request.id == "bad":
            raise error
        add(sequence, params, seed)

    monkeypatch.setattr(runner, "add", failing)
    answers = beside(engine, lambda: engine.submit("bad", PROMPT))
    expected = "it does not compile" if isinstance(error, GrammarError) else "RuntimeError"
    assert expected in (answers["bad", 0].error or "")


def test_a_request_that_no_door_should_have_let_in_ends_alone(engine: Engine) -> None:
    answers = beside(engine, lambda: engine.submit("bad", PROMPT, max_tokens="many"))  # type: ignore[arg-type]
    assert answers["bad", 0].finish == "error"
    assert "could not be set up (TypeError)" in (answers["bad", 0].error or "")


@pytest.mark.parametrize("at", [0, 3])
def test_a_request_that_makes_every_step_raise_ends_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    runner = runner_of(engine)
    execute = runner.execute

    def raising(plan: Plan) -> list[ChunkResult]:
        if holds(plan, "bad") and any(
            c.sequence.request.id == "bad" and c.sequence.num_outputs == at for c in plan.chunks
        ):
            raise RuntimeError("boom")
        return execute(plan)

    monkeypatch.setattr(runner, "execute", raising)
    answers = beside(engine, lambda: engine.submit("bad", PROMPT))
    assert "RuntimeError" in (answers["bad", 0].error or "")
    assert len(answers["bad", 0].tokens) == at


def test_a_step_that_raises_once_costs_nobody_anything(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it computes anything and after it has drawn: a plan can be executed again, and the
    page copies of a fork, which cannot be made twice, are not lost.
    """
    runner = runner_of(engine)
    execute = runner.execute
    failed: list[Plan] = []

    def raising(plan: Plan) -> list[ChunkResult]:
        first = plan.copies and not failed
        second = len(failed) == 1 and len(plan.chunks) > 4
        if first:
            failed.append(plan)
            raise RuntimeError("before")
        results = execute(plan)
        if second:
            failed.append(plan)
            raise RuntimeError("after")
        return results

    def misfortune() -> None:
        monkeypatch.setattr(runner, "execute", raising)

    beside(engine, misfortune)
    assert len(failed) == 2
    assert failed[0].copies
    assert engine.snapshot.bad_rows == 0


def test_leaving_is_told_at_once_even_where_nothing_runs_any_more(engine: Engine) -> None:
    from turnstile.engine.protocol import Cancel

    engine.submit("gone", PROMPT, max_tokens=100)
    for _ in range(3):
        engine.loop.step()
    engine.loop.apply(Cancel("gone"))
    assert engine.loop.has_work
    engine.loop.step()
    assert engine.results[-1].snapshot.pages_held == 0
    assert engine.results[-1].snapshot.running == 0
    assert not engine.loop.has_work
