"""What is asked: requests with lengths known beforehand, and when they come."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from turnstile.bench.lengths import LengthDistribution
from turnstile.core.request import Request

END = -1
"""What the scheduler is shown in place of an answer's last token."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request and where its answer will end.

    The client allows ``max_tokens`` and whoever schedules knows no more; the answer ends after
    ``length`` tokens, as if the last of them were the model's end token. ``arrival`` is on the
    clock of the run: in steps, or in seconds.
    """

    id: str
    prompt: tuple[int, ...]
    length: int
    max_tokens: int
    tenant: str = "default"
    arrival: float = 0.0

    def request(self) -> Request:
        """As the scheduler sees it."""
        return Request(
            id=self.id,
            prompt=self.prompt,
            max_tokens=self.max_tokens,
            tenant=self.tenant,
            arrival=self.arrival,
            stop_ids=frozenset((END,)),
        )


def make_asks(
    prompts: LengthDistribution,
    outputs: LengthDistribution,
    count: int,
    vocab_size: int,
    *,
    seed: int = 0,
    name: str = "r",
    tenant: str = "default",
    shared: Seq[int] = (),
    max_tokens: int | None = None,
    longest: int | None = None,
) -> list[Ask]:
    """Draw ``count`` requests with random prompts; the same for the same ``seed``.

    Parameters
    ----------
    shared
        Tokens that every prompt begins with, beyond what ``prompts`` draws.
    max_tokens
        What every client allows, whatever its answer takes; None: just its answer.
    longest
        Most tokens of prompt and answer; longer ones are cut at the end of the answer.
    """
    random = np.random.default_rng(seed)
    prompt_lengths = prompts.draw(count, random).tolist()
    output_lengths = outputs.draw(count, random).tolist()
    asks = []
    for i, (prompt, output) in enumerate(zip(prompt_lengths, output_lengths, strict=True)):
        ids = (*shared, *random.integers(0, vocab_size, prompt).tolist())
        if longest is not None:
            ids = ids[: longest - 1]
            output = min(output, longest - len(ids))
        if max_tokens is not None:
            output = min(output, max_tokens)
        asks.append(Ask(f"{name}{i}", ids, output, max_tokens or output, tenant))
    return asks


def arriving(asks: Iterable[Ask], times: Iterable[float]) -> list[Ask]:
    """The same requests at these moments."""
    return [replace(ask, arrival=float(at)) for ask, at in zip(asks, times, strict=True)]


class Load(Protocol):
    """Who asks when. ``now`` is on the clock of the run."""

    def due(self, now: float) -> list[Ask]:
        """Take out the requests that have come by now."""

    def ended(self, ask: Ask, now: float) -> None:
        """An answer is complete (or has failed)."""

    def next_at(self) -> float | None:
        """When the next request comes whatever happens; None if none does."""


class OpenLoad:
    """Requests that come at their ``arrival``, whatever the machine does."""

    def __init__(self, asks: Iterable[Ask]) -> None:
        self._waiting = deque(sorted(asks, key=lambda ask: ask.arrival))

    def due(self, now: float) -> list[Ask]:
        taken = []
        while self._waiting and self._waiting[0].arrival <= now:
            taken.append(self._waiting.popleft())
        return taken

    def ended(self, ask: Ask, now: float) -> None:
        pass

    def next_at(self) -> float | None:
        return self._waiting[0].arrival if self._waiting else None


class ClosedLoad:
    """``users`` who each ask the next of ``asks`` as soon as they have their answer."""

    def __init__(self, asks: Iterable[Ask], users: int) -> None:
        self._rest = deque(asks)
        self._ready: list[Ask] = []
        for _ in range(min(users, len(self._rest))):
            self._ready.append(self._rest.popleft())

    def due(self, now: float) -> list[Ask]:
        taken, self._ready = self._ready, []
        return [replace(ask, arrival=now) for ask in taken]

    def ended(self, ask: Ask, now: float) -> None:
        if self._rest:
            self._ready.append(self._rest.popleft())

    def next_at(self) -> float | None:
        return 0.0 if self._ready else None
