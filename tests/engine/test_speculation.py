"""Drafts in the engine: they change when tokens come, and never which."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest

from engine.serving import Answer, Engine
from tiny_models import make_tiny_llama
from turnstile.engine.config import EngineConfig, EngineConfigError
from turnstile.engine.speculation import SpeculativeConfig, drafter_of, speculation_of
from turnstile.kernels import native
from turnstile.kernels.base import FlatBatch, FloatArray, Opaque
from turnstile.models.decoder import Decoder

NATIVE = native.available()[0]
BACKENDS = [("reference", "float32"), *([("native", "int8")] if NATIVE else [])]
LOOP = random.Random(3).choices(range(200), k=9)
TOKENS = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


def ask_all(engine: Engine, rng: random.Random) -> None:
    """Requests of every kind that is told of tokens: text that repeats itself, and that does not,
    greedy and drawn, several samples, and those whose draws remember what came before.
    """
    prompts = [LOOP * 6, LOOP[:4] * 9, [rng.randrange(200) for _ in range(40)], LOOP]
    for number, prompt in enumerate(prompts):
        name = f"p{number}"
        engine.submit(f"{name}-greedy", prompt, max_tokens=TOKENS)
        engine.submit(f"{name}-cold", prompt, max_tokens=TOKENS, temperature=0.05, seed=number)
        engine.submit(f"{name}-pair", prompt, max_tokens=20, temperature=1.0, seed=number, n=2)
        engine.submit(f"{name}-penalty", prompt, max_tokens=TOKENS, repetition_penalty=1.2)
        engine.submit(f"{name}-least", prompt, max_tokens=TOKENS, min_tokens=30)
        engine.submit(f"{name}-bias", prompt, max_tokens=TOKENS, logit_bias={7: 2.0})


def answers(seed: int, **config: object) -> tuple[dict[tuple[str, int], Answer], Engine]:
    engine = Engine(**config)  # type: ignore[arg-type]
    ask_all(engine, random.Random(seed))
    return engine.run(), engine


def rows_of(engine: Engine, kind: str) -> int:
    """Rows that brought tokens to requests of a kind."""
    rows = [row for result in engine.results for row in result.rows if row.tokens]
    return sum(row.request_id.endswith(kind) for row in rows)


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@pytest.mark.parametrize("tokens", [1, 8])
def test_answers_and_their_log_probabilities_are_those_without_drafts(
    model: Path, backend: str, dtype: str, tokens: int
) -> None:
    common: dict[str, object] = {"model": model, "backend": backend, "dtype": dtype}
    plain, before = answers(1, **common)
    drafted, after = answers(1, **common, spec_method="ngram", spec_tokens=tokens)
    assert drafted == plain
    snapshot = after.snapshot
    assert 0 < snapshot.accepted_tokens <= snapshot.draft_tokens
    assert snapshot.drafts > 10
    places = snapshot.accepted_by_place
    assert len(places) == tokens
    assert sum(places) == snapshot.accepted_tokens
    assert places == sorted(places, reverse=True), "no guess is right behind a wrong one"
    assert places[0] <= snapshot.drafts
    assert rows_of(after, "greedy") < rows_of(before, "greedy") == 4 * TOKENS
    assert before.snapshot.drafts == 0
    assert before.snapshot.accepted_by_place == []
    assert snapshot.pages_held == 0


def test_in_a_tiny_pool_as_well(model: Path) -> None:
    common: dict[str, object] = {"model": model, "backend": "reference", "dtype": "float32"}
    plain, _ = answers(2, **common)
    tight = {"num_pages": 16, "max_model_len": 128, "max_num_seqs": 6}
    drafted, engine = answers(2, **common, **tight, spec_method="ngram")
    for name, answer in drafted.items():
        assert (answer.tokens, answer.logprobs) == (plain[name].tokens, plain[name].logprobs)
    assert engine.snapshot.accepted_tokens > 0
    assert engine.snapshot.pages_held == 0


def test_every_row_says_how_many_drafts_it_verified(model: Path) -> None:
    drafted, engine = answers(1, model=model, spec_method="ngram")
    rows = [row for result in engine.results for row in result.rows]
    assert sum(row.drafted for row in rows) == engine.snapshot.draft_tokens
    assert all(len(row.tokens) <= row.drafted + 1 for row in rows)
    remembering = [row for row in rows if row.request_id.endswith(("penalty", "least"))]
    assert remembering
    assert not any(row.drafted for row in remembering)
    assert drafted


def test_bad_logits_behind_a_wrong_guess_fail_nobody(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are they looked at: without the guess they would not have been computed."""
    plain, _ = answers(1, model=model)
    forward, spoiled = Decoder.forward, 0

    def spoil(decoder: Decoder, batch: FlatBatch, kv: Opaque) -> FloatArray:
        nonlocal spoiled
        logits = forward(decoder, batch, kv)
        likeliest = logits.argmax(axis=1)
        wrong = False
        for row, (before, at) in enumerate(itertools.pairwise(batch.logit_rows), 1):
            follows = at == before + 1 and batch.sequence_of[at] == batch.sequence_of[before]
            wrong = follows and (wrong or batch.ids[at] != likeliest[row - 1])
            if wrong:
                logits[row] = math.nan
                spoiled += 1
        return logits

    monkeypatch.setattr(Decoder, "forward", spoil)
    engine = Engine(model, spec_method="ngram")
    for number, prompt in enumerate([LOOP * 6, LOOP[:4] * 9]):
        engine.submit(f"p{number}-greedy", prompt, max_tokens=TOKENS)
    for name, answer in engine.run().items():
        assert answer == plain[name]
    assert spoiled


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"spec_tokens": 4}, "--spec-method"),
        ({"spec_method": "ngram", "spec_tokens": 0}, "between 1 and 32, not 0"),
        ({"spec_method": "ngram", "spec_tokens": 33}, "between 1 and 32, not 33"),
        ({"speculative_config": "{"}, "--speculative-config"),
        ({"speculative_config": "[]"}, "--speculative-config"),
        ({"speculative_config": '{"method": "eagle"}'}, "'eagle'"),
        ({"speculative_config": '{"model": "x"}'}, "model"),
        ({"speculative_config": '{"num_speculative_tokens": "5"}'}, "num_speculative_tokens"),
        ({"speculative_config": '{"prompt_lookup_max": 2}'}, "prompt_lookup_max (2)"),
        ({"speculative_config": '{"prompt_lookup_min": 0}'}, "prompt_lookup_min must be between"),
        ({"speculative_config": "{}", "spec_method": "ngram"}, "--spec-method"),
    ],
)
def test_flags_that_cannot_work_are_refused_by_name(flags: dict[str, object], words: str) -> None:
    with pytest.raises(EngineConfigError) as caught:
        EngineConfig(**flags).check()  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_the_flags_and_the_json_say_the_same() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'
    by_json = speculation_of(EngineConfig(speculative_config=text))
    assert by_json == SpeculativeConfig(num_speculative_tokens=5, prompt_lookup_max=4)
    by_flags = speculation_of(EngineConfig(spec_method="ngram", spec_tokens=5))
    assert by_flags == SpeculativeConfig(num_speculative_tokens=5)
    assert drafter_of(EngineConfig(speculative_config='{"method": "none"}')) is None
    assert drafter_of(EngineConfig()) is None
