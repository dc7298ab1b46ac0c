"""Who may start: the memory test, and the three policies that use it.

Let sequence j hold a_j tokens in private pages with b_j still to come. Sequences that decode
advance together, one token a step, and j leaves after b_j steps; at that moment every k with
b_k >= b_j has grown by b_j. So, sorted by b descending, the pages they will ever need at once are

    max over k of  Σ_{j <= k} pages(a_j + b_k)

which is far less than everybody's maximum added up. A sequence still in prefill does not advance
with the others and counts in full, pages(total + b), throughout. A shared page counts once until
its last holder leaves (:attr:`PagePool.num_shared`). ``n > 1`` is n sequences, each with a copy of
the last partial page.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from turnstile.core.pages import PagePool
from turnstile.core.request import Request, Sequence

IntArray = npt.NDArray[np.int64]


class NeverFitsError(ValueError):
    """The request could not run even on an empty machine. ``limit`` names what it exceeds."""

    def __init__(self, message: str, limit: str) -> None:
        super().__init__(message)
        self.limit = limit


def decode_peak(held: IntArray, coming: IntArray, page_size: int) -> int:
    """Most pages that decoding sequences need at once, in O(n · page_size).

    Parameters
    ----------
    held, coming
        For each sequence: tokens in private pages once the next step is written, and how many
        steps it takes after that one.
    """
    if not len(held):
        return 0
    order = np.argsort(-coming, kind="stable")
    held, coming = held[order], coming[order]
    # pages(a + b) splits into whole pages of a, whole pages of b, and 0, 1 or 2 for what is left
    # of both; the latter depends on a only through its residue, so count residues.
    whole, residue = np.divmod(held, page_size)
    rest_whole, rest = np.divmod(coming, page_size)
    one_hot = np.zeros((len(held), page_size), dtype=np.int64)
    one_hot[np.arange(len(held)), residue] = 1
    counts = np.cumsum(one_hot, axis=0)
    left = np.arange(page_size)[None, :] + rest[:, None]
    extra = (left > 0).astype(np.int64) + (left > page_size)
    peaks = np.cumsum(whole) + np.arange(1, len(held) + 1) * rest_whole + (counts * extra).sum(1)
    return int(peaks.max())


def prefill_pages(sequence: Sequence, remaining: int, kept: int, page_size: int) -> int:
    """Private pages a sequence in prefill takes at most, all its samples included.

    ``kept`` pages of its prefix are shared or accounted for elsewhere; ``remaining`` outputs are
    to come. The newest output never enters the cache, hence the -1.
    """
    width = sequence.fork_width
    tail = max(0, remaining - 1)
    if width == 1:
        return -(-(sequence.total + tail) // page_size) - kept
    full, partial = divmod(sequence.total, page_size)
    return full - kept + width * -(-(partial + tail) // page_size)


def request_pages(prompt_tokens: int, max_tokens: int, n: int, page_size: int) -> int:
    """Pages a request takes on an empty machine at worst: :func:`prefill_pages` by lengths."""
    tail = max(0, max_tokens - 1)
    if n == 1:
        return -(-(prompt_tokens + tail) // page_size)
    full, partial = divmod(prompt_tokens, page_size)
    return full + n * -(-(partial + tail) // page_size)


def pages_at_most(sequence: Sequence, page_size: int) -> int:
    """Pages that a sequence, and its siblings to come, can hold in the end if it shares none."""
    longest = sequence.num_prompt + sequence.request.max_tokens
    return sequence.fork_width * -(-longest // page_size)


def check_fits(request: Request, max_model_len: int, num_pages: int, page_size: int) -> None:
    """Raise :class:`NeverFitsError` for what can never run, naming the limit and both numbers."""
    check_lengths(
        len(request.prompt), request.max_tokens, request.n, max_model_len, num_pages, page_size
    )


def check_lengths(
    prompt_tokens: int,
    max_tokens: int,
    n: int,
    max_model_len: int,
    num_pages: int,
    page_size: int,
) -> None:
    """:func:`check_fits` before there is a request: nothing but its lengths matters."""
    tokens = prompt_tokens + max_tokens
    if tokens > max_model_len:
        raise NeverFitsError(
            f"This model's maximum context length is {max_model_len} tokens; the request asks for "
            f"{tokens} ({prompt_tokens} in the prompt, {max_tokens} to generate).",
            "max_model_len",
        )
    pages = request_pages(prompt_tokens, max_tokens, n, page_size)
    if pages > num_pages:
        raise NeverFitsError(
            f"The KV cache holds {num_pages * page_size} tokens ({num_pages} pages of {page_size}) "
            f"and the request can need {pages} pages ({prompt_tokens} prompt tokens, "
            f"{max_tokens} to generate, n={n}).",
            "num_pages",
        )


def check_slots(n: int, max_num_seqs: int) -> None:
    """Raise :class:`NeverFitsError` where not all samples of a request could run at once."""
    if n > max_num_seqs:
        raise NeverFitsError(
            f"n is {n} but the server runs at most {max_num_seqs} sequences at once.",
            "max_num_seqs",
        )


@dataclass(frozen=True, slots=True)
class Candidate:
    """Somebody who wants to start, with what the prefix cache has for it.

    ``matched`` are the pages it would hold at once.
    """

    sequence: Sequence
    matched: list[int]


@dataclass(slots=True)
class Outlook:
    """What is known of those who run, so that a round of admission looks at them once at most.

    Attributes
    ----------
    most
        Pages that all of them can come to hold (:func:`pages_at_most`).
    peak
        Pages they need at the worst moment to come, by the policy's view; None until somebody asks.
        It holds while nobody of them draws, comes or leaves.
    """

    most: int
    peak: int | None = None


class AdmissionPolicy(ABC):
    """Decides whether a candidate may start beside those who run. No side effects.

    ``preempts`` says what happens when pages run out all the same: true, somebody is preempted;
    false, the sequence that needs the page fails.
    """

    name: str
    preempts: bool = True
    lockstep: bool = True
    """Decoding sequences advance one token a step, all of them. False where some may speculate:
    then everybody counts in full.
    """

    @abstractmethod
    def remaining(self, sequence: Sequence) -> int:
        """Output tokens this sequence is expected to still draw, at least 1."""

    def learn(self, tenant: str, outputs: int) -> None:  # noqa: B027
        """Learn that an answer to this tenant ended by itself after so many tokens."""

    def fits(
        self,
        candidate: Candidate,
        running: Iterable[Sequence],
        pool: PagePool,
        reserve: int = 0,
        outlook: Outlook | None = None,
    ) -> bool:
        """Whether all that run, and the candidate, fit the pool less ``reserve`` pages.

        ``outlook`` is what is known of those that run: nobody need be looked at while the most they
        can come to hold leaves room, nor again where the candidate takes nothing of theirs.
        """
        room = pool.num_pages - reserve
        if outlook is None:
            return self.peak(candidate, running, pool) <= room
        if outlook.most + pages_at_most(candidate.sequence, pool.page_size) <= room:
            return True
        if any(pool.owner(page) is not None for page in candidate.matched):
            return self.peak(candidate, running, pool) <= room
        if outlook.peak is None:
            outlook.peak = self.peak(None, running, pool)
        return outlook.peak + self._own_pages(candidate, pool) <= room

    def peak(self, candidate: Candidate | None, running: Iterable[Sequence], pool: PagePool) -> int:
        """Pages needed at the worst moment to come, by this policy's view of the future."""
        page_size = pool.page_size
        given_up, newly_shared = _taken_from_owners(candidate, pool)
        total = pool.num_shared + newly_shared
        held: list[int] = []
        coming: list[int] = []
        for sequence in running:
            table = sequence.table
            private = table.private - (given_up.get(id(table), 0) if given_up else 0)
            kept = len(table.pages) - private
            if self.lockstep and sequence.decoding:
                held.append(sequence.total - kept * page_size)
                coming.append(max(0, self.remaining(sequence) - 1))
            else:
                total += prefill_pages(sequence, self.remaining(sequence), kept, page_size)
        if candidate is not None:
            total += self._own_pages(candidate, pool)
        return total + decode_peak(
            np.asarray(held, dtype=np.int64), np.asarray(coming, dtype=np.int64), page_size
        )

    def _own_pages(self, candidate: Candidate, pool: PagePool) -> int:
        """Pages that a candidate needs besides those that others hold."""
        sequence = candidate.sequence
        # Pages out of the LRU list become its own; the others count as shared already.
        kept = sum(pool.refcount(page) > 0 for page in candidate.matched)
        return prefill_pages(sequence, self.remaining(sequence), kept, pool.page_size)


class GuaranteedAdmission(AdmissionPolicy):
    """Everybody may use all it asked for: nobody is ever preempted for memory."""

    name = "guaranteed"

    def remaining(self, sequence: Sequence) -> int:
        return sequence.remaining


class ExpectedAdmission(AdmissionPolicy):
    """Outputs as long as the tenant's outputs have been; preemption is the safety net.

    The forecast for a sequence with g outputs is a quantile of the outputs of its tenant that were
    longer than g (so it moves on as the sequence outlives it), within ``max_tokens``. The median
    serves: not everybody outlives it at once, and a higher one leaves memory empty (docs/lab.md
    has figures).
    """

    name = "expected"

    def __init__(self, quantile: float = 0.5) -> None:
        self.quantile = quantile
        self._tenants: dict[str, OutputLengths] = {}

    def remaining(self, sequence: Sequence) -> int:
        outputs = sequence.num_outputs
        expected = self._lengths_of(sequence.request.tenant).remaining(outputs)
        return max(1, min(sequence.request.max_tokens - outputs, expected))

    def learn(self, tenant: str, outputs: int) -> None:
        self._lengths_of(tenant).add(outputs)

    def _lengths_of(self, tenant: str) -> OutputLengths:
        lengths = self._tenants.get(tenant)
        if lengths is None:
            lengths = self._tenants[tenant] = OutputLengths(self.quantile)
        return lengths


class UncheckedAdmission(AdmissionPolicy):
    """No test at all, and nobody is preempted: what the book's "break it" shows."""

    name = "unchecked"
    preempts = False

    def remaining(self, sequence: Sequence) -> int:
        return sequence.remaining

    def fits(
        self,
        candidate: Candidate,
        running: Iterable[Sequence],
        pool: PagePool,
        reserve: int = 0,
        outlook: Outlook | None = None,
    ) -> bool:
        return True


class OutputLengths:
    """A histogram of output lengths in geometric buckets, with slow forgetting.

    Cold, it behaves as if ``PRIOR_WEIGHT`` outputs had been seen, spread evenly in the logarithm
    between 16 and 1,024 tokens (real chat traffic has its median near 128).
    """

    EDGES = tuple(round(2 ** (i / 2)) for i in range(37))
    PRIOR_WEIGHT = 8.0
    HALF_LIFE = 2000.0

    def __init__(self, quantile: float) -> None:
        self.quantile = quantile
        edges = np.asarray(self.EDGES, dtype=np.float64)
        prior = ((edges >= 16) & (edges <= 1024)).astype(np.float64)
        self._counts = prior * (self.PRIOR_WEIGHT / prior.sum())
        self._edges = edges
        self._decay = 0.5 ** (1 / self.HALF_LIFE)
        self._forecast: list[int] | None = None

    def add(self, length: int) -> None:
        """An output ended after ``length`` tokens."""
        self._counts *= self._decay
        bucket = bisect_left(self.EDGES, length)
        self._counts[min(bucket, len(self.EDGES) - 1)] += 1
        self._forecast = None

    def remaining(self, outputs: int) -> int:
        """Tokens still to come after ``outputs``, at the quantile."""
        if self._forecast is None:
            self._forecast = self._totals()
        bucket = bisect_right(self.EDGES, outputs)
        return max(1, self._forecast[min(bucket, len(self._forecast) - 1)] - outputs)

    def _totals(self) -> list[int]:
        """For outputs known to end in bucket i or later: the total length at the quantile."""
        sums = np.concatenate([[0.0], np.cumsum(self._counts)])
        before, left = sums[:-1], sums[-1] - sums[:-1]
        last = len(self._edges) - 1
        at = np.searchsorted(sums[1:], before + self.quantile * left)
        at = np.where(left < 1e-9, last, np.clip(at, np.arange(last + 1), last))
        totals: list[int] = self._edges[at].astype(np.int64).tolist()
        return totals


ADMISSION_POLICIES: dict[str, type[AdmissionPolicy]] = {
    policy.name: policy for policy in (ExpectedAdmission, GuaranteedAdmission, UncheckedAdmission)
}


def _taken_from_owners(candidate: Candidate | None, pool: PagePool) -> tuple[dict[int, int], int]:
    """Private pages that would become shared: how many of each table, and in all."""
    given_up: dict[int, int] = {}
    for page in candidate.matched if candidate else ():
        owner = pool.owner(page)
        if owner is not None:
            given_up[id(owner)] = given_up.get(id(owner), 0) + 1
    return given_up, sum(given_up.values())


__all__ = [
    "ADMISSION_POLICIES",
    "AdmissionPolicy",
    "Candidate",
    "ExpectedAdmission",
    "GuaranteedAdmission",
    "NeverFitsError",
    "Outlook",
    "OutputLengths",
    "UncheckedAdmission",
    "check_fits",
    "check_lengths",
    "check_slots",
    "decode_peak",
    "pages_at_most",
    "prefill_pages",
    "request_pages",
]
