"""Drafts by prompt lookup: what is guessed, when it is worth a row, and whom it must not cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstile.core.admission import ExpectedAdmission
from turnstile.core.cost import CACHED_READ, Coefficients, CostModel, StepCost
from turnstile.core.fairness import FairQueue
from turnstile.core.pages import PagePool
from turnstile.core.plan import Chunk, Outcome, Plan
from turnstile.core.request import Request, Sequence
from turnstile.core.scheduler import Scheduler, SchedulerConfig
from turnstile.core.speculation import COLD_PRICE, Chances, Lately, PromptLookup, price

LENGTH = 3


def decoding(tokens: list[int], max_tokens: int = 100) -> Sequence:
    """A sequence with only its newest token left to compute."""
    sequence = Sequence(Request(id="a", prompt=tuple(tokens), max_tokens=max_tokens))
    sequence.computed = len(tokens) - 1
    return sequence


def drafts(sequence: Sequence, drafter: PromptLookup | None = None) -> tuple[int, ...]:
    drafter = drafter or PromptLookup(most=4, shortest=LENGTH)
    drafter.follow(sequence)
    drafter.draft([sequence], warm(alpha=1.0, beta=0.001))
    return sequence.drafts


def warm(alpha: float, beta: float, delta: float = 0.0, reading: float = 0.0) -> CostModel:
    """A cost model that has seen steps which cost exactly this."""
    cost = CostModel(fine=True)
    true = Coefficients(alpha, beta, 0.0, delta, reading)
    for step in range(640):
        batch = 1 + step * 5 % 60
        crowd = StepCost.decoding(batch, 50 + step * 31 % 900)
        work = crowd.sharing(step * 13 % 500 * batch) + StepCost(step * 7 % 300, 0, 0)
        cost.observe(work, true.predict(work))
    return cost


def test_text_that_stood_before_is_guessed_to_go_on_as_it_did() -> None:
    assert drafts(decoding([7, 1, 2, 3, 4, 5, 6, 9, 1, 2, 3])) == (4, 5, 6, 9)


def test_of_two_places_the_later_is_taken() -> None:
    assert drafts(decoding([1, 2, 3, 4, 1, 2, 3, 5, 8, 8, 8, 9, 1, 2, 3]))[:1] == (5,)


def test_a_guess_that_reaches_the_end_goes_round() -> None:
    assert drafts(decoding([9, 1, 2, 1, 2, 1, 2])) == (1, 2, 1, 2)


@pytest.mark.parametrize(
    "tokens", [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2, 9, 1, 2], list(range(50))]
)
def test_nothing_is_guessed_where_nothing_repeats(tokens: list[int]) -> None:
    assert drafts(decoding(tokens)) == ()


@pytest.mark.parametrize(("left", "most"), [(1, 0), (2, 1), (3, 2)])
def test_no_more_is_guessed_than_may_still_be_drawn(left: int, most: int) -> None:
    assert len(drafts(decoding([1, 2, 3, 4, 5, 6, 1, 2, 3], max_tokens=left))) == most


def test_who_is_in_its_prompt_or_not_followed_gets_none() -> None:
    drafter = PromptLookup(shortest=LENGTH)
    behind, stranger = decoding([1, 2, 3, 1, 2, 3]), decoding([1, 2, 3, 1, 2, 3])
    behind.computed -= 1
    drafter.follow(behind)
    drafter.draft([behind, stranger], CostModel())
    assert behind.drafts == stranger.drafts == ()
    drafter.forget(behind)
    drafter.forget(stranger)


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=60),
    st.lists(st.integers(1, 7), min_size=1, max_size=30),
)
def test_read_piece_by_piece_it_guesses_what_it_guesses_of_the_whole(
    tokens: list[int], pieces: list[int]
) -> None:
    """And that is what followed the last place where the last tokens stood before."""
    drafter = PromptLookup(most=3, shortest=LENGTH, longest=LENGTH)
    sequence = decoding(tokens[:1])
    drafter.follow(sequence)
    cost = warm(alpha=1.0, beta=0.0001)
    while True:
        sequence.computed = sequence.total - 1
        drafter.draft([sequence], cost)
        known = sequence.tokens
        places = [
            end for end in range(LENGTH, len(known)) if known[end - LENGTH : end] == known[-LENGTH:]
        ]
        expected: list[int] = []
        if places:
            expected = known[places[-1] :][:3]
            while len(expected) < 3:
                expected.append(expected[len(expected) - (len(known) - places[-1])])
        assert list(sequence.drafts) == expected
        if len(known) == len(tokens):
            break
        sequence.tokens += tokens[len(known) :][: pieces[len(known) % len(pieces)]]


def test_tokens_that_were_taken_back_and_drawn_again_are_nothing_new() -> None:
    drafter = PromptLookup(most=2, shortest=LENGTH)
    sequence = decoding([1, 2, 3, 4, 1, 2, 3])
    assert drafts(sequence, drafter) == (4, 1)
    sequence.tokens += [4, 1]
    sequence.computed = sequence.total - 1
    drafter.draft([sequence], CostModel())
    del sequence.tokens[-2:]
    sequence.computed = sequence.total - 1
    drafter.draft([sequence], warm(alpha=1.0, beta=0.001))
    assert sequence.drafts in ((), (4, 1))


# -- what a row costs ------------------------------------------------------------------------------


def test_a_row_is_cheap_for_one_user_and_dear_in_a_crowd() -> None:
    cost = warm(alpha=0.006, beta=0.0002, delta=0.0002)
    alone = price(cost, StepCost.decoding(1, 200), Lately())
    crowd = price(cost, StepCost.decoding(100, 200), Lately())
    assert alone == pytest.approx(0.0004 / 0.0064, rel=0.1)
    assert crowd == pytest.approx(0.0004 * 100 / 0.046, rel=0.1)


def test_a_row_attends_to_what_its_sequence_attends_to() -> None:
    cost = warm(alpha=0.006, beta=0.0002, delta=0.0002, reading=1e-6)
    for context, shared in ((100, 0), (900, 0), (900, 512)):
        crowd = StepCost.decoding(50, context).sharing(50 * shared)
        row = 0.0004 + CACHED_READ * 1e-6 * context
        step = 0.006 + 50 * (row + (1 - CACHED_READ) * 1e-6 * (context - shared))
        assert price(cost, crowd, Lately()) == pytest.approx(row * 50 / step, rel=0.05)


def test_the_more_other_guesses_bring_the_dearer_is_one_more() -> None:
    cost, crowd = warm(alpha=0.006, beta=0.0002, delta=0.0002), StepCost.decoding(50, 200)
    lately = Lately()
    for _ in range(500):
        lately.observe(50, 100, 95)
    assert (lately.drafted, lately.accepted) == pytest.approx((2.0, 1.9), rel=0.01)
    rate = 50 * 2.9 / (0.006 + 0.0004 * 150)
    assert price(cost, crowd, lately) == pytest.approx(0.0004 * rate, rel=0.05)
    assert price(cost, crowd, lately) > 1.1 * price(cost, crowd, Lately())
    for _ in range(500):
        lately.observe(50, 0, 0)
        lately.observe(0, 0, 0)  # of prompts alone: that says nothing
    assert price(cost, crowd, lately) == pytest.approx(price(cost, crowd, Lately()), rel=0.01)


def test_what_steps_drew_is_counted_of_those_who_decode() -> None:
    drafter = PromptLookup(shortest=LENGTH)
    sequence, other = decoding([1, 2, 3, 4, 1, 2, 3]), decoding([1])
    assert len(drafts(sequence, drafter)) > 1
    chunks = (Chunk(other, 0, 1, 1), *plan_of(sequence).chunks)
    drafter.learn(Plan(0, chunks), [Outcome((5,)), Outcome((4, 9))])
    lately, expected = drafter.lately, Lately()
    expected.observe(2, len(sequence.drafts), 1)
    assert lately == expected


def test_before_any_step_a_row_costs_half_a_token() -> None:
    assert price(CostModel(), StepCost.decoding(1, 100), Lately()) == COLD_PRICE


def test_at_the_price_of_a_token_nobody_guesses() -> None:
    sequence = decoding([1, 2, 3, 4, 1, 2, 3])
    drafter = PromptLookup(shortest=LENGTH)
    drafter.follow(sequence)
    drafter.draft([sequence], warm(alpha=0.0, beta=1.0))
    assert sequence.drafts == ()


def test_a_run_with_the_hash_of_another_is_not_taken_for_it() -> None:
    minus_one, minus_two = -1, -2  # tokens there are none of; their hashes are the same
    assert hash((1, 2, minus_one)) == hash((1, 2, minus_two))
    assert drafts(decoding([7, 1, 2, minus_one, 4, 5, 6, 9, 1, 2, minus_two])) == ()
    assert drafts(decoding([7, 1, 2, minus_one, 4, 5, 6, 9, 1, 2, minus_one])) == (4, 5, 6, 9)


# -- what is learned -------------------------------------------------------------------------------


def plan_of(sequence: Sequence) -> Plan:
    count = 1 + len(sequence.drafts)
    return Plan(0, (Chunk(sequence, sequence.computed, count, count, sequence.drafts),))


def test_who_is_wrong_again_and_again_stops_guessing_and_tries_again_later() -> None:
    drafter = PromptLookup(most=4, shortest=LENGTH)
    cost = warm(alpha=0.01, beta=0.0001, delta=0.0001)  # a row costs 0.44 tokens to forty
    crowd = [decoding([1, 2, 3, 4, 5, 1, 2, 3]) for _ in range(40)]
    for sequence in crowd:
        drafter.follow(sequence)

    def guessed() -> int:
        drafter.draft(crowd, cost)
        return sum(len(sequence.drafts) for sequence in crowd)

    assert guessed() > 0
    for _ in range(3):
        guessed()
        for sequence in crowd:
            if sequence.drafts:
                drafter.learn(plan_of(sequence), [Outcome((9,))])
    assert guessed() == 0
    assert drafter.counts.accepted == 0 < drafter.counts.drafts <= drafter.counts.tokens
    assert any(guessed() for _ in range(8 * Chances.HALF_LIFE))


def test_who_is_right_guesses_longer() -> None:
    chances = Chances(longest=12, most=8)
    before = chances.worth(3, 0.4)
    for _ in range(50):
        chances.observe(3, 8, 8)
    assert before < chances.worth(3, 0.4) == 8
    assert chances.worth(4, 0.4) < 8, "of other places nothing was learned"


def test_a_failed_row_teaches_nothing() -> None:
    drafter = PromptLookup(shortest=LENGTH)
    sequence = decoding([1, 2, 3, 4, 1, 2, 3])
    assert drafts(sequence, drafter)
    drafter.learn(plan_of(sequence), [Outcome(error="no number")])
    assert drafter.counts.drafts == 0


# -- the scheduler ---------------------------------------------------------------------------------


def test_nobody_has_to_go_for_a_draft() -> None:
    """Two sequences fill the pool to the last page: a draft that needed one more is cut short."""
    scheduler = Scheduler(
        SchedulerConfig(speculation=True, max_num_seqs=2, max_num_batched_tokens=64),
        PagePool(2, 4),
        ExpectedAdmission(),
        FairQueue(),
    )
    first, second = (
        scheduler.submit(Request(id=name, prompt=(1, 2), max_tokens=2), now=0.0) for name in "ab"
    )
    plan = scheduler.plan(0.0)
    scheduler.commit(plan, [Outcome((3,)), Outcome((3,))], 0.0)
    for sequence in (first, second):
        sequence.request = Request(id=sequence.request.id, prompt=(1, 2), max_tokens=50)
        sequence.drafts = (4, 5, 6, 7)
    plan = scheduler.plan(0.0)
    assert [chunk.drafts for chunk in plan.chunks] == [(4,), (4,)]
    assert scheduler.statistics.preemptions == 0
