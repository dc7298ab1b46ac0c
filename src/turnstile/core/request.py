"""What the scheduler knows of the work: a :class:`Request` and its :class:`Sequence` objects.

Nothing here is text. A token is an opaque integer, a request is a length, a limit and an owner;
that is why the same core can batch a transcription or a reranking queue.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from turnstile.core.events import WaitReason
from turnstile.core.pages import PageTable


class FinishReason(StrEnum):
    """Why a sequence ended. ``ABORT`` is the client's doing, ``ERROR`` the row's own failure."""

    STOP = "stop"
    LENGTH = "length"
    TIMEOUT = "timeout"
    ABORT = "abort"
    ERROR = "error"


class DuplicateRequestError(ValueError):
    """A sample with this request id and index is alive already."""


class State(StrEnum):
    """Where a sequence is. A preempted sequence is ``WAITING`` again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a client asked for, as costs and limits.

    Attributes
    ----------
    id
        Unique among the requests alive.
    prompt
        Token ids, at least one.
    max_tokens
        Most output tokens of each sample, at least 1 (0 only together with ``score_prompt``).
    n
        Samples wanted. They share the prompt's pages and fork when the prompt is computed.
    tenant, weight
        Whom to charge, and the share that tenant has of the machine.
    priority
        Lower is earlier, within a tenant.
    arrival, deadline
        Seconds on the caller's clock.
    min_tokens, stop_ids
        A sampled token in ``stop_ids`` ends the sequence once ``min_tokens`` are out.
    salt
        Prefix-cache pages are shared only among equal salts.
    read_cache
        False computes every prompt token anew (the result is still published).
    score_prompt
        Every prompt row is sampled for its log-probabilities; implies not reading the cache.
    """

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    n: int = 1
    tenant: str = "default"
    weight: float = 1.0
    priority: int = 0
    arrival: float = 0.0
    deadline: float | None = None
    min_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    salt: bytes = b""
    read_cache: bool = True
    score_prompt: bool = False


class Sequence:
    """One sample of a request: its tokens, how far they are computed, and its pages.

    ``computed < total`` always holds while the sequence lives: the last token known has not been
    through the model yet. Prefill, a cache hit, resumption and decode differ only in these two
    numbers.

    Attributes
    ----------
    request, index
        What was asked for, and which of its ``n`` samples this is.
    tokens, num_prompt
        Prompt and outputs; how many of them are the prompt's.
    computed
        Tokens whose K and V are in the pages.
    table, keys
        Its pages; the prefix-cache keys of the full ones, as far as they have been needed.
    drafts
        Guesses at the next tokens, to be verified in the next step.
    state, wait_reason, waiting_since
        Where it is; while it waits, why and since when.
    fork_width
        Samples that its next draw yields: ``n`` for the first sequence of a request until its
        prompt is computed, 1 for every other.
    arrival_order
        The number of its arrival: the last resort of every order.
    place
        Where it stands among those waiting, smaller first; set by the queue.
    skipped
        How many that stood behind it have started before it, because it did not fit.
    blocked
        When it last did not fit (:mod:`entrance`): the count of changes in the slots, and how many
        pages were cached for it.
    started
        When it first got a slot; None before.
    catching_up
        True from getting a slot until the first draw after that.
    num_cached
        Prompt tokens that came from the prefix cache when it first started.
    charged
        Service booked on its tenant for it.
    preemptions
        How often it lost its slot before it was finished.
    mistakes
        How often its page table was found wrong (:mod:`repair`), or its outcome could not be
        committed.
    """

    __slots__ = (
        "arrival_order",
        "blocked",
        "catching_up",
        "charged",
        "computed",
        "drafts",
        "fork_width",
        "index",
        "keys",
        "mistakes",
        "num_cached",
        "num_prompt",
        "place",
        "preemptions",
        "request",
        "skipped",
        "started",
        "state",
        "table",
        "tokens",
        "wait_reason",
        "waiting_since",
    )

    def __init__(
        self,
        request: Request,
        index: int = 0,
        outputs: Iterable[int] = (),
        *,
        charged: float = 0.0,
        arrival_order: int = 0,
    ) -> None:
        self.request = request
        self.index = index
        self.tokens: list[int] = [*request.prompt, *outputs]
        self.num_prompt = len(request.prompt)
        self.computed = 0
        self.table = PageTable()
        self.keys: list[bytes] = []
        self.mistakes = 0
        self.drafts: tuple[int, ...] = ()
        self.state = State.WAITING
        self.fork_width = 1
        self.num_cached = 0
        self.preemptions = 0
        self.charged = charged
        self.arrival_order = arrival_order
        self.skipped = 0
        self.blocked = (-1, 0)
        self.started: float | None = None
        self.catching_up = False
        self.place: tuple[float, float, int] = (0.0, 0.0, 0)
        self.wait_reason = WaitReason.QUEUED
        self.waiting_since = request.arrival

    @property
    def total(self) -> int:
        """Tokens known: the prompt and what was sampled."""
        return len(self.tokens)

    @property
    def num_outputs(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def remaining(self) -> int:
        """Output tokens still allowed."""
        return self.request.max_tokens - self.num_outputs

    @property
    def outputs(self) -> list[int]:
        """The tokens sampled so far (a copy)."""
        return self.tokens[self.num_prompt :]

    @property
    def decoding(self) -> bool:
        """True when only the newest token is left to compute."""
        return len(self.tokens) - self.computed == 1 and self.fork_width == 1

    def append(self, token: int, max_model_len: int) -> FinishReason | None:
        """Append a draw; returns why it ends the sequence (None: it does not)."""
        request, known = self.request, self.tokens
        known.append(token)
        if token in request.stop_ids and self.num_outputs > request.min_tokens:
            return FinishReason.STOP
        if len(known) >= max_model_len or len(known) - self.num_prompt >= request.max_tokens:
            return FinishReason.LENGTH
        return None

    def extend(
        self, draws: tuple[int, ...], max_model_len: int
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """Append draws up to the one that ends the sequence; returns those taken, and why it ends
        (None: it does not).
        """
        for count, token in enumerate(draws, 1):
            finish = self.append(token, max_model_len)
            if finish:
                return draws[:count], finish
        return draws, None

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.id}/{self.index} {self.state} "
            f"computed {self.computed} of {self.total}, {self.num_outputs} out)"
        )
