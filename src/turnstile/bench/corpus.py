"""English prose to cut prompts from.

Random token ids would be unfair to everybody: they tokenize badly, hit no merge, and a model
answers them with rubbish whose text is larger than words. The text is two novels in the public
domain (J. Austen, *Pride and Prejudice* 1813 and *Persuasion* 1817), 205,517 words, enough that a
run of several repetitions begins every prompt at another place.
"""

from __future__ import annotations

import lzma
from functools import cache
from importlib import resources

import numpy as np


@cache
def prose_words() -> tuple[str, ...]:
    """Every word of the corpus in order, punctuation attached."""
    packed = resources.files(__package__).joinpath("data/prose.txt.xz").read_bytes()
    return tuple(lzma.decompress(packed).decode("utf-8").split())


class Prose:
    """Hands out passages that all begin at different places.

    Prefix caches match from the first token on, so two prompts that start at different words share
    nothing beyond chance, even where their texts overlap later.

    Parameters
    ----------
    seed
        The order of the places; the same seed gives the same passages.
    """

    def __init__(self, seed: int) -> None:
        self._words = prose_words()
        self._order = np.random.default_rng(seed).permutation(len(self._words))
        self._next = 0

    def next_start(self) -> int:
        """Return a starting word that this object has not given before.

        Raises
        ------
        RuntimeError
            After every word has been a start once (205,517 prompts).
        """
        if self._next == len(self._order):
            raise RuntimeError("the prose is used up: begin again with another text seed")
        self._next += 1
        return int(self._order[self._next - 1])

    def words(self, start: int, count: int) -> list[str]:
        """Return `count` words from `start` on, going round at the end of the corpus."""
        total = len(self._words)
        start %= total
        taken = list(self._words[start : start + count])
        while len(taken) < count:
            taken.extend(self._words[: count - len(taken)])
        return taken
