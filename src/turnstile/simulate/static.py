"""What servers did before: static batches over contiguous memory, on the same virtual time.

A batch is filled from the queue, its prompts are padded to the longest and computed in one pass,
and it decodes until its longest answer ends; nobody joins in between, and who has ended leaves a
hole that is computed all the same. Every member reserves the longest context, so that the memory
holds ``pool tokens // max_model_len`` members. Kinder than many were: tokens are streamed as they
come, and a batch that is not full when the machine is free starts after ``patience`` seconds.
"""

from __future__ import annotations

import math
from collections import deque

from turnstile.core.admission import NeverFitsError, check_lengths
from turnstile.simulate.history import COMPLETED, History
from turnstile.simulate.load import Load
from turnstile.simulate.setup import Setup
from turnstile.simulate.timing import StepWork


class StaticMachine:
    """A :class:`turnstile.simulate.machine.Machine` without a scheduler.

    Parameters
    ----------
    patience
        Seconds that a batch with room waits for more requests.
    """

    def __init__(
        self, setup: Setup, load: Load, history: History, *, patience: float = 0.05
    ) -> None:
        config = setup.scheduler
        self.setup = setup
        self.load = load
        self.history = history
        self.slots = min(
            config.max_num_seqs, setup.num_pages * setup.page_size // config.max_model_len
        )
        self.outstanding = 0
        self._patience = patience
        self._queue: deque[int] = deque()
        self._batch: list[int] = []
        self._filling_since: float | None = None
        self._longest_prompt = 0
        self._step = 0
        self._steps = 0
        self._told_at = 0.0
        self._free_at = 0.0

    def accept(self, index: int, now: float) -> float:
        self.outstanding += 1
        self._free_at = max(self._free_at, now) + self.setup.front.per_request
        return self._free_at

    def submit(self, index: int, now: float) -> bool:
        load, longest = self.load, self.setup.scheduler.max_model_len
        prompt, output = int(load.prompts[index]), int(load.outputs[index])
        try:
            check_lengths(prompt, load.max_tokens or output, 1, longest, self.slots, longest)
        except NeverFitsError:
            self.outstanding -= 1
            self.history.refuse(index, now)
            return True
        self._queue.append(index)
        return False

    def begin(self, now: float, until: float = math.inf) -> float | None:
        if not self._batch and not self._fill(now):
            return None if not self._queue else self._wait(now)
        rows, step = len(self._batch), self._step
        if step == 0:
            longest = self._longest_prompt
            pairs = rows * longest * (longest + 1) // 2
            work = StepWork(
                chunks=rows, chunk_tokens=rows * longest, chunk_pairs=pairs,
                chunk_context=rows * longest,
            )  # fmt: skip
        else:
            work = StepWork(decodes=rows, decode_context=rows * (self._longest_prompt + step))
        seconds = self.setup.timing.seconds(work, self.history.steps)
        pages = -(-self.setup.scheduler.max_model_len // self.setup.page_size)
        self.history.step(seconds, work, rows * pages)
        return now + seconds

    def _wait(self, now: float) -> float:
        """Nothing runs until the batch is full, or patience is at its end."""
        assert self._filling_since is not None
        return self._filling_since + self._patience

    def _fill(self, now: float) -> bool:
        """Make a batch of those waiting, once it is full or has waited long enough."""
        if not self._queue:
            self._filling_since = None
            return False
        if self._filling_since is None:
            self._filling_since = now
        if len(self._queue) < self.slots and now < self._filling_since + self._patience:
            return False
        self._filling_since = None
        while self._queue and len(self._batch) < self.slots:
            index = self._queue.popleft()
            self.history.started[index] = now
            self._batch.append(index)
        self._longest_prompt = max(int(self.load.prompts[i]) for i in self._batch)
        self._steps = max(int(self.load.outputs[i]) for i in self._batch)
        self._step = 0
        return True

    def complete(self, now: float) -> list[tuple[int, float]]:
        if not self._batch:
            return []  # the end of a wait
        history, step = self.history, self._step
        outputs = [int(self.load.outputs[index]) for index in self._batch]
        rows, ends = sum(step < o for o in outputs), sum(step == o - 1 for o in outputs)
        told = now + self.setup.front.delay(rows, rows if step == 0 else ends)
        told = max(told, self._told_at)
        over: list[tuple[int, float]] = []
        steady = 0
        for index, output in zip(self._batch, outputs, strict=True):
            if step < output:
                steady += history.token(index, told, self._told_at)
            if step == output - 1:
                self.outstanding -= 1
                history.status[index] = COMPLETED
                history.tokens[index] = output
                history.ended[index] = told
                history.end = max(history.end, told)
                over.append((index, told))
        if steady:
            history.gap(told - self._told_at, steady)
        self._told_at = told
        self._step += 1
        if self._step == self._steps:
            self._batch = []
        return over
