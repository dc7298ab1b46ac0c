"""The same request gives the same tokens and log-probabilities, whatever happens around it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from engine.serving import Answer, Engine
from tiny_models import make_tiny_llama
from turnstile.kernels import native

NATIVE = native.available()[0]
BACKENDS = [("reference", "float32"), *([("native", "int8")] if NATIVE else [])]
SAMPLED = {"temperature": 1.0, "seed": 11}
RNG = random.Random(5)
PROMPT = [RNG.randrange(200) for _ in range(70)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def ask(engine: Engine, name: str = "me") -> None:
    engine.submit(f"{name}-greedy", PROMPT)
    engine.submit(f"{name}-sampled", PROMPT, **SAMPLED)


def mine(engine: Engine, name: str = "me") -> list[Answer]:
    answers = engine.run()
    found = [answers[f"{name}-greedy", 0], answers[f"{name}-sampled", 0]]
    assert all(a.finish == "length" and len(a.tokens) == 12 for a in found)
    assert all(len(a.logprobs) == 12 and len(a.logprobs[0].top) == 2 for a in found)
    for answer in found:
        answer.cached = 0
    return found


@pytest.fixture(scope="module", params=BACKENDS, ids=lambda p: p[0])
def setup(request: pytest.FixtureRequest, model: Path) -> tuple[dict[str, object], list[Answer]]:
    backend, dtype = request.param
    config: dict[str, object] = {"model": model, "backend": backend, "dtype": dtype}
    alone = Engine(**config)  # type: ignore[arg-type]
    ask(alone)
    return config, mine(alone)


def crowd(engine: Engine, count: int) -> None:
    rng = random.Random(1)
    for i in range(count):
        prompt = [rng.randrange(200) for _ in range(rng.randint(1, 90))]
        engine.submit(f"other{i}", prompt, max_tokens=rng.randint(1, 30), temperature=i % 2, seed=i)


def test_alone_and_in_a_crowd(setup: tuple[dict[str, object], list[Answer]]) -> None:
    config, alone = setup
    engine = Engine(**config)  # type: ignore[arg-type]
    crowd(engine, 25)
    ask(engine)
    crowd_after = max(len(r.members) for r in engine.results) if engine.results else 0
    assert mine(engine) == alone
    assert max(len(r.members) for r in engine.results) > max(20, crowd_after)


@pytest.mark.parametrize("budget", [64, 65, 97])
def test_cut_into_chunks_of_any_size(
    setup: tuple[dict[str, object], list[Answer]], budget: int
) -> None:
    config, alone = setup
    engine = Engine(**config, max_num_batched_tokens=budget)  # type: ignore[arg-type]
    engine.submit("long", PROMPT[::-1] * 3, max_tokens=20)
    ask(engine)
    assert mine(engine) == alone
    prefills = [e[1] for r in engine.results for e in r.events if e[0] == "Stepped"]
    assert sum(1 for e in prefills if e[3]) >= 3, "the prompts were computed in several chunks"


def test_from_a_warm_prefix_cache(setup: tuple[dict[str, object], list[Answer]]) -> None:
    config, alone = setup
    engine = Engine(**config)  # type: ignore[arg-type]
    ask(engine, "first")
    engine.run()
    ask(engine)
    assert mine(engine) == alone
    assert engine.snapshot.prefix_hits >= 2 * 64


def test_preempted_and_resumed(setup: tuple[dict[str, object], list[Answer]]) -> None:
    config, alone = setup
    engine = Engine(**config, num_pages=14, max_model_len=200)  # type: ignore[arg-type]
    engine.loop.scheduler.admission.remaining = lambda sequence: 1  # type: ignore[method-assign]
    rng = random.Random(2)
    for i in range(4):
        engine.submit(f"old{i}", [rng.randrange(200) for _ in range(20)], max_tokens=60)
    ask(engine)
    for i in range(4):
        engine.submit(f"new{i}", [rng.randrange(200) for _ in range(20)], max_tokens=60)
    assert mine(engine) == alone
    assert engine.snapshot.preemptions > 0
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
    crowd(crowded, 25)
    ask(crowded)
    assert mine(alone) != mine(crowded), "the tests above could not fail"
