"""Making the outcome of a step true: draws are appended, pages published, sequences ended.

The other half of a plan: what it took pages for has been computed. Nearly all of it is rows that
decode, one token computed and one drawn, which have a short way of their own.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from turnstile.core import events
from turnstile.core.admission import AdmissionPolicy
from turnstile.core.books import Books
from turnstile.core.chunking import need
from turnstile.core.fairness import OUTPUT_CHARGE
from turnstile.core.plan import Chunk, Outcome, Plan, Progress
from turnstile.core.request import FinishReason, Sequence, State


class CommitError(RuntimeError):
    """A commit broke off: see :meth:`Scheduler.commit <turnstile.core.scheduler.Scheduler.commit>`.
    ``progress`` is what of it is true.
    """

    def __init__(self, progress: list[Progress]) -> None:
        super().__init__("An outcome could not be written into the books, which must be repaired.")
        self.progress = progress


class Commit:
    """Writes outcomes into the books, and tells the admission policy how long answers were.

    Parameters
    ----------
    max_model_len
        Tokens of the longest sequence.
    """

    def __init__(self, books: Books, admission: AdmissionPolicy, max_model_len: int) -> None:
        self._books = books
        self._queue = books.queue
        self._admission = admission
        self._page_size = books.pool.page_size
        self._max_model_len = max_model_len

    def write(
        self, plan: Plan, outcomes: Seq[Outcome], now: float, progress: list[Progress]
    ) -> int:
        """Append to ``progress`` chunk by chunk: whatever raises, it says what has been done.
        Returns how many tokens of prompts were computed.
        """
        decodes, prefill = plan.num_decodes, 0
        for number, (chunk, outcome) in enumerate(zip(plan.chunks, outcomes, strict=True)):
            sequence, charged = chunk.sequence, chunk.sequence.charged
            if sequence.state is not State.RUNNING:
                continue
            if chunk.start < sequence.num_prompt:
                prefill += min(chunk.end, sequence.num_prompt) - chunk.start
            try:
                if number < decodes and outcome.error is None and not sequence.catching_up:
                    steps = [self._decode(sequence, outcome.tokens, now)]
                else:
                    steps = self._chunk(chunk, outcome, now)
            except Exception:
                sequence.mistakes += 1
                self._books.take_back(chunk, charged)
                raise
            for step in steps:
                step.chunk = number
            progress += steps
        return prefill

    def _decode(self, sequence: Sequence, tokens: tuple[int, ...], now: float) -> Progress:
        """:meth:`_chunk` for the common case, one token computed and one drawn: the same, without
        what cannot happen then.
        """
        computed = sequence.computed = sequence.computed + 1
        sequence.drafts = ()
        if not computed % self._page_size:
            self._books.publish(sequence, computed - 1, now)
        first = sequence.num_outputs
        finish = sequence.append(tokens[0], self._max_model_len)
        self._queue.charge(sequence, OUTPUT_CHARGE)
        if finish:
            self._finish(sequence, finish, now)
        return Progress(sequence, first, tokens, finish)

    def _chunk(self, chunk: Chunk, outcome: Outcome, now: float) -> list[Progress]:
        sequence = chunk.sequence
        if outcome.error is not None:
            return self._books.fail(sequence, outcome.error, now)
        before = sequence.computed
        sequence.computed = chunk.end
        sequence.drafts = ()
        if sequence.catching_up and need(sequence) <= 1:
            self._books.slots.changes += 1
        if chunk.drafts:
            # K and V of rejected drafts stay in the pages until the next tokens overwrite them.
            return [self._extend(sequence, outcome.tokens, now, publish_from=before)]
        self._books.publish(sequence, before, now)
        if chunk.end == sequence.total and sequence.request.max_tokens == 0:
            return self._books.finish(sequence, FinishReason.LENGTH, now)
        if not chunk.samples:
            return [Progress(sequence, sequence.num_outputs, ())] if chunk.score else []
        if sequence.catching_up:
            sequence.catching_up = False
            self._books.events.append(
                events.Decoding(now, sequence.request.id, sequence.index, sequence.computed)
            )
        siblings = self._books.fork(sequence, now) if sequence.fork_width > 1 else []
        progress = []
        for sample, (member, token) in enumerate(
            zip([sequence, *siblings], outcome.tokens, strict=True)
        ):
            step = self._extend(member, (token,), now)
            step.sample = sample
            progress.append(step)
        return progress

    def _extend(
        self,
        sequence: Sequence,
        tokens: tuple[int, ...],
        now: float,
        publish_from: int | None = None,
    ) -> Progress:
        """Append draws, up to the one that ends the sequence, and finish it there.

        ``publish_from`` is given for drafts: which of the tokens computed since then are right, and
        may be published, is known only once the draws are appended.
        """
        first = sequence.num_outputs
        tokens, finish = sequence.extend(tokens, self._max_model_len)
        self._queue.charge(sequence, OUTPUT_CHARGE * len(tokens))
        if publish_from is not None:
            sequence.computed = min(sequence.computed, sequence.total - 1)
            self._books.publish(sequence, publish_from, now)
        if sequence.state is State.WAITING:
            self._books.waiting.tokens += len(tokens)
        if finish:
            self._finish(sequence, finish, now)
        return Progress(sequence, first, tokens, finish)

    def _finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """A sequence has ended by itself."""
        self._books.finish(sequence, reason, now)
        self._admission.learn(sequence.request.tenant, sequence.num_outputs)
