"""Drafts: guesses at the next tokens, verified in the very step that draws the next one.

Text repeats itself: names, quotations, code, and what a small model falls into. Where the last few
tokens of a sequence stood before in it, what followed them there is a good guess at what follows
now (prompt lookup: no second model, nothing to load). The guesses are rows of the next step like
any others. A guess is accepted if it equals the token that is drawn for its place, with the key of
its place; so drafts change when tokens come, and never which.

A row is not free. In a crowd a step computes products, and a row more is a good part of a token
less for somebody; alone it waits for the weights, and a row more costs next to nothing. So a guess
is made where the chance that it is right, as learned from the guesses before, exceeds its price in
tokens, as measured by the cost model (:func:`price`).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from turnstile.core.cost import CostModel, StepCost
from turnstile.core.plan import Outcome, Plan
from turnstile.core.request import Sequence

COLD_PRICE = 0.5
"""The price of a row while no step has been measured, in tokens."""


@dataclass(slots=True)
class DraftCounts:
    """How many drafts were verified, of how many tokens, of which so many were accepted.

    ``by_place`` has those accepted by their place in the draft: the k-th is in how many drafts the
    first k + 1 tokens were right.
    """

    drafts: int = 0
    tokens: int = 0
    accepted: int = 0
    by_place: list[int] = field(default_factory=list)

    def count(self, tokens: int, accepted: int) -> None:
        """Count a draft of ``tokens`` tokens, the first ``accepted`` of which were right."""
        self.drafts += 1
        self.tokens += tokens
        self.accepted += accepted
        for place in range(accepted):
            self.by_place[place] += 1


NO_DRAFTS = DraftCounts()


class Drafter(Protocol):
    """Fills in :attr:`Sequence.drafts` before a plan is made, and learns from what came of them."""

    counts: DraftCounts

    def follow(self, sequence: Sequence) -> None:
        """From now on this sequence may be given drafts."""

    def forget(self, sequence: Sequence) -> None:
        """It has ended. Unknown ones are ignored."""

    def draft(self, running: Iterable[Sequence], cost: CostModel, shared: int = 0) -> None:
        """Give drafts to whoever decodes, is followed, and has something worth guessing. ``shared``
        tokens of each context are read for another sequence as well.
        """

    def learn(self, plan: Plan, outcomes: Seq[Outcome]) -> None:
        """See which drafts of a plan were right. Before the outcomes are committed."""


class PromptLookup:
    """Guesses what followed the last ``shortest`` tokens where they stood last.

    Parameters
    ----------
    most
        Tokens of a draft at most.
    shortest
        Tokens that must be the same for a place to be looked at.
    longest
        How far back a place is compared: the longer it agrees, the likelier it is right.
    """

    def __init__(self, most: int = 8, shortest: int = 3, longest: int = 12) -> None:
        self.counts = DraftCounts(by_place=[0] * most)
        self._shortest = shortest
        self._longest = max(shortest, longest)
        self._texts: dict[Sequence, _Text] = {}
        self._chances = Chances(self._longest, most)
        self.lately = Lately()

    def follow(self, sequence: Sequence) -> None:
        """See :class:`Drafter`."""
        self._texts[sequence] = _Text(self._shortest)

    def forget(self, sequence: Sequence) -> None:
        """See :class:`Drafter`."""
        self._texts.pop(sequence, None)

    def draft(self, running: Iterable[Sequence], cost: CostModel, shared: int = 0) -> None:
        """See :class:`Drafter`. O(new tokens + drafts): nothing is read twice."""
        ready = [s for s in running if s.decoding and s in self._texts]
        if not ready:
            return
        self._chances.age()
        crowd = StepCost.decoding(len(ready), sum([len(s.tokens) for s in ready]) / len(ready))
        least = price(cost, crowd.sharing(shared * len(ready)), self.lately)
        for sequence in ready:
            text = self._texts[sequence]
            text.read(sequence.tokens)
            sequence.drafts = self._guess(sequence, text, least)

    def _guess(self, sequence: Sequence, text: _Text, least: float) -> tuple[int, ...]:
        tokens = sequence.tokens
        last = tokens[-self._shortest :]
        place = text.places.get(hash(tuple(last)))
        if place is None or place >= len(tokens):  # a draw that was taken back is read again
            return ()
        if tokens[place - len(last) : place] != last:  # of another run with the same hash
            return ()
        text.agreed = self._agreement(tokens, place)
        count = min(self._chances.worth(text.agreed, least), sequence.remaining - 1)
        draft = tokens[place : place + max(0, count)]
        for i in range(count - len(draft)):  # it goes round: the guess is its own beginning again
            draft.append(draft[i])
        return tuple(draft)

    def _agreement(self, tokens: list[int], place: int) -> int:
        """How many tokens before ``place`` are the sequence's last ones, up to ``longest``."""
        agreed, end = self._shortest, len(tokens)
        longest = min(self._longest, place)
        while agreed < longest and tokens[place - 1 - agreed] == tokens[end - 1 - agreed]:
            agreed += 1
        return agreed

    def learn(self, plan: Plan, outcomes: Seq[Outcome]) -> None:
        """See :class:`Drafter`."""
        first = plan.num_decodes
        decoding, drafted, right = first, 0, 0
        for chunk, outcome in zip(plan.chunks[first:], outcomes[first:], strict=True):
            if not chunk.drafts or outcome.error is not None:
                continue
            accepted = len(outcome.tokens) - 1
            self.counts.count(len(chunk.drafts), accepted)
            decoding += 1
            drafted += len(chunk.drafts)
            right += accepted
            text = self._texts.get(chunk.sequence)
            if text is not None:
                self._chances.observe(text.agreed, len(chunk.drafts), accepted)
        self.lately.observe(decoding, drafted, right)


class _Text:
    """Where every run of ``length`` tokens of one sequence stood last.

    ``places`` maps the hash of the run to the index of the token after it; the run at the very end
    has none yet. Hashes, as numbers are nothing the garbage collector looks at: it took as long as
    all the rest. ``agreed`` is how far the place of the last draft agreed.
    """

    __slots__ = ("_length", "_read", "agreed", "places")

    def __init__(self, length: int) -> None:
        self.places: dict[int, int] = {}
        self.agreed = length
        self._length = length
        self._read = length

    def read(self, tokens: list[int]) -> None:
        """Take in what came since the last call; ``tokens`` only ever grows."""
        start, length = self._read, self._length
        if len(tokens) <= start:
            return
        if len(tokens) == start + 1:  # nearly always
            self.places[hash(tuple(tokens[-1 - length : -1]))] = start
            self._read += 1
            return
        new = tokens[start - length : -1]
        runs = zip(*[new[i:] for i in range(length)], strict=False)
        self.places.update(zip(map(hash, runs), range(start, len(tokens)), strict=True))
        self._read = len(tokens)


class Chances:
    """How likely a token of a draft is accepted where all before it were, by how far the place
    agreed. Begins with a guess of its own, which counts like ``PRIOR`` observations.
    """

    PRIOR = 4.0
    HALF_LIFE = 512
    """Calls of :meth:`age` after which an observation counts half: what was given up is tried
    again.
    """

    def __init__(self, longest: int, most: int) -> None:
        self._right = [[0.0] * most for _ in range(longest + 1)]
        self._tried = [[0.0] * most for _ in range(longest + 1)]
        self._first = [min(0.95, 0.35 + 0.06 * agreed) for agreed in range(longest + 1)]
        self._age = 0

    def worth(self, agreed: int, least: float) -> int:
        """How many tokens of a draft have a chance of at least ``least`` to be accepted."""
        chance, first = 1.0, self._first[agreed] * self.PRIOR
        pairs = zip(self._right[agreed], self._tried[agreed], strict=True)
        count = 0
        for count, (right, tried) in enumerate(pairs):
            chance *= (right + first) / (tried + self.PRIOR)
            if chance < least:
                return count
        return count + 1

    def observe(self, agreed: int, drafted: int, accepted: int) -> None:
        """Of ``drafted`` tokens the first ``accepted`` were right; beyond the next nothing is
        known.
        """
        right, tried = self._right[agreed], self._tried[agreed]
        for place in range(min(drafted, accepted + 1)):
            tried[place] += 1.0
            right[place] += place < accepted

    def age(self) -> None:
        """A step has gone by."""
        self._age += 1
        if self._age % self.HALF_LIFE == 0:
            for table in (self._right, self._tried):
                table[:] = [[count / 2 for count in counts] for counts in table]


@dataclass(slots=True)
class Lately:
    """How much was guessed in the last steps, and how much of it was right, per sequence that
    decoded. Half of it is of the last 22 steps.
    """

    SHARE: ClassVar[float] = 1 / 32
    drafted: float = 0.0
    accepted: float = 0.0

    def observe(self, decoding: int, drafted: int, accepted: int) -> None:
        """Take in a step in which so many sequences decoded."""
        if decoding:
            self.drafted += self.SHARE * (drafted / decoding - self.drafted)
            self.accepted += self.SHARE * (accepted / decoding - self.accepted)


def price(cost: CostModel, crowd: StepCost, lately: Lately) -> float:
    """What a row of a draft costs, in tokens: those that a step in which ``crowd`` decodes, and
    guesses as it did lately, draws in the time that one row more takes.

    A row of a draft is taken to cost what one sequence more does that decodes and reads only what
    another row has read: its products, its logits, its attention to what is in the cache by then.
    Other guesses that bring more raise the price. A row that is worth it brings more in its time
    than the whole step does in its own, which is what makes most of the time (W. Dinkelbach, On
    Nonlinear Fractional Programming, Management Science 13, 1967).
    """
    if not cost.warm or not crowd.batch:
        return COLD_PRICE
    seconds = cost.predict(crowd)
    context = crowd.query_context // crowd.batch
    row = cost.predict(crowd + StepCost(1, 0, 1, shared_reads=context)) - seconds
    seconds += row * crowd.batch * lately.drafted
    if not seconds > 0:
        return COLD_PRICE
    return min(1.0, row * crowd.batch * (1.0 + lately.accepted) / seconds)
