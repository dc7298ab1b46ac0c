from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.answers import generation
from turnstile.engine.journal import Journal, JournalError
from turnstile.engine.protocol import Cancel, Row, TokenLogprobs
from turnstile.engine.quarantine import CLEARING_STEPS, Member, Quarantine


def journal_of(n: int = 1) -> Journal:
    journal = Journal()
    journal.add(generation("r", [1, 2], 10, n=n))
    return journal


def test_a_row_is_taken_only_where_it_follows_on_what_is_written() -> None:
    journal = journal_of()
    assert journal.take(Row("r", 0, 0, [5, 6])) is not None
    for first in (0, 1, 3):
        with pytest.raises(JournalError, match="2 tokens"):
            journal.take(Row("r", 0, first, [7]))
    assert journal.entries["r"].samples[0].outputs == [5, 6]


@pytest.mark.parametrize("cancelled", [None, 0, 1])
def test_a_draw_is_written_down_as_the_row_that_says_the_same(cancelled: int | None) -> None:
    by_rows, by_draws = journal_of(n=2), journal_of(n=2)
    (number,) = (submit.number for submit in by_draws.entries["r"].submits())
    assert number is not None
    for journal in (by_rows, by_draws):
        journal.take(Row("r", 0, 0, [5], charged=4.0))
        journal.take(Row("r", 1, 0, [6], charged=4.0))
        if cancelled is not None:
            journal.cancel("r", cancelled, "stop")
    for index in (0, 1):
        news = by_rows.take(Row("r", index, 1, [7], charged=6.0 + index))
        assert by_draws.draw(number + index, 1, 7, 6.0 + index) == (news is not None)
    entries = [journal.entries["r"] for journal in (by_rows, by_draws)]
    assert entries[0].submits() == entries[1].submits()
    assert entries[0].steps == entries[1].steps > 0
    assert entries[0].samples[1 - (cancelled or 0)].outputs[-1] == 7


def test_a_draw_is_taken_only_where_it_follows_and_while_its_request_lives() -> None:
    journal = journal_of()
    journal.take(Row("r", 0, 0, [5]))
    number = journal.entries["r"].number
    assert journal.find(number) is journal.entries["r"]
    for first in (0, 2):
        with pytest.raises(JournalError, match="1 token"):
            journal.draw(number, first, 7, 0.0)
    journal.cancel("r", None, "abort")
    assert journal.find(number) is None
    assert not journal.draw(number, 1, 7, 0.0)
    other = journal.add(generation("other", [1], 10))
    assert other.number > number


def test_what_is_submitted_again_carries_outputs_and_charge() -> None:
    journal = journal_of()
    journal.take(Row("r", 0, 0, [5, 6], charged=6.0))
    (submit,) = journal.entries["r"].submits()
    assert (submit.outputs, submit.charged, submit.n) == ([5, 6], 6.0, 1)


def test_a_group_is_submitted_as_one_until_it_forks_and_then_each_sample_alone() -> None:
    journal = journal_of(n=3)
    (submit,) = journal.entries["r"].submits()
    assert (submit.n, submit.sample_index) == (3, 0)
    for index in range(3):
        journal.take(Row("r", index, 0, [index]))
    journal.take(Row("r", 1, 1, [9], finish="stop"))
    again = journal.entries["r"].submits()
    assert [(s.sample_index, s.n, s.outputs) for s in again] == [(0, 1, [0]), (2, 1, [2])]


def test_a_request_is_forgotten_with_its_last_sample() -> None:
    journal = journal_of(n=2)
    journal.take(Row("r", 0, 0, [1], finish="length"))
    assert "r" in journal.entries
    assert journal.cancel("r", 1, "stop") == Cancel("r", None, "stop")
    assert not journal.entries
    assert journal.take(Row("r", 1, 0, [1])) is None


def test_the_first_sample_of_a_group_is_cancelled_only_once_the_others_live_without_it() -> None:
    journal = journal_of(n=2)
    assert journal.cancel("r", 0, "abort") is None
    assert journal.take(Row("r", 0, 0, [1])) is None
    assert journal.cancels == [Cancel("r", 0)]
    assert journal.take(Row("r", 1, 0, [2])) is not None


def test_a_report_of_the_charge_before_the_fork_ends_nobody_and_is_kept() -> None:
    journal = journal_of(n=2)
    assert journal.cancel("r", 0, "abort") is None
    assert journal.take(Row("r", 0, 0, [], charged=2.0)) is None
    assert journal.cancels == [], "sample 0 stands for sample 1 until they fork"
    journal.restart({"default": 40.0})
    (submit,) = journal.entries["r"].submits()
    assert (submit.n, submit.charged, submit.served) == (2, 2.0, 40.0)


def test_only_what_was_in_an_engine_goes_on_from_its_tenants_counter() -> None:
    journal = Journal()
    for name, tenant in (("a", "busy"), ("b", "quiet")):
        journal.add(generation(name, [1, 2], 10, tenant=tenant))
    journal.restart({"busy": 70.0})
    journal.add(generation("c", [1, 2], 10, tenant="busy"))
    served = {name: entry.submits()[0].served for name, entry in journal.entries.items()}
    assert served == {"a": 70.0, "b": None, "c": None}


def test_prompt_logprobs_repeated_by_a_new_engine_are_news_only_from_where_they_ended() -> None:
    journal = journal_of()
    scores = [TokenLogprobs(-float(k)) for k in range(6)]
    journal.take(Row("r", 0, 0, [], prompt_logprobs=scores[:3]))
    journal.restart({})
    assert journal.take(Row("r", 0, 0, [], prompt_logprobs=scores[:2])) is None
    row = journal.take(Row("r", 0, 0, [], prompt_logprobs=scores[2:]))
    assert row is not None
    assert row.prompt_logprobs == scores[3:]


@given(
    guilty=st.sets(st.integers(0, 11), max_size=3),
    proven=st.sets(st.integers(0, 11)),
    slots=st.integers(1, 12),
)
def test_whoever_kills_is_found_and_nobody_else(
    guilty: set[int], proven: set[int], slots: int
) -> None:
    """An engine that dies in every step with a guilty request in it, and holds ``slots``."""
    quarantine = Quarantine()
    steps = dict.fromkeys((str(k) for k in range(12)), 0)
    through = {str(k) for k in proven}
    convicted: set[str] = set()
    for _ in range(400):
        inside = [r for r in steps if quarantine.admits(r, r in through)][:slots]
        if not steps:
            break
        assert inside, "everybody waits and nobody runs"
        if any(int(r) in guilty for r in inside):
            verdict = quarantine.died([Member(r, steps[r], r in through) for r in inside])
            steps = dict.fromkeys(steps, 0)
            if verdict.guilty is not None:
                convicted.add(verdict.guilty)
                del steps[verdict.guilty]
            continue
        for request in inside:
            steps[request] += 1
            through.add(request)
            quarantine.came_through(request, steps[request])
            if steps[request] > 2 * CLEARING_STEPS:
                quarantine.left(request)
                del steps[request]
    assert not steps
    assert convicted == {str(k) for k in guilty}
