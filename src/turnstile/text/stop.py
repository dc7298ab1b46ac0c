"""Stop strings over a stream of characters: :class:`StopMatcher`.

The stop strings of a request become one automaton (Aho and Corasick, "Efficient string matching:
an aid to bibliographic search", CACM 1975). Its state is the longest suffix of the text so far
that begins some stop string; that suffix is exactly what must be held back. Each character is
looked at once, however the text was cut into tokens, so the result depends on the text alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class StopAutomaton:
    """The compiled stop strings of a request; its samples share it.

    State 0 is the root. ``next[state]`` maps a character to the child state, ``suffix[state]``
    is the state of the longest proper suffix that also begins some stop string (where to go on
    when there is no child), ``depth[state]`` the length of what the state stands for, and
    ``found[state]`` the longest stop string that ends there.
    """

    __slots__ = ("depth", "first", "found", "next", "suffix")

    def __init__(self, stops: Sequence[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.found: list[str | None] = [None]
        for stop in stops:
            if not stop:
                raise ValueError("a stop string must not be empty")
            self._insert(stop)
        self.first = frozenset(self.next[0])
        self.suffix = [0] * len(self.next)
        self._link()

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self.next[state].get(character)
            if following is None:
                following = len(self.next)
                self.next[state][character] = following
                self.next.append({})
                self.depth.append(self.depth[state] + 1)
                self.found.append(None)
            state = following
        self.found[state] = stop

    def _link(self) -> None:
        """Find the suffixes breadth first: a suffix is shallower, so it is known by then."""
        queue = deque(self.next[0].values())
        while queue:
            state = queue.popleft()
            if self.found[state] is None:
                self.found[state] = self.found[self.suffix[state]]
            for character, child in self.next[state].items():
                self.suffix[child] = self.step(self.suffix[state], character)
                queue.append(child)

    def step(self, state: int, character: str) -> int:
        """Return the state after one more character."""
        following = self.next[state].get(character)
        while following is None:
            if not state:
                return 0
            state = self.suffix[state]
            following = self.next[state].get(character)
        return following


class StopMatch(NamedTuple):
    """A stop string, and where it begins and ends in the text (character offsets)."""

    stop: str
    start: int
    end: int


class StopMatcher:
    """Finds the first stop string to be completed in a growing text.

    Of several, the one whose last character comes first wins: generation ends there. If two end
    at the same character, the longer one wins, so that neither shows in the output.
    """

    __slots__ = ("_automaton", "_length", "_state")

    def __init__(self, automaton: StopAutomaton) -> None:
        self._automaton = automaton
        self._state = 0
        self._length = 0

    @property
    def held(self) -> int:
        """Characters at the end of the text that may be the start of a stop string."""
        return self._automaton.depth[self._state]

    def feed(self, text: str, *, armed: bool = True) -> StopMatch | None:
        """Take the next characters; return the match that is completed among them, if any.

        Not ``armed``, matches pass unnoticed (``min_tokens``), but one that only begins here can
        still be completed later.
        """
        automaton, state = self._automaton, self._state
        if state == 0 and automaton.first.isdisjoint(text):
            self._length += len(text)
            return None
        for place, character in enumerate(text, self._length + 1):
            state = automaton.step(state, character)
            found = automaton.found[state]
            if found is not None and armed:
                self._state, self._length = 0, place
                return StopMatch(found, place - len(found), place)
        self._state = state
        self._length += len(text)
        return None
