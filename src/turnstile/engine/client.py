"""What the rest of Turnstile sees of an engine: :class:`EngineClient` and :class:`Stream`.

Two clients exist: one whose engine is a supervised process (:mod:`turnstile.engine.supervisor`)
and one whose engine runs in a thread of this process (:mod:`turnstile.engine.local`). Both speak
:mod:`turnstile.engine.protocol`, and a caller cannot tell them apart. Torch-free.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from enum import StrEnum

import msgspec

from turnstile.core.admission import NeverFitsError
from turnstile.core.request import DuplicateRequestError
from turnstile.engine.params import SamplingParams
from turnstile.engine.protocol import EngineInfo, Loading, Row, Snapshot, StepResult


class EngineState(StrEnum):
    """Whether requests can be taken. ``RECOVERING``: the engine died and is being restarted."""

    LOADING = "loading"
    READY = "ready"
    RECOVERING = "recovering"
    DRAINING = "draining"
    DEAD = "dead"


class EngineUnavailableError(RuntimeError):
    """The engine takes no work now. ``state`` says why; ``retry_after`` in seconds, if known."""

    def __init__(self, message: str, state: EngineState, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.state = state
        self.retry_after = retry_after


class Generation(msgspec.Struct, kw_only=True):
    """A request, tokenized and checked, as the server hands it to the engine client.

    ``request_id`` should never have been used before.
    ``max_tokens`` is final (the room left in the context is already accounted for), ``seed`` too:
    a restarted engine must draw the same tokens.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int
    n: int = 1
    tenant: str = "default"
    weight: float = 1.0
    priority: int = 0
    arrival: float = 0.0
    deadline: float | None = None
    salt: bytes = b""


class Stream(ABC):
    """The answer to one :class:`Generation`, as it is computed."""

    request_id: str

    @abstractmethod
    def __aiter__(self) -> AsyncIterator[list[Row]]:
        """Yield what has arrived since the last turn, never an empty list, until every sample
        has had a row with ``finish``. Rows of a sample come in order and without gaps, whatever
        happens to the engine meanwhile.
        """

    @abstractmethod
    def offer(self, taker: Callable[[Row], bool] | None) -> None:
        """Call ``taker`` with each row at the moment it comes, as long as the iterating task has
        had all rows before it and waits. A row for which it returns False is yielded by the
        iteration; None ends the offering, and all rows are. ``taker`` must be quick and must not
        raise; it may cancel samples of this stream.
        """

    def pass_tokens(self, sample_index: int, taker: Callable[[int], bool]) -> None:  # noqa: B027
        """Call ``taker`` instead with the token alone, where a row would say nothing but a
        sample's next token, until :meth:`offer` is called again. A stream may ignore this and
        offer the row.
        """

    @abstractmethod
    def cancel(self, sample_index: int | None = None, reason: str = "abort") -> None:
        """End one sample, or all. A cancelled sample yields nothing more; its tokens past this
        point are not charged. Safe at any time, any number of times.
        """

    @abstractmethod
    def abort(self) -> None:
        """End all samples with a last row each, whose ``finish`` is ``abort``: for whoever reads
        this stream it ends properly.
        """


class EngineClient(ABC):
    """An engine that may die and come back without its callers noticing."""

    state: EngineState
    info: EngineInfo | None
    """None until the first engine is ready."""
    snapshot: Snapshot
    """The latest; all zero before the first step."""
    epoch: int = 0
    """Engine processes started so far."""
    loading: Loading | None = None
    """How far loading has come; None before it begins and after it has ended."""

    def prepare(self) -> None:  # noqa: B027 - most engines have nothing to prepare
        """Begin with what needs no event loop; :meth:`start` goes on from there."""

    def abandon(self) -> None:  # noqa: B027 - and nothing to end
        """End what was prepared, if :meth:`start` never came."""

    @abstractmethod
    async def start(self) -> EngineInfo:
        """Start, and return when the engine is ready. Raises :class:`EngineUnavailableError`
        with the engine's own words when it cannot be.
        """

    @abstractmethod
    async def stop(self, grace: float) -> None:
        """Take no more work, let running streams finish for ``grace`` seconds, then end them
        (``finish`` is ``abort``) and end the engine.
        """

    @abstractmethod
    def submit(self, generation: Generation) -> Stream:
        """Hand over a request. Returns at once.

        Raises
        ------
        NeverFitsError
            It exceeds the context length or the whole page pool.
        EngineUnavailableError
            No engine takes work now.
        DuplicateRequestError
            Another request with this id is alive, or was cancelled lately.
        """

    @abstractmethod
    def check_fits(self, prompt_tokens: int, max_tokens: int, n: int) -> None:
        """Raise :class:`NeverFitsError` for what can never run. Cheap; used before queueing."""

    @abstractmethod
    def reset_prefix_cache(self) -> None:
        """Forget every cached page that nobody holds."""

    @abstractmethod
    def subscribe(self, listener: Callable[[StepResult], None]) -> Callable[[], None]:
        """Call ``listener`` with every step's result (metrics, dashboard, traces). Returns the
        way to unsubscribe. A listener must be quick and must not raise.
        """

    def watch(self, interval: float | None) -> None:  # noqa: B027 - not every engine has pages
        """Have a picture of pages and slots (:class:`~turnstile.engine.protocol.Picture`) come with
        the steps, one every ``interval`` seconds; None: no more. Asked again, or after the engine
        was started anew, the next one is whole.
        """

    @property
    @abstractmethod
    def healthy(self) -> bool:
        """The engine is alive, and idle or has ended a step recently."""


__all__ = [
    "DuplicateRequestError",
    "EngineClient",
    "EngineState",
    "EngineUnavailableError",
    "Generation",
    "NeverFitsError",
    "Stream",
]
