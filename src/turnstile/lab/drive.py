"""Runs a load on a server of the lab and writes down what happened, in steps and in seconds.

A server is whatever computes steps: continuous batching (:mod:`turnstile.lab.continuous`) or the
static batcher (:mod:`turnstile.lab.static`). In a run by *steps* requests arrive at numbers of
steps, so that who meets whom, and with it every count, is the same on every machine; in a run by a
clock they arrive at seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from turnstile.bench.metrics import Figures, Limits, summarize
from turnstile.bench.records import Record
from turnstile.lab.load import Ask, Load, OpenLoad

Seconds = Literal["wall", "processor"]
"""Which seconds are measured. ``processor``: those this process has computed, over all its
threads. On one thread that is the time on a machine of one's own, whoever else is at work.
"""

STEP = 0.001
"""Seconds of a step, where figures are made of steps."""
_LOOK_AGAIN = 0.001
_PATIENCE = 100_000


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens that a step drew for a request; ``finish`` (and ``error``) with its last."""

    id: str
    tokens: tuple[int, ...]
    finish: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass.

    ``computed`` tokens went through the model, of which ``useful`` were wanted (the rest is padding
    and slots of those who had ended), for ``sequences`` that somebody waits for. ``reserved``
    tokens of memory were taken, ``filled`` of them with K and V that somebody will read.
    """

    rows: list[Row]
    computed: int
    useful: int
    sequences: int
    reserved: int
    filled: int
    seconds: float
    preemptions: int = 0


class StuckError(RuntimeError):
    """There is work, and the server does none of it: a fault of its policy."""


class Server(Protocol):
    """Computes steps for the requests it was given."""

    def submit(self, ask: Ask, now: float) -> None:
        """Take a request."""

    @property
    def has_work(self) -> bool:
        """Whether anything is waiting or running."""

    def step(self, now: float, more: bool) -> Step | None:
        """Compute one pass; None if none can run now. ``more`` requests are known to come."""


@dataclass(slots=True)
class Answer:
    """What became of a request. Times are of its tokens: in steps, and in seconds."""

    ask: Ask
    arrival_step: int
    arrival_second: float
    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None
    end_step: int = 0
    end_second: float = 0.0

    @property
    def wait(self) -> int:
        """Steps from its arrival to its first token (or its end, if it got none)."""
        return (self.steps[0] if self.steps else self.end_step) - self.arrival_step

    @property
    def latency(self) -> int:
        """Steps from its arrival to its end."""
        return self.end_step - self.arrival_step

    @property
    def gaps(self) -> list[int]:
        """Steps between each of its tokens and the next."""
        return [b - a for a, b in zip(self.steps, self.steps[1:], strict=False)]

    @property
    def longest_gap(self) -> int:
        """Most steps between two of its tokens."""
        return max(self.gaps, default=0)


@dataclass(slots=True)
class Run:
    """A finished run: every answer by its id, and every step in order."""

    answers: dict[str, Answer]
    steps: list[Step]
    seconds: float
    end_step: int

    def tokens(self) -> dict[str, list[int]]:
        """Every answer's tokens."""
        return {name: answer.tokens for name, answer in self.answers.items()}

    @property
    def complete(self) -> list[Answer]:
        """Those who got all they wanted."""
        return [a for a in self.answers.values() if len(a.tokens) == a.ask.length]

    @property
    def dead(self) -> list[Answer]:
        """Those who ended with an error."""
        return [a for a in self.answers.values() if a.error is not None]

    @property
    def computed(self) -> int:
        """Tokens that went through the model."""
        return sum(step.computed for step in self.steps)

    @property
    def useful(self) -> int:
        """Tokens that somebody wanted to go through the model."""
        return sum(step.useful for step in self.steps)

    @property
    def peak_sequences(self) -> int:
        """Most sequences in a step."""
        return max((step.sequences for step in self.steps), default=0)

    @property
    def preemptions(self) -> int:
        """Preemptions in all."""
        return sum(step.preemptions for step in self.steps)

    @property
    def outputs(self) -> int:
        """Tokens that reached somebody."""
        return sum(len(answer.tokens) for answer in self.answers.values())

    def figures(
        self, limits: Limits | None = None, *, by_steps: bool = False, skip: int = 0
    ) -> Figures:
        """The figures of :mod:`turnstile.bench`, with its definitions.

        Parameters
        ----------
        by_steps
            Count every step as a millisecond instead of its seconds.
        skip
            Leave the first so many requests to arrive out.
        """
        records = [_record(a, by_steps) for a in list(self.answers.values())[skip:]]
        window = self.end_step * STEP if by_steps else self.seconds
        return summarize(records, window, limits)


def percentile(values: Iterable[float], percent: float) -> float | None:
    """Percentile, linear between ranks as numpy's; None where there are no values."""
    listed = list(values)
    return float(np.percentile(listed, percent)) if listed else None


def _record(answer: Answer, by_steps: bool) -> Record:
    """An answer as the load generator would have measured it."""
    done = len(answer.tokens) == answer.ask.length
    due = answer.arrival_step * STEP if by_steps else answer.arrival_second
    return Record(
        outcome="completed" if done else "failed",
        due=due,
        sent=due,
        ended=answer.end_step * STEP if by_steps else answer.end_second,
        times=[step * STEP for step in answer.steps] if by_steps else answer.seconds,
        prompt_tokens=len(answer.ask.prompt),
        output_tokens=len(answer.tokens),
        wanted=answer.ask.length,
        counted="usage",
        reason=None if done else answer.error or "cut short",
        status=200,
    )


class _Clock:
    """Steps and seconds since the start; ``now`` is whichever the run goes by."""

    def __init__(self, by_steps: bool, seconds: Seconds) -> None:
        self.by_steps = by_steps
        self.steps = 0
        self._read = time.process_time if seconds == "processor" else time.perf_counter
        self._passes = seconds == "wall"
        self._start = self._read()

    @property
    def second(self) -> float:
        return self._read() - self._start

    @property
    def now(self) -> float:
        return float(self.steps) if self.by_steps else self.second

    def wait(self, until: float | None) -> None:
        """Nothing can run: let time pass, to ``until`` if that is known."""
        if self.by_steps:
            self.steps = self.steps + 1 if until is None else max(self.steps, int(-(-until // 1)))
            return
        seconds = _LOOK_AGAIN if until is None else max(0.0, until - self.second)
        if self._passes:
            time.sleep(seconds)
        else:
            self._start -= seconds  # a processor that has nothing to do counts no time


def drive(
    server: Server,
    load: Load | Iterable[Ask],
    *,
    by_steps: bool = True,
    seconds: Seconds = "wall",
) -> Run:
    """Run until every request has ended.

    Parameters
    ----------
    by_steps
        Requests arrive at numbers of steps; else at seconds.
    seconds
        Which seconds are written down, and (unless ``by_steps``) decide when requests arrive.

    Raises
    ------
    StuckError
        The server has work and never does any.
    """
    source = OpenLoad(load) if isinstance(load, Iterable) else load
    clock = _Clock(by_steps, seconds)
    answers: dict[str, Answer] = {}
    steps: list[Step] = []
    idle = 0
    while True:
        now = clock.now
        for ask in source.due(now):
            # In an open loop the wait counts from the moment the request was due.
            second = clock.second
            due = second if clock.by_steps else min(ask.arrival, second)
            answers[ask.id] = Answer(ask, clock.steps, due)
            server.submit(ask, now)
        upcoming = source.next_at()
        if not server.has_work:
            if upcoming is None:
                return Run(answers, steps, clock.second, clock.steps)
            clock.wait(upcoming)
            continue
        step = server.step(now, upcoming is not None)
        if step is None:
            idle += 1
            if idle > _PATIENCE:
                raise StuckError(f"{idle} times there was work and nothing could run.")
            clock.wait(None)
            continue
        idle = 0
        if step.computed:
            clock.steps += 1
            steps.append(step)
        for row in step.rows:
            answer = answers[row.id]
            _take(answer, row, clock)
            if row.finish is not None:
                source.ended(answer.ask, clock.now)


def _take(answer: Answer, row: Row, clock: _Clock) -> None:
    """Write a row into its answer."""
    second = clock.second
    answer.tokens += row.tokens
    answer.steps += [clock.steps] * len(row.tokens)
    answer.seconds += [second] * len(row.tokens)
    answer.finish, answer.error = row.finish, row.error
    if row.finish is not None:
        answer.end_step, answer.end_second = clock.steps, second
