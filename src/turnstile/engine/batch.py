"""From a plan to the flat batch, in buffers made once.

Page tables are kept by difference: a sequence has a row from its first step to its last, and only
the pages it gained since the step before are written.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from turnstile.core.plan import Chunk, Plan
from turnstile.core.request import Sequence, State
from turnstile.kernels.base import FlatBatch

PageTables = npt.NDArray[np.int32]


class BatchBuilder:
    """Owns the buffers of the flat batch.

    Parameters
    ----------
    max_tokens, max_sequences
        Most rows and sequences of a step; the buffers grow if a plan has more tokens (only a
        prompt computed without chunks can).
    max_pages
        Most pages of a sequence.
    """

    def __init__(self, max_tokens: int, max_sequences: int, max_pages: int, page_size: int) -> None:
        self._page_size = page_size
        self._tables = np.zeros((max_sequences, max_pages), dtype=np.int32)
        self._written = [0] * max_sequences
        self._life = [0] * max_sequences
        self._row_of: dict[Sequence, int] = {}
        self._free_rows = list(range(max_sequences - 1, -1, -1))
        self._step_tables = np.zeros(max_sequences * max_pages, dtype=np.int32)
        self._offsets = np.zeros(max_sequences + 1, dtype=np.int32)
        self._contexts = np.zeros(max_sequences, dtype=np.int32)
        self._allocate(max_tokens)

    def _allocate(self, max_tokens: int) -> None:
        self._ids = np.zeros(max_tokens, dtype=np.int32)
        self._positions = np.zeros(max_tokens, dtype=np.int32)
        self._sequence_of = np.zeros(max_tokens, dtype=np.int32)
        self._ramp = np.arange(max_tokens, dtype=np.int32)

    def build(self, plan: Plan) -> FlatBatch:
        """Lay out the plan's chunks. The result is a view that the next call overwrites."""
        chunks, count = plan.chunks, plan.num_tokens
        if count > len(self._ids):
            self._allocate(count)
        tables = self._gather_tables([chunk.sequence for chunk in chunks])
        at = decodes = plan.num_decodes
        self._write_decodes(chunks[:decodes])
        logit_rows: list[int] = []
        for i, chunk in enumerate(chunks[decodes:], decodes):
            self._offsets[i] = at
            self._contexts[i] = chunk.end
            self._write(chunk, i, at)
            logit_rows += logit_rows_of(chunk, at)
            at += chunk.count
        self._offsets[len(chunks)] = at
        return FlatBatch(
            page_size=self._page_size,
            ids=self._ids[:at],
            positions=self._positions[:at],
            sequence_of=self._sequence_of[:at],
            page_tables=tables,
            query_offsets=self._offsets[: len(chunks) + 1],
            context_lengths=self._contexts[: len(chunks)],
            logit_rows=np.append(self._ramp[:decodes], np.array(logit_rows, dtype=np.int32)),
        )

    def forget(self, sequence: Sequence) -> None:
        """Free the row of a sequence that runs no more."""
        row = self._row_of.pop(sequence, None)
        if row is not None:
            self._written[row] = 0
            self._free_rows.append(row)

    def _write_decodes(self, chunks: Seq[Chunk]) -> None:
        """Lay out the chunks of one token, all at once: writing a hundred numbers into an array
        costs as much as writing one.
        """
        count = len(chunks)
        self._ids[:count] = [chunk.sequence.tokens[chunk.start] for chunk in chunks]
        self._positions[:count] = [chunk.start for chunk in chunks]
        np.add(self._positions[:count], 1, out=self._contexts[:count])
        self._offsets[:count] = self._sequence_of[:count] = self._ramp[:count]

    def _write(self, chunk: Chunk, index: int, at: int) -> None:
        tokens = chunk.sequence.tokens
        self._sequence_of[at : at + chunk.count] = index
        end = at + chunk.count
        known = chunk.count - len(chunk.drafts)
        self._ids[at : at + known] = tokens[chunk.start : chunk.start + known]
        self._ids[at + known : end] = chunk.drafts
        self._positions[at:end] = self._ramp[: chunk.count]
        self._positions[at:end] += chunk.start

    def _gather_tables(self, sequences: list[Sequence]) -> PageTables:
        """The page tables of the sequences, one a row, as wide as the widest."""
        rows, widest = [], 0
        for sequence in sequences:
            row = self._row_of.get(sequence)
            if row is None:
                row = self._row_of[sequence] = self._take_row()
            pages = len(sequence.table.pages)
            # A table only grows, unless a preemption has cleared it since.
            if self._written[row] < pages or self._life[row] != sequence.preemptions:
                self._write_table(row, sequence)
            rows.append(row)
            widest = max(widest, pages)
        tables = self._step_tables[: len(rows) * widest].reshape(len(rows), widest)
        return np.take(self._tables[:, :widest], rows, axis=0, out=tables)

    def _write_table(self, row: int, sequence: Sequence) -> None:
        """Write the pages that a sequence has gained since the step before."""
        if self._life[row] != sequence.preemptions:
            self._life[row], self._written[row] = sequence.preemptions, 0
        pages, written = sequence.table.pages, self._written[row]
        self._tables[row, written : len(pages)] = pages[written:]
        self._written[row] = len(pages)

    def _take_row(self) -> int:
        if not self._free_rows:
            for sequence in [s for s in self._row_of if s.state is not State.RUNNING]:
                self.forget(sequence)
        return self._free_rows.pop()


def logit_rows_of(chunk: Chunk, at: int) -> list[int]:
    """Rows of the flat batch whose logits the chunk needs, ascending: those that score the prompt
    (each predicts the token after it), then those to draw from.
    """
    end = at + chunk.count
    return [*range(at, at + num_scored(chunk)), *range(end - _num_drawn(chunk), end)]


def num_logit_rows(chunk: Chunk) -> int:
    """How many rows :func:`logit_rows_of` gives."""
    return num_scored(chunk) + _num_drawn(chunk)


def num_scored(chunk: Chunk) -> int:
    """Rows of the chunk that score a prompt token."""
    if not chunk.score:
        return 0
    return max(0, min(chunk.end, chunk.sequence.num_prompt - 1) - chunk.start)


def _num_drawn(chunk: Chunk) -> int:
    """Rows of the chunk that are drawn from."""
    return 1 + len(chunk.drafts) if chunk.samples else 0
