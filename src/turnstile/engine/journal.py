"""What must survive the engine: every request that is alive, and how far it has come.

The journal lives in the process that holds the clients' connections. It takes a row of a sample
only at the index it expects, so that whatever engines come and go nothing is lost, repeated or
changed; and it can say at any time what to submit for the work to go on (:meth:`Entry.submits`).
"""

from __future__ import annotations

from collections.abc import Mapping

from turnstile.core.request import DuplicateRequestError
from turnstile.engine.client import Generation
from turnstile.engine.protocol import Cancel, Row, Submit

_REMEMBERED = 4096


class JournalError(RuntimeError):
    """An engine reported a row out of order: it cannot be trusted any more."""


class Sample:
    """One sample: its outputs, how it ended (None: not yet), and its books."""

    __slots__ = ("cached", "cancel_later", "charged", "finish", "outputs")

    def __init__(self) -> None:
        self.outputs: list[int] = []
        self.charged = 0.0
        self.cached: int | None = None
        """Prompt tokens that came from the prefix cache, as first reported."""
        self.finish: str | None = None
        self.cancel_later = False
        """Cancelled before it existed in the engine: to be told once it does."""


class Entry:
    """One request.

    Attributes
    ----------
    number
        What its first sample is called in :class:`Draws`; the others follow.
    steps
        Rows with tokens, since the engine that runs now was given the request.
    proven
        It has come through a step of some engine.
    served
        Its tenant's virtual counter when the engine it was in ended; None where there was none.
    """

    __slots__ = (
        "generation",
        "number",
        "prompt_logprobs_seen",
        "prompt_logprobs_taken",
        "proven",
        "samples",
        "served",
        "steps",
        "unfinished",
    )

    def __init__(self, generation: Generation, number: int) -> None:
        self.generation = generation
        self.number = number
        self.samples = [Sample() for _ in range(generation.n)]
        self.unfinished = generation.n
        self.steps = 0
        self.proven = False
        self.served: float | None = None
        self.prompt_logprobs_taken = 0
        self.prompt_logprobs_seen = 0

    @property
    def forked(self) -> bool:
        """Whether the samples exist apart from each other in the engine."""
        return len(self.samples) == 1 or any(sample.outputs for sample in self.samples)

    def submits(self) -> list[Submit]:
        """What to send to an engine that knows nothing: the group that has not forked yet as one,
        else each sample that has not ended, with its outputs.
        """
        if not self.forked:
            return [self._submit(0, len(self.samples))]
        return [
            self._submit(index, 1)
            for index, sample in enumerate(self.samples)
            if sample.finish is None
        ]

    def _submit(self, index: int, n: int) -> Submit:
        generation, sample = self.generation, self.samples[index]
        return Submit(
            request_id=generation.request_id,
            prompt=generation.prompt,
            params=generation.params,
            max_tokens=generation.max_tokens,
            seed=generation.seed,
            n=n,
            sample_index=index,
            outputs=list(sample.outputs),
            tenant=generation.tenant,
            weight=generation.weight,
            priority=generation.priority,
            arrival=generation.arrival,
            deadline=generation.deadline,
            salt=generation.salt,
            charged=sample.charged,
            served=self.served,
            number=self.number + index,
        )


class Journal:
    """The requests that are alive, in the order they came."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.cancels: list[Cancel] = []
        """To be told to the engine: what was cancelled before it existed there."""
        self._numbered: dict[int, tuple[Entry, Sample]] = {}
        """The samples of all entries, by their numbers."""
        self._next_number = 0
        self._cancelled: dict[str, None] = {}
        """The last requests that were cancelled: rows of them may still be on their way."""

    def add(self, generation: Generation) -> Entry:
        """Begin to keep a request.

        Raises
        ------
        DuplicateRequestError
            Its id is alive, or was cancelled so lately that rows of the old one could be taken
            for rows of the new one.
        """
        request_id = generation.request_id
        if request_id in self.entries:
            raise DuplicateRequestError(f"A request with the id {request_id!r} is running already.")
        if request_id in self._cancelled:
            raise DuplicateRequestError(
                f"A request with the id {request_id!r} was cancelled; take another id."
            )
        entry = self.entries[request_id] = Entry(generation, self._next_number)
        self._next_number += generation.n
        for number, sample in enumerate(entry.samples, start=entry.number):
            self._numbered[number] = entry, sample
        return entry

    def find(self, number: int) -> Entry | None:
        """The request of the sample of that number; None where it has ended."""
        found = self._numbered.get(number)
        return None if found is None else found[0]

    def draw(self, number: int, first: int, token: int, charged: float) -> bool:
        """:meth:`take` for one of :class:`Draws`. Returns whether it is news."""
        found = self._numbered.get(number)
        if found is None:
            return False
        entry, sample = found
        outputs = sample.outputs
        if sample.finish is not None or first != len(outputs):
            # Rare, and none of it is special to a draw.
            index = number - entry.number
            row = Row(entry.generation.request_id, index, first, [token], charged=charged)
            return self.take(row) is not None
        outputs.append(token)
        if charged > sample.charged:
            sample.charged = charged
        entry.steps += 1
        entry.proven = True
        return True

    def take(self, row: Row) -> Row | None:
        """Write a row down. Returns what is news of it, None where nothing is (its sample was
        cancelled, or it repeats prompt log-probabilities from before a restart).

        Raises
        ------
        JournalError
            The row does not follow on what is written.
        """
        entry = self.entries.get(row.request_id)
        if entry is None:
            return None
        sample = entry.samples[row.sample_index]
        if row.charged > sample.charged:
            sample.charged = row.charged
        if sample.finish is not None:
            if sample.cancel_later and row.tokens:
                sample.cancel_later = False
                self.cancels.append(Cancel(row.request_id, row.sample_index))
            return None
        if row.first != len(sample.outputs):
            raise JournalError(
                f"Sample {row.sample_index} of {row.request_id} has {len(sample.outputs)} tokens, "
                f"but the engine reports those from {row.first} on."
            )
        if row.tokens:
            sample.outputs += row.tokens
            entry.steps += 1
            entry.proven = True
        if sample.cached is None:
            sample.cached = row.cached_tokens
        if row.cached_tokens != sample.cached:
            row.cached_tokens = sample.cached
        if row.prompt_logprobs:
            self._take_prompt_logprobs(entry, row)
        if row.finish is not None:
            self._end(entry, sample, row.finish)
            if not entry.unfinished and any(other.cancel_later for other in entry.samples):
                self.cancels.append(Cancel(row.request_id))
        elif not row.tokens and not row.prompt_logprobs:
            return None
        return row

    def cancel(self, request_id: str, sample_index: int | None, reason: str) -> Cancel | None:
        """End a sample, or all, for the client's sake. Returns what to tell the engine."""
        entry = self.entries.get(request_id)
        if entry is None:
            return None
        chosen = entry.samples if sample_index is None else [entry.samples[sample_index]]
        chosen = [sample for sample in chosen if sample.finish is None]
        if not chosen:
            return None
        # The first sample of a group that has not forked stands for all of them: the engine may
        # hear of the end of one only when the others can live without it.
        later = not entry.forked and len(chosen) < entry.unfinished
        for sample in chosen:
            sample.cancel_later = later
            self._end(entry, sample, reason)
        if not entry.unfinished:
            self._cancelled[request_id] = None
            if len(self._cancelled) > _REMEMBERED:
                del self._cancelled[next(iter(self._cancelled))]
        if later:
            return None
        return Cancel(request_id, sample_index if entry.unfinished else None, reason)

    def restart(self, served: Mapping[str, float]) -> None:
        """A new engine knows nothing of what the last one did. ``served`` are the virtual counters
        of the tenants that were active there, as last heard of.
        """
        self.cancels.clear()
        for entry in self.entries.values():
            entry.served = served.get(entry.generation.tenant, entry.served)
            entry.steps = 0
            entry.prompt_logprobs_seen = 0
            for sample in entry.samples:
                sample.cancel_later = sample.finish is not None and not entry.forked

    def _take_prompt_logprobs(self, entry: Entry, row: Row) -> None:
        assert row.prompt_logprobs is not None
        repeated = max(0, entry.prompt_logprobs_taken - entry.prompt_logprobs_seen)
        entry.prompt_logprobs_seen += len(row.prompt_logprobs)
        row.prompt_logprobs = row.prompt_logprobs[repeated:] or None
        entry.prompt_logprobs_taken = max(entry.prompt_logprobs_taken, entry.prompt_logprobs_seen)

    def _end(self, entry: Entry, sample: Sample, finish: str) -> None:
        sample.finish = finish
        entry.unfinished -= 1
        if not entry.unfinished:
            del self.entries[entry.generation.request_id]
            for number in range(entry.number, entry.number + len(entry.samples)):
                del self._numbered[number]
