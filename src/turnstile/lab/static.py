"""Static batching, done right: what there was before iterations were scheduled one by one.

A batch is a rectangle. Prompts are padded *on the left* to the longest, so that the newest token of
every row is in the last column and one column a step can be appended to all::

    ids         0  0 17  4 92        mask   . . x x x       positions   . . 0 1 2
                8 11  6  3 40               x x x x x                   0 1 2 3 4
                0  0  0  0  7               . . . . x                   . . . . 0

The mask keeps real tokens from attending to padding, and positions count real tokens only: without
the two, padding changes the answers. The first pass computes the rectangle, every other one new
token a row against the cache. Rows that have ended stay until the longest ends; who comes later
waits for the whole batch to leave.

Padding is computed like everything else: that is its price. It runs on the kernels that serve, so
that the same request gives the same tokens here and there, bit for bit.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from turnstile.core.plan import Chunk, Plan
from turnstile.core.request import FinishReason, Request, Sequence, State
from turnstile.engine.params import SamplingParams
from turnstile.lab.contiguous import ContiguousPool
from turnstile.lab.drive import Row, Step
from turnstile.lab.load import Ask
from turnstile.lab.model import LabModel

PAD = 0
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Prompts padded on the left, ``[rows, columns]``. Positions of padding mean nothing."""

    ids: IntArray
    mask: npt.NDArray[np.bool_]
    positions: IntArray


def pad_left(prompts: list[tuple[int, ...]]) -> Rectangle:
    """Lay prompts out as a rectangle whose last column holds everybody's newest token."""
    width = max(map(len, prompts))
    ids = np.full((len(prompts), width), PAD, dtype=np.int64)
    mask = np.zeros((len(prompts), width), dtype=np.bool_)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = True
    return Rectangle(ids, mask, np.cumsum(mask, axis=1) - 1)


@dataclass(slots=True)
class _Slot:
    """A row of the batch: its sequence, and the padding that stands in where it has nothing."""

    ask: Ask
    sequence: Sequence
    padding: Sequence
    ended: bool = False


@dataclass(slots=True)
class _Batch:
    slots: list[_Slot]
    prompts: Rectangle
    prefilled: bool = False


class StaticServer:
    """Batches of up to ``batch_size`` requests, one after another.

    Parameters
    ----------
    memory_tokens, max_model_len
        The contiguous cache: a batch has at most as many rows as there are reservations.
    patience
        How long a batch waits to fill, from the arrival of its first request, on the run's clock.
        It starts at once when it is full, or when nobody else is known to come.
    """

    def __init__(
        self,
        model: LabModel,
        *,
        memory_tokens: int,
        max_model_len: int,
        batch_size: int,
        patience: float = 16.0,
    ) -> None:
        self.pool = ContiguousPool(memory_tokens, max_model_len)
        self.batch_size = min(batch_size, self.pool.num_pages)
        self.patience = patience
        self._longest = self.pool.page_size
        # What padding writes goes to one place, which nobody reads: every padded row writes the
        # same bits there.
        self._nowhere = self.pool.num_pages
        self._runner = model.runner(
            num_pages=self.pool.num_pages + 1,
            page_size=self.pool.page_size,
            max_tokens=self.batch_size,
            max_sequences=2 * self.batch_size,
        )
        self._waiting: deque[tuple[Ask, float]] = deque()
        self._batch: _Batch | None = None
        self._steps = 0
        self.padding = 0
        """Tokens computed because prompts are padded."""
        self.idle = 0
        """Tokens computed for rows that had ended."""

    # -- Server -----------------------------------------------------------------------------------

    def submit(self, ask: Ask, now: float) -> None:
        if len(ask.prompt) + ask.max_tokens > self._longest:
            raise ValueError(f"{ask.id} is longer than the {self._longest} tokens of a row.")
        self._waiting.append((ask, now))

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or self._batch is not None

    def step(self, now: float, more: bool) -> Step | None:
        if self._batch is not None and all(slot.ended for slot in self._batch.slots):
            self._leave(self._batch)
        if self._batch is None:
            if not self._waiting:
                return Step([], 0, 0, 0, 0, 0, 0.0)
            full = len(self._waiting) >= self.batch_size
            if more and not full and now - self._waiting[0][1] < self.patience:
                return None
            self._batch = self._fill()
        return self._run(self._batch)

    # -- inside -----------------------------------------------------------------------------------

    def _fill(self) -> _Batch:
        asks = [self._waiting.popleft()[0] for _ in range(min(self.batch_size, len(self._waiting)))]
        prompts = pad_left([ask.prompt for ask in asks])
        batch = _Batch([], prompts)
        for row, ask in enumerate(asks):
            sequence = Sequence(ask.request())
            self.pool.append(sequence.table)
            missing = int((~prompts.mask[row]).sum())
            nothing = (PAD,) * max(1, missing)
            padding = Sequence(Request(id=f"{ask.id}-padding", prompt=nothing, max_tokens=1))
            padding.table.pages.append(self._nowhere)
            sequence.state = padding.state = State.RUNNING
            self._runner.add(sequence, SamplingParams(temperature=0.0), 0)
            batch.slots.append(_Slot(ask, sequence, padding))
        return batch

    def _leave(self, batch: _Batch) -> None:
        for slot in batch.slots:
            self.pool.clear(slot.sequence.table)
            slot.sequence.state = slot.padding.state = State.FINISHED
            self._runner.remove(slot.sequence)
            self._runner.remove(slot.padding)
        self._batch = None

    def _run(self, batch: _Batch) -> Step:
        first = not batch.prefilled
        chunks = self._prompt_chunks(batch) if first else self._decode_chunks(batch)
        plan = Plan(self._steps, tuple(chunks))
        began = time.perf_counter()
        results = self._runner.execute(plan)
        seconds = time.perf_counter() - began
        self._steps += 1
        batch.prefilled = True
        rows: list[Row] = []
        wasted = 0
        active = sum(not slot.ended for slot in batch.slots)
        members = {id(slot.sequence): slot for slot in batch.slots}
        for chunk, result in zip(chunks, results, strict=True):
            slot = members.get(id(chunk.sequence))
            if slot is None:
                wasted += chunk.count
                continue
            slot.sequence.computed = chunk.end
            slot.sequence.tokens += result.tokens
            finish = None
            if result.error is not None or slot.sequence.num_outputs == slot.ask.length:
                slot.ended = True
                finish = FinishReason.ERROR if result.error else FinishReason.STOP
            rows.append(Row(slot.ask.id, result.tokens, finish, result.error))
        if first:
            self.padding += wasted
        else:
            self.idle += wasted
        return Step(
            rows=rows,
            computed=plan.num_tokens,
            useful=plan.num_tokens - wasted,
            sequences=active,
            reserved=len(batch.slots) * self._longest,
            filled=sum(slot.sequence.computed for slot in batch.slots if not slot.ended),
            seconds=seconds,
        )

    def _prompt_chunks(self, batch: _Batch) -> list[Chunk]:
        """The rectangle, row by row: where the mask is off a run of padding, where it is on the
        prompt. Attention never crosses from one run to another, which is what the mask says; and
        a run begins at position 0, which is what the positions say.
        """
        chunks = []
        for slot, mask, positions in zip(
            batch.slots, batch.prompts.mask, batch.prompts.positions, strict=True
        ):
            missing = int((~mask).sum())
            if missing:
                chunks.append(Chunk(slot.padding, 0, missing, 0))
            start = int(positions[missing])
            chunks.append(Chunk(slot.sequence, start, int(mask.sum()), 1))
        return chunks

    def _decode_chunks(self, batch: _Batch) -> list[Chunk]:
        """One column: the newest token of every row, and padding where a row has ended."""
        return [
            Chunk(slot.padding, 0, 1, 0)
            if slot.ended
            else Chunk(slot.sequence, slot.sequence.computed, 1, 1)
            for slot in batch.slots
        ]
