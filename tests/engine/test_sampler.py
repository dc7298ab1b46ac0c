"""Draws depend on their own row, parameters, seed, sample and position, and on nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from turnstile.core.request import Request, Sequence
from turnstile.engine.constraints import Job
from turnstile.engine.params import ParameterError, SamplingParams
from turnstile.engine.randomness import uniform
from turnstile.engine.sampler import BAD_LOGITS, NOTHING_ALLOWED, Draw, Drawn, Sampler, _pick
from turnstile.kernels import create_backend

VOCAB = 1000


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    return Sampler(create_backend(name="reference"))


def job(
    outputs: list[int] | None = None, seed: int = 5, stop_ids: object = (), **params: object
) -> Job:
    request = Request(
        id="r",
        prompt=(1, 2, 3),
        max_tokens=50,
        stop_ids=frozenset(stop_ids),  # type: ignore[call-overload]
    )
    return Job(Sequence(request, 0, outputs or ()), SamplingParams(**params), seed)  # type: ignore[arg-type]


def row(seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed))


def draw_all(sampler: Sampler, logits: torch.Tensor, draws: list[Draw]) -> list[Drawn]:
    rows = logits.numpy()
    return sampler.draw(rows, sampler.likeliest(rows), draws)


def draw(sampler: Sampler, logits: torch.Tensor, one: Job, position: int = 0) -> Drawn:
    return draw_all(sampler, logits, [Draw(one, 0, 0, position)])[0]


def frequencies(
    sampler: Sampler, logits: torch.Tensor, one: Job, count: int = 4000
) -> Counter[int]:
    draws = draw_all(sampler, logits, [Draw(one, 0, 0, position) for position in range(count)])
    return Counter(drawn.token for drawn in draws)


def test_temperatures_near_zero_are_greedy(sampler: Sampler) -> None:
    logits = row() * 1e4
    for temperature in (0.0, 1e-9, 1e-5, 1e-4):
        assert draw(sampler, logits, job(temperature=temperature)).token == int(logits.argmax())


def test_draws_follow_the_softmax(sampler: Sampler) -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, [10, 20, 30]] = torch.log(torch.tensor([0.6, 0.3, 0.1]))
    seen = frequencies(sampler, logits, job())
    assert set(seen) == {10, 20, 30}
    for token, share in ((10, 0.6), (20, 0.3), (30, 0.1)):
        # Five standard deviations of a binomial: wrong only if the distribution is.
        assert abs(seen[token] / 4000 - share) < 5 * (share * (1 - share) / 4000) ** 0.5


def test_temperature_flattens_and_sharpens(sampler: Sampler) -> None:
    logits = row()
    hot, cold = (len(frequencies(sampler, logits, job(temperature=t), 500)) for t in (2.0, 0.3))
    assert hot > 3 * cold


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 3}, 3),
        ({"top_k": 1}, 1),
        ({"top_p": 0.5}, None),
        ({"min_p": 0.2}, None),
        ({"top_k": 50, "top_p": 0.8, "min_p": 0.01}, None),
        ({"top_p": 0.999}, None),
    ],
    ids=str,
)
def test_filters_keep_exactly_the_tokens_of_their_definition(
    sampler: Sampler, params: dict[str, float], allowed: int | None
) -> None:
    logits = row(1)
    probabilities = torch.softmax(logits[0].double(), 0)
    order = probabilities.argsort(descending=True)
    kept = order[: int(params.get("top_k", VOCAB))]
    shares = probabilities[kept] / probabilities[kept].sum()
    before = shares.cumsum(0) - shares
    keep = (before < params.get("top_p", 1.0)) & (shares >= params.get("min_p", 0.0) * shares[0])
    expected = set(kept[keep].tolist())
    seen = set(frequencies(sampler, logits, job(**params), 3000))
    assert seen <= expected
    # All of the tokens that should be seen often were seen.
    assert {int(t) for t in kept[keep] if probabilities[t] > 0.01} <= seen
    if allowed is not None:
        assert len(expected) == allowed == len(seen)


def test_company_and_place_do_not_show(sampler: Sampler) -> None:
    logits = torch.cat([row(i) for i in range(40)])
    jobs = [
        job(seed=i, temperature=0.0 if i % 3 == 0 else 1.0, top_p=0.9 if i % 2 else 1.0, logprobs=2)
        for i in range(40)
    ]
    together = draw_all(sampler, logits, [Draw(jobs[i], i, 0, 7) for i in range(40)])
    backwards = draw_all(sampler, logits, [Draw(jobs[i], i, 0, 7) for i in reversed(range(40))])[
        ::-1
    ]
    alone = [draw(sampler, logits[i : i + 1], jobs[i], 7) for i in range(40)]
    assert together == alone == backwards


def test_seed_sample_and_position_each_change_the_draw(sampler: Sampler) -> None:
    logits = torch.zeros(1, VOCAB)
    points = [(s, k, p) for s in (1, 2, -1) for k in (0, 1, 2) for p in range(5)]
    tokens = [
        draw_all(sampler, logits, [Draw(job(seed=s), 0, k, p)])[0].token for s, k, p in points
    ]
    assert len(set(tokens)) > 0.9 * len(tokens)
    again = [draw_all(sampler, logits, [Draw(job(seed=s), 0, k, p)])[0].token for s, k, p in points]
    assert tokens == again


def test_the_random_numbers_are_even() -> None:
    counts = np.histogram([uniform(3, 0, i) for i in range(20000)], bins=20, range=(0, 1))[0]
    # Chi-squared with 19 degrees of freedom: above 60 once in two million.
    assert ((counts - 1000) ** 2 / 1000).sum() < 60


def test_nan_fails_its_row_alone(sampler: Sampler) -> None:
    logits = torch.cat([row(0), torch.full((1, VOCAB), torch.nan), row(2)])
    logits[1, 5] = 1.0
    for temperature in (0.0, 1.0):
        draws = [Draw(job(temperature=temperature), i, 0, 0) for i in range(3)]
        errors = [drawn.error for drawn in draw_all(sampler, logits, draws)]
        assert errors == [None, BAD_LOGITS, None]


def test_every_token_banned_by_bias_still_yields_one(sampler: Sampler) -> None:
    bias = dict.fromkeys(range(VOCAB), -100.0)
    logits = row()
    greedy = draw(sampler, logits, job(temperature=0.0, logit_bias=bias))
    assert greedy.error is None
    assert greedy.token == int((logits - 100).argmax())
    assert draw(sampler, logits, job(logit_bias=bias)).error is None


def test_a_contradiction_is_an_error_in_words(sampler: Sampler) -> None:
    one = job(allowed_token_ids=[9], min_tokens=2, stop_ids=[9], temperature=0.0)
    assert draw(sampler, row(), one).error == NOTHING_ALLOWED


def test_biases_and_allowed_ids_decide(sampler: Sampler) -> None:
    assert draw(sampler, row(), job(temperature=0.0, logit_bias={77: 100.0})).token == 77
    seen = frequencies(sampler, row(), job(allowed_token_ids=[4, 5], temperature=50.0), 200)
    assert set(seen) == {4, 5}


def test_constraints_give_the_bits_of_the_plain_loop() -> None:
    rng = np.random.default_rng(3)
    bias = {int(token): float(rng.uniform(-100, 100)) for token in rng.integers(0, VOCAB, 300)}
    allowed = [int(token) for token in rng.integers(0, VOCAB, 400)]
    logits = row(6)[0].numpy()
    expected = logits.copy()
    for token, value in bias.items():
        expected[token] += value
    for token in set(range(VOCAB)).difference(allowed):
        expected[token] = -np.inf
    job(logit_bias=bias, allowed_token_ids=allowed).constrain(logits)
    assert logits.tobytes() == expected.tobytes()


def test_long_lists_are_converted_once_and_not_at_each_draw(sampler: Sampler) -> None:
    one = job(logit_bias={4: 9.0}, allowed_token_ids=[4, 5], temperature=0.0)
    # What a draw would read now is not what the job was made of.
    one.params.logit_bias, one.params.allowed_token_ids = {7: 100.0}, [7]
    assert draw(sampler, torch.zeros(1, VOCAB), one).token == 4


class Unread(list[int]):
    """A list that may be counted and not looked into."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("looked into")


@pytest.mark.parametrize("name", ["allowed_token_ids", "stop_token_ids"])
def test_more_ids_than_the_vocabulary_are_refused_unread(name: str) -> None:
    params = SamplingParams(**{name: Unread([5] * (VOCAB + 1))})  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match=f"{name} has 1001 .* at most 1000") as caught:
        params.check(VOCAB)
    assert caught.value.param == name
    SamplingParams(**{name: [5] * VOCAB}).check(VOCAB)  # type: ignore[arg-type]
    for wrong in (-1, VOCAB):
        with pytest.raises(ParameterError, match=f"{name}: a token id .* not {wrong}"):
            SamplingParams(**{name: [5, wrong, 6]}).check(VOCAB)  # type: ignore[arg-type]


def test_stop_ids_wait_for_min_tokens(sampler: Sampler) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 9] = 10.0
    early = job([4], min_tokens=2, stop_ids=[9], temperature=0.0)
    assert draw(sampler, logits, early, 1).token != 9
    late = job([4, 4], min_tokens=2, stop_ids=[9], temperature=0.0)
    assert draw(sampler, logits, late, 2).token == 9


def test_penalties_are_those_of_their_definitions() -> None:
    logits = row(3)[0].numpy()
    outputs = [7, 7, 500]
    one = job(outputs, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25)
    result = logits.copy()
    one.constrain(result)
    expected = logits.astype(np.float64)
    for token in {1, 2, 3, 7, 500}:
        expected[token] = expected[token] / 1.3 if expected[token] > 0 else expected[token] * 1.3
    for token, count in {7: 2, 500: 1}.items():
        expected[token] -= 0.5 + 0.25 * count
    np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_counts_follow_the_sequence_as_it_grows() -> None:
    grown = job([7], frequency_penalty=1.0)
    grown.constrain(np.zeros(VOCAB, np.float32))
    grown.sequence.tokens += [7, 8]
    fresh = job([7, 7, 8], frequency_penalty=1.0)
    results = [np.zeros(VOCAB, np.float32) for _ in range(2)]
    grown.constrain(results[0])
    fresh.constrain(results[1])
    assert (results[0] == results[1]).all()
    assert results[0][7] == -2


def test_logprobs_are_the_models_own(sampler: Sampler) -> None:
    logits = row(4)
    one = job(temperature=0.2, top_k=5, logit_bias={3: 100.0}, logprobs=4)
    drawn = draw(sampler, logits, one)
    expected = torch.log_softmax(logits[0].double(), 0)
    assert drawn.token == 3
    assert drawn.logprobs is not None
    assert drawn.logprobs.logprob == pytest.approx(float(expected[3]), abs=1e-5)
    best = expected.topk(4)
    assert [token for token, _ in drawn.logprobs.top] == best.indices.tolist()
    assert [value for _, value in drawn.logprobs.top] == pytest.approx(
        best.values.tolist(), abs=1e-5
    )


@pytest.mark.parametrize("length", [1, 3, 255, 256, 257, 1000, 4096])
def test_a_draw_inverts_the_cumulative_distribution(length: int) -> None:
    random = np.random.default_rng(length)
    weights = random.random(length, dtype=np.float32) * (random.random(length) < 0.1)
    weights[random.integers(length)] = 0.5
    cumulative = np.cumsum(weights, dtype=np.float64)
    edges = (0.0, 1e-12, 0.5, 1 - 2.0**-53)
    for u in (*edges, *random.random(300)):
        index = _pick(weights, u)
        target, slack = u * cumulative[-1], 1e-6 * cumulative[-1]
        assert weights[index] > 0
        assert cumulative[index] - weights[index] - slack <= target <= cumulative[index] + slack
