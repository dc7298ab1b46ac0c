"""A sample that comes back with the outputs it has already goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.serving import Answer, Engine
from tiny_models import make_tiny_llama
from turnstile.engine.params import SamplingParams
from turnstile.engine.protocol import Submit

PROMPT = [3 + (7 * i * i + 3 * i) % 250 for i in range(75)]
GREEDY = SamplingParams(temperature=0.0, logprobs=2)
DRAWN = SamplingParams(temperature=1.0, logprobs=2)
PENALIZED = SamplingParams(temperature=0.8, logprobs=2, frequency_penalty=1.5, presence_penalty=1.0)
ALL = pytest.mark.parametrize(
    "params", [GREEDY, DRAWN, PENALIZED], ids=["greedy", "drawn", "penalized"]
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


def undisturbed(model: Path, params: SamplingParams, n: int = 1) -> list[Answer]:
    engine = Engine(model)
    engine.loop.apply(Submit("me", PROMPT, params, 24, seed=11, n=n))
    answers = engine.run()
    return [answers["me", i] for i in range(n)]


def resumed(
    model: Path, params: SamplingParams, outputs: list[int], index: int = 0, **config: object
) -> Answer:
    """What a new engine makes of the rest, beside others and in chunks."""
    engine = Engine(model, max_num_seqs=8, max_num_batched_tokens=20, **config)
    engine.submit("other", PROMPT[::-1], max_tokens=30)
    engine.answers["me", index] = Answer(tokens=list(outputs))
    engine.loop.apply(
        Submit("me", PROMPT, params, 24, seed=11, sample_index=index, outputs=outputs, charged=75.0)
    )
    return engine.run()["me", index]


@ALL
@pytest.mark.parametrize("at", [1, 13, 23])
def test_the_rest_is_the_same_in_every_bit(model: Path, params: SamplingParams, at: int) -> None:
    (whole,) = undisturbed(model, params)
    assert len(set(whole.tokens)) > 4, "a model that repeats itself proves little"
    rest = resumed(model, params, whole.tokens[:at])
    assert rest.tokens == whole.tokens
    assert rest.logprobs == whole.logprobs[at:]
    assert rest.finish == whole.finish


@ALL
def test_each_sample_of_a_group_can_come_back_alone(model: Path, params: SamplingParams) -> None:
    whole = undisturbed(model, params, n=3)
    assert len({tuple(answer.tokens) for answer in whole}) == (1 if params.greedy else 3)
    for index in (2, 1, 0):
        rest = resumed(model, params, whole[index].tokens[:5], index)
        assert rest.tokens == whole[index].tokens
        assert rest.logprobs == whole[index].logprobs[5:]


def test_what_was_paid_is_not_paid_again(model: Path) -> None:
    (whole,) = undisturbed(model, GREEDY)
    engine = Engine(model)
    engine.answers["me", 0] = Answer(tokens=whole.tokens[:20])
    engine.loop.apply(
        Submit("me", PROMPT, GREEDY, 24, seed=11, outputs=whole.tokens[:20], charged=115.0)
    )
    engine.run()
    last = [row for result in engine.results for row in result.rows][-1]
    assert last.charged == 115.0 + 2 * 4


def test_prompt_scores_are_the_same_in_chunks(model: Path) -> None:
    whole, cut = Engine(model), Engine(model, max_num_seqs=8, max_num_batched_tokens=10)
    for engine in (whole, cut):
        engine.submit("me", PROMPT, prompt_logprobs=2, max_tokens=1)
        assert len(engine.run()["me", 0].prompt_logprobs) == len(PROMPT) - 1
    assert sum(bool(row.prompt_logprobs) for result in cut.results for row in result.rows) >= 8
    assert cut.answers == whole.answers
