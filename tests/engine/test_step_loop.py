"""The step loop over a real tiny model: parameters, failures, cancels, scores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.serving import Engine
from tiny_models import make_tiny_llama
from turnstile.core.plan import Plan
from turnstile.engine.executor import ChunkResult
from turnstile.engine.protocol import Cancel

PROMPT = list(range(30, 60))


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    torch.set_num_threads(1)
    return Engine(make_tiny_llama(tmp_path))


def test_a_bias_forces_a_token_and_bans_all_but_one(engine: Engine) -> None:
    engine.submit("forced", PROMPT, logit_bias={17: 100.0})
    engine.submit("allowed", PROMPT, allowed_token_ids=[5, 6], temperature=1.0)
    answers = engine.run()
    assert answers["forced", 0].tokens == [17] * 12
    assert set(answers["allowed", 0].tokens) <= {5, 6}


def test_tiny_temperatures_are_greedy_and_hot_ones_differ_by_seed(engine: Engine) -> None:
    for name, temperature in (("greedy", 0.0), ("tiny", 1e-45), ("small", 1e-6)):
        engine.submit(name, PROMPT, temperature=temperature)
    engine.submit("hot1", PROMPT, temperature=1.0, seed=1)
    engine.submit("hot2", PROMPT, temperature=1.0, seed=2)
    answers = {key[0]: a.tokens for key, a in engine.run().items()}
    assert answers["greedy"] == answers["tiny"] == answers["small"]
    assert answers["hot1"] != answers["hot2"]


def test_top_k_of_one_is_greedy_and_top_p_stays_among_the_likeliest(engine: Engine) -> None:
    engine.submit("greedy", PROMPT)
    engine.submit("one", PROMPT, temperature=1.0, top_k=1, seed=3)
    engine.submit("narrow", PROMPT, temperature=1.0, top_p=1e-6, seed=4)
    engine.submit("floor", PROMPT, temperature=1.0, min_p=1.0, seed=5)
    answers = {key[0]: a.tokens for key, a in engine.run().items()}
    assert answers["greedy"] == answers["one"] == answers["narrow"] == answers["floor"]


def test_a_frequency_penalty_ends_a_loop(engine: Engine) -> None:
    engine.submit("loop", PROMPT, max_tokens=30)
    engine.submit("penalized", PROMPT, max_tokens=30, frequency_penalty=2.0)
    answers = engine.run()
    repeats = {name: max(map(a.tokens.count, a.tokens)) for (name, _), a in answers.items()}
    assert repeats["penalized"] < repeats["loop"]


def test_stop_tokens_wait_for_min_tokens(engine: Engine) -> None:
    engine.submit("free", PROMPT)
    first = engine.run()["free", 0].tokens[0]
    engine.submit("stopped", PROMPT, stop_token_ids=[first])
    engine.submit("later", PROMPT, stop_token_ids=[first], min_tokens=5)
    answers = engine.run()
    assert answers["stopped", 0].tokens == [first]
    assert answers["stopped", 0].finish == "stop"
    assert len(answers["later", 0].tokens) >= 5
    assert first not in answers["later", 0].tokens[:5]


def test_prompt_scores_equal_those_of_drawing_the_same_tokens(engine: Engine) -> None:
    engine.submit("drawn", PROMPT, max_tokens=6, logprobs=0)
    drawn = engine.run()["drawn", 0]
    engine.submit("scored", [*PROMPT, *drawn.tokens], max_tokens=1, prompt_logprobs=1)
    scored = engine.run()["scored", 0]
    assert len(scored.prompt_logprobs) == len(PROMPT) + 5
    assert [p.logprob for p in scored.prompt_logprobs[-6:]] == [p.logprob for p in drawn.logprobs]
    assert all(len(p.top) == 1 for p in scored.prompt_logprobs)


def test_a_failing_step_costs_only_the_request_that_fails_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(6):
        engine.submit(f"r{i}", [*PROMPT, i])
    healthy = engine.run()
    expected = {name: a.tokens for (name, _), a in healthy.items()}
    real = engine.loop.executor.execute

    def execute(plan: Plan) -> list[ChunkResult]:
        if any(c.sequence.request.id == "bad" for c in plan.chunks):
            raise RuntimeError("boom")
        return real(plan)

    monkeypatch.setattr(engine.loop.executor, "execute", execute)
    engine.answers.clear()
    engine.submit("bad", PROMPT)
    for i in range(6):
        engine.submit(f"r{i}", [*PROMPT, i])
    answers = engine.run()
    assert answers["bad", 0].finish == "error"
    assert answers["bad", 0].error
    assert {n: a.tokens for (n, _), a in answers.items() if n != "bad"} == expected
    assert engine.snapshot.pages_held == 0


def test_a_cancelled_request_frees_its_pages_before_the_next_step(engine: Engine) -> None:
    engine.submit("gone", PROMPT, max_tokens=100)
    for _ in range(3):
        engine.loop.step()
    assert engine.snapshot.pages_held > 0
    engine.loop.apply(Cancel("gone"))
    assert engine.snapshot.pages_held == 0
    engine.run()
    assert not engine.loop.has_work


def test_a_request_that_never_fits_is_answered_with_an_error(engine: Engine) -> None:
    engine.submit("huge", PROMPT, max_tokens=10**6)
    engine.submit("fine", PROMPT)
    answers = engine.run()
    assert answers["huge", 0].finish == "error"
    assert "maximum context length" in (answers["huge", 0].error or "")
    assert answers["fine", 0].finish == "length"
