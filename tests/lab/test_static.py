"""The static batcher: correct, and wasteful in exactly the ways it is known for."""

from __future__ import annotations

from itertools import pairwise

import pytest

from turnstile.bench.lengths import Uniform
from turnstile.lab.continuous import ContinuousServer
from turnstile.lab.drive import drive
from turnstile.lab.load import Ask, ClosedLoad, arriving, make_asks
from turnstile.lab.model import LabModel
from turnstile.lab.policies import SEPARATE_PREFILL, TURNSTILE
from turnstile.lab.static import PAD, StaticServer, pad_left


def static(model: LabModel, batch_size: int = 4, patience: float = 16) -> StaticServer:
    return StaticServer(
        model, memory_tokens=4 * 128, max_model_len=128, batch_size=batch_size, patience=patience
    )


def continuous(model: LabModel, **settings: object) -> ContinuousServer:
    return ContinuousServer(
        model, memory_tokens=512, max_model_len=128, slots=4, budget=32, watched=True, **settings
    )  # type: ignore[arg-type]


def ask(name: str, prompt: int, length: int, arrival: float = 0) -> Ask:
    return Ask(name, tuple(range(7, 7 + prompt)), length, length, arrival=arrival)


def test_prompts_are_padded_on_the_left_and_positions_count_real_tokens() -> None:
    rectangle = pad_left([(5, 6), (7, 8, 9, 10)])
    assert rectangle.ids.tolist() == [[PAD, PAD, 5, 6], [7, 8, 9, 10]]
    assert rectangle.mask.tolist() == [[False, False, True, True], [True] * 4]
    assert rectangle.positions[0, 2:].tolist() == [0, 1]
    assert rectangle.positions[1].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kernels", ["tiny", "tiny_reference"])
def test_tokens_are_those_of_a_request_alone(kernels: str, request: pytest.FixtureRequest) -> None:
    model: LabModel = request.getfixturevalue(kernels)
    asks = make_asks(Uniform(1, 30), Uniform(1, 20), 11, model.vocab_size, longest=128)
    alone = {name: drive(static(model, 1), [a]).tokens()[name] for a in asks for name in [a.id]}
    assert len({tuple(tokens) for tokens in alone.values()}) > 8, "a model that says one thing"
    assert drive(static(model), asks).tokens() == alone
    for policy in (TURNSTILE, SEPARATE_PREFILL):
        assert drive(continuous(model, policy=policy), asks).tokens() == alone


def test_padding_that_is_not_masked_would_change_the_answer(tiny: LabModel) -> None:
    real = ask("real", 6, 12)
    seen = Ask("seen", (PAD,) * 5 + real.prompt, 12, 12)
    run = drive(static(tiny), [real, seen])
    assert run.tokens()["real"] != run.tokens()["seen"]


def test_nobody_leaves_before_the_longest_and_nobody_enters(tiny: LabModel) -> None:
    server = static(tiny, batch_size=2)
    run = drive(server, [ask("short", 4, 2), ask("long", 8, 30), ask("late", 4, 2)])
    answers = run.answers
    assert answers["short"].end_step == 2
    assert answers["long"].end_step == 30
    assert answers["late"].steps[0] == 31, "the step after the longest has ended"
    assert server.padding == 4
    assert server.idle == 28, "the short one's row, computed on until the long one ends"
    assert run.computed - run.useful == 4 + 28


def test_a_batch_waits_to_fill_but_not_for_ever(tiny: LabModel) -> None:
    first, second = ask("first", 4, 2, arrival=0), ask("second", 4, 2, arrival=9)
    patient = drive(static(tiny, batch_size=2, patience=50), [first, second])
    assert patient.answers["first"].steps[0] == patient.answers["second"].steps[0]
    hasty = drive(static(tiny, batch_size=2, patience=3), [first, second])
    assert hasty.answers["first"].wait == 4
    assert hasty.answers["second"].arrival_step == 9


def test_rows_are_limited_by_reservations_not_by_what_they_hold(tiny: LabModel) -> None:
    run = drive(static(tiny, batch_size=100), [ask(f"r{i}", 4, 3) for i in range(9)])
    assert run.peak_sequences == 4
    assert all(step.reserved == 4 * 128 for step in run.steps[:3])
    assert [step.filled for step in run.steps[:2]] == [4 * 4, 4 * 5]
    with pytest.raises(ValueError, match="longer than the 128 tokens"):
        static(tiny).submit(ask("huge", 100, 29), 0.0)


def test_users_of_a_closed_loop_ask_again_when_they_are_answered(tiny: LabModel) -> None:
    asks = [ask(f"r{i}", 4, 3) for i in range(6)]
    run = drive(continuous(tiny), ClosedLoad(asks, users=2))
    assert run.peak_sequences == 2
    starts = [run.answers[f"r{i}"].arrival_step for i in range(6)]
    assert starts == [0, 0, 3, 3, 6, 6]


def test_arrivals_by_steps_are_kept_even_where_nothing_runs(tiny: LabModel) -> None:
    asks = arriving([ask(f"r{i}", 4, 2) for i in range(3)], [0, 40, 41])
    run = drive(continuous(tiny), asks)
    assert [a.arrival_step for a in run.answers.values()] == [0, 40, 41]
    assert all(gap == 1 for a in run.answers.values() for gap in a.gaps)
    assert all(a <= b for a, b in pairwise(a.end_step for a in run.answers.values()))
