"""The same request gives the same tokens and log-probabilities, whatever happens around it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from engine.serving import Answer, Engine
from tiny_models import make_tiny_llama
from turnstile.engine.protocol import StepResult
from turnstile.kernels import native

NATIVE = native.available()[0]
BACKENDS = [("reference", "float32"), *([("native", "int8")] if NATIVE else [])]
SAMPLED = {"temperature": 1.0, "seed": 11}
OTHERS = 50
MINE = ("me-greedy", "me-sampled")
RNG = random.Random(5)
PROMPT = [RNG.randrange(200) for _ in range(70)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def ask(engine: Engine, name: str = "me", priority: int = 0) -> None:
    engine.submit(f"{name}-greedy", PROMPT, priority=priority)
    engine.submit(f"{name}-sampled", PROMPT, priority=priority, **SAMPLED)


def mine(engine: Engine, name: str = "me", cached: list[int] | None = None) -> list[Answer]:
    """The answers to :func:`ask`; how much of each prompt was cached goes into ``cached``."""
    answers = engine.run()
    found = [answers[f"{name}-greedy", 0], answers[f"{name}-sampled", 0]]
    assert all(a.finish == "length" and len(a.tokens) == 12 for a in found)
    assert all(len(a.logprobs) == 12 and len(a.logprobs[0].top) == 2 for a in found)
    for answer in found:
        if cached is not None:
            cached.append(answer.cached)
        answer.cached = 0
    return found


@pytest.fixture(scope="module", params=BACKENDS, ids=lambda p: p[0])
def setup(request: pytest.FixtureRequest, model: Path) -> tuple[dict[str, object], list[Answer]]:
    backend, dtype = request.param
    config: dict[str, object] = {"model": model, "backend": backend, "dtype": dtype}
    alone = Engine(**config)  # type: ignore[arg-type]
    ask(alone)
    return config, mine(alone)


def crowd(engine: Engine) -> None:
    """Fifty others, of all lengths, who stay for the whole time."""
    rng = random.Random(1)
    for i in range(OTHERS):
        prompt = [rng.randrange(200) for _ in range(rng.choice([1, 15, 16, 17, 40]))]
        engine.submit(
            f"other{i}", prompt, max_tokens=rng.randint(30, 45), temperature=i % 2, seed=i
        )


def steps_of(engine: Engine, name: str) -> list[StepResult]:
    return [result for result in engine.results if (name, 0) in result.members]


def test_a_request_among_fifty_others_gets_the_tokens_it_gets_alone(
    setup: tuple[dict[str, object], list[Answer]],
) -> None:
    config, alone = setup
    engine = Engine(**config)  # type: ignore[arg-type]
    crowd(engine)
    ask(engine)
    assert mine(engine) == alone
    for name in MINE:
        beside = [len(result.members) - 1 for result in steps_of(engine, name)]
        assert sum(others >= OTHERS for others in beside) >= 8, "most steps were shared by all"


@pytest.mark.parametrize("budget", [8, 9, 31, 64])
def test_a_prompt_cut_into_chunks_of_any_size_gets_the_tokens_it_gets_whole(
    setup: tuple[dict[str, object], list[Answer]], budget: int
) -> None:
    config, alone = setup
    engine = Engine(
        **config,  # type: ignore[arg-type]
        max_num_batched_tokens=budget, max_num_seqs=8, enable_prefix_caching=False,
    )  # fmt: skip
    engine.submit("long", PROMPT[::-1] * 3, max_tokens=20)
    ask(engine)
    assert mine(engine) == alone
    for name in MINE:
        # The last chunk draws the first of the 12 tokens.
        chunks = len(steps_of(engine, name)) - 11
        assert chunks >= max(2, len(PROMPT) // budget), "the prompt was computed in several chunks"


def test_a_prompt_from_the_prefix_cache_gets_the_tokens_it_gets_computed(
    setup: tuple[dict[str, object], list[Answer]],
) -> None:
    config, alone = setup
    engine = Engine(**config)  # type: ignore[arg-type]
    ask(engine, "first")
    engine.run()
    ask(engine)
    cached: list[int] = []
    assert mine(engine, cached=cached) == alone
    assert cached == [64, 64], "all full pages of the prompt came from the cache"


def test_a_preempted_request_gets_the_tokens_it_gets_alone(
    setup: tuple[dict[str, object], list[Answer]],
) -> None:
    config, alone = setup
    engine = Engine(**config, num_pages=14, max_model_len=200)  # type: ignore[arg-type]
    engine.loop.scheduler.admission.remaining = lambda sequence: 1  # type: ignore[method-assign]
    rng = random.Random(2)
    for i in range(4):
        engine.submit(f"old{i}", [rng.randrange(200) for _ in range(29)], max_tokens=60)
    ask(engine, priority=1)
    for _ in range(3):
        engine.loop.step()
    for i in range(4):
        engine.submit(f"new{i}", [rng.randrange(200) for _ in range(20)], max_tokens=60)
    assert mine(engine) == alone
    preempted = {e[1][1] for r in engine.results for e in r.events if e[0] == "Preempted"}
    assert preempted.issuperset(MINE), "both had to begin again"
    assert engine.snapshot.pages_held == 0


def test_forks_draw_what_single_samples_draw(
    setup: tuple[dict[str, object], list[Answer]],
) -> None:
    config, _ = setup
    engine = Engine(**config)  # type: ignore[arg-type]
    engine.submit("group", PROMPT, n=3, temperature=1.0, seed=11)
    answers = engine.run()
    assert len({tuple(answers["group", i].tokens) for i in range(3)}) == 3
    assert answers["group", 0].tokens == setup[1][1].tokens


def test_plain_products_do_depend_on_the_crowd(model: Path) -> None:
    config: dict[str, object] = {"model": model, "exact": False}
    alone, crowded = Engine(**config), Engine(**config)  # type: ignore[arg-type]
    ask(alone)
    crowd(crowded)
    ask(crowded)
    assert mine(alone) != mine(crowded), "the tests above could not fail"
