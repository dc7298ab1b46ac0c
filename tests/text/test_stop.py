import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budget import examples
from turnstile.text.stop import StopAutomaton, StopMatch, StopMatcher

letters = st.text(alphabet="ab🙂", max_size=40)
stops = st.lists(st.text(alphabet="ab🙂", min_size=1, max_size=5), min_size=1, max_size=4)


def first_completed(text: str, stops: list[str]) -> StopMatch | None:
    """The definition: the match that ends first; of those that end together, the longest."""
    found = [
        StopMatch(stop, end - len(stop), end)
        for stop in stops
        for end in range(len(stop), len(text) + 1)
        if text[end - len(stop) : end] == stop
    ]
    return min(found, key=lambda match: (match.end, match.start), default=None)


def longest_beginning(text: str, stops: list[str]) -> int:
    """How much of the end of ``text`` is the beginning of a stop string."""
    return max(
        n for n in range(len(text) + 1) if any(s.startswith(text[len(text) - n :]) for s in stops)
    )


@given(letters, stops, st.lists(st.integers(0, 40)))
@settings(max_examples=examples(300))
def test_any_cut_of_the_text_finds_what_the_whole_text_has(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher = StopMatcher(StopAutomaton(stops))
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    expected = first_completed(text, stops)
    for start, end in itertools.pairwise(borders):
        match = matcher.feed(text[start:end])
        if match is not None:
            assert match == expected
            return
        assert matcher.held == longest_beginning(text[:end], stops)
    assert expected is None


def test_of_two_that_end_together_the_longer_one_wins() -> None:
    matcher = StopMatcher(StopAutomaton(["bar", "foobar"]))
    assert matcher.feed("a foobar") == ("foobar", 2, 8)


def test_a_stop_that_is_the_beginning_of_another_wins() -> None:
    matcher = StopMatcher(StopAutomaton(["foobar", "foo"]))
    assert matcher.feed("xfoobar") == ("foo", 1, 4)


def test_an_unarmed_matcher_lets_matches_pass_but_remembers_beginnings() -> None:
    matcher = StopMatcher(StopAutomaton(["aab"]))
    assert matcher.feed("aab aa", armed=False) is None
    assert matcher.held == 2
    assert matcher.feed("b") == ("aab", 4, 7)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopAutomaton(["a", ""])
