"""What one step computes (:class:`Plan`) and what came of it (:class:`Outcome`).

Chunks and outcomes are never changed once they are made. They are not frozen dataclasses all the
same: every step makes one of each for every sequence, and a frozen one takes four times as long.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

from turnstile.core.request import FinishReason, Sequence


@dataclass(slots=True)
class Chunk:
    """The part of one sequence that a step computes.

    ``sequence.tokens[start:start + count]`` go through the model (drafts follow the known
    tokens: ``count`` includes them). Their K and V go to ``sequence.table``, whose pages exist
    already. ``samples`` draws are taken from the last row: 0 for a chunk that stops short of the
    newest token, 1 in decode, ``n`` where a request forks; with drafts, one draw for each of the
    last ``1 + len(drafts)`` rows. ``score`` asks for the log-probabilities of every row.
    """

    sequence: Sequence
    start: int
    count: int
    samples: int
    drafts: tuple[int, ...] = ()
    score: bool = False

    @property
    def end(self) -> int:
        """Tokens in the cache once this chunk is computed (drafts included)."""
        return self.start + self.count


@dataclass(frozen=True)
class Plan:
    """One forward pass. A value: executing its chunks twice changes nothing but time.

    ``copies`` are page copies ``(source, target)`` for forks, to be made once and in order, before
    anything is computed: a source may already belong to somebody who writes to it in this step.
    ``chunks`` are ordered: decodes first, in order of admission.
    """

    step: int
    chunks: tuple[Chunk, ...]
    copies: tuple[tuple[int, int], ...] = ()

    @cached_property
    def num_decodes(self) -> int:
        """How many chunks, all at the front, compute one token and draw one, and nothing else.

        The i-th of these is also row i of the flat batch, row i of the logits and draw i, so code
        that handles them all at once needs no offsets.
        """
        for i, chunk in enumerate(self.chunks):
            if chunk.count != 1 or chunk.samples != 1 or chunk.drafts or chunk.score:
                return i
        return len(self.chunks)

    @cached_property
    def num_tokens(self) -> int:
        """Rows of the flat batch."""
        return self.num_decodes + sum([c.count for c in self.chunks[self.num_decodes :]])

    def __bool__(self) -> bool:
        return bool(self.chunks)

    def check(self, outcomes: Seq[Outcome]) -> None:
        """Raise :class:`ValueError` unless each outcome answers its chunk."""
        if len(outcomes) != len(self.chunks):
            raise ValueError(f"{len(self.chunks)} chunks but {len(outcomes)} outcomes.")
        for chunk, outcome in zip(self.chunks, outcomes, strict=True):
            draws = len(outcome.tokens)
            if draws == chunk.samples or outcome.error is not None:
                continue
            if not (chunk.drafts and 1 <= draws <= chunk.samples):
                raise ValueError(
                    f"{chunk.samples} draws were asked for, not {draws}, of {chunk.sequence}."
                )


@dataclass(slots=True)
class Outcome:
    """What came of one chunk.

    ``tokens`` are the draws: none, one, ``n`` for a fork (one for each sample, in order), or with
    drafts the accepted ones and one more. ``error`` fails this sequence alone.
    """

    tokens: tuple[int, ...] = ()
    error: str | None = None


@dataclass(slots=True)
class Progress:
    """What a commit did to one sequence: what the caller passes on to the client."""

    sequence: Sequence
    first: int
    """Index of the first of ``tokens`` among the sequence's outputs."""
    tokens: tuple[int, ...]
    finish: FinishReason | None = None
    error: str | None = None
    chunk: int = -1
    """Which chunk of the plan it came from; -1 for none (a deadline, a cancel)."""
    sample: int = 0
    """Which draw of that chunk: the fork's place."""
