"""A machine on virtual time: a scheduler, and steps that take as long as the timing says."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

from turnstile.core.admission import NeverFitsError, check_lengths
from turnstile.core.cost import StepCost, read_again
from turnstile.core.plan import Chunk, Outcome, Plan, Progress
from turnstile.core.request import FinishReason, Request, Sequence
from turnstile.simulate.door import Door
from turnstile.simulate.fast_forward import FastForward, exact_weight
from turnstile.simulate.history import History
from turnstile.simulate.load import Load
from turnstile.simulate.setup import Setup
from turnstile.simulate.timing import StepWork

STOP = -1
"""The token that ends an answer before its limit."""

_NOTHING = Outcome()
_NOBODY = Plan(0, ())


class Machine(Protocol):
    """What the clock drives: something that takes requests and steps through them."""

    outstanding: int
    """Requests inside, waiting or running."""

    def accept(self, index: int, now: float) -> float:
        """A request reaches the door; returns when the engine sees it."""

    def submit(self, index: int, now: float) -> bool:
        """The engine sees a request. True if it was refused."""

    def begin(self, now: float, until: float = math.inf) -> float | None:
        """Start a step; returns when it will end, None if there is nothing to do. Steps that end
        before ``until``, when something comes from outside, may be taken at once.
        """

    def complete(self, now: float) -> list[tuple[int, float]]:
        """End the step; returns which requests are over, and when their clients know."""


class TurnstileMachine:
    """The very scheduler that serves, stepped on virtual time.

    Parameters
    ----------
    load
        Whose requests come, by their index.
    history
        Where what happens is written down.
    fast
        Leave out what changes nothing, where that is exact; the figures are the same.
    """

    def __init__(self, setup: Setup, load: Load, history: History, *, fast: bool = True) -> None:
        self.setup = setup
        self.load = load
        self.history = history
        self.scheduler = setup.make_scheduler(
            fast=fast
            and not setup.scheduler.separate_prefill
            and not setup.scheduler.speculation
            and all(exact_weight(tenant.weight) for tenant in load.tenants)
        )
        attendance = self.scheduler.attendance
        if isinstance(attendance, FastForward):
            attendance.outputs_of = lambda s: int(load.outputs[int(s.request.id)])
            attendance.token_of = lambda s: _token(int(s.request.id))
            attendance.on_wake = self._on_wake
        gate = setup.make_gate()
        self.door = Door(gate, load) if gate is not None else None
        self.outstanding = 0
        self._free_at = 0.0
        self._inbox: list[int] = []
        self._plan = _NOBODY
        self._seconds = 0.0
        self._told_at = 0.0

    # -- the door ---------------------------------------------------------------------------------

    def accept(self, index: int, now: float) -> float:
        self.outstanding += 1
        self._free_at = max(self._free_at, now) + self.setup.front.per_request
        return self._free_at

    def submit(self, index: int, now: float) -> bool:
        """Commands are taken between steps: until then the request is in the engine's mailbox."""
        try:
            self.check(index)
        except NeverFitsError:
            self.outstanding -= 1
            self.history.refuse(index, now)
            return True
        if self.door is not None and not self.door.enter(index, now):
            self.outstanding -= 1
            self.history.refuse(index, now)
            return True
        self._inbox.append(index)
        return False

    def check(self, index: int) -> None:
        """Raise :class:`NeverFitsError` for what the server would answer with a 400."""
        load, pool = self.load, self.scheduler.pool
        check_lengths(
            int(load.prompts[index]),
            load.max_tokens or int(load.outputs[index]),
            1,
            self.setup.scheduler.max_model_len,
            pool.num_pages,
            pool.page_size,
        )

    def _enter(self, index: int, now: float) -> None:
        load = self.load
        tenant = load.tenant(index)
        output = int(load.outputs[index])
        stops = load.max_tokens is not None and load.max_tokens > output
        self.scheduler.submit(
            Request(
                id=str(index),
                prompt=load.tokens(index),
                max_tokens=load.max_tokens if stops and load.max_tokens else output,
                tenant=tenant.name,
                weight=tenant.weight,
                arrival=self.history.due[index],
                stop_ids=frozenset((STOP,)) if stops else frozenset(),
            ),
            now=now,
        )

    # -- the step ---------------------------------------------------------------------------------

    def begin(self, now: float, until: float = math.inf) -> float | None:
        for index in self._inbox:
            self._enter(index, now)
        self._inbox.clear()
        scheduler = self.scheduler
        if not scheduler.has_work:
            return None
        if isinstance(scheduler.attendance, FastForward) and self.door is None:
            now = self._skip(scheduler.attendance, now, until)
        plan = self._plan = scheduler.plan(now)
        asleep = scheduler.attendance.absent
        if not plan and not asleep.batch:
            return None
        work = self._work(asleep, plan)
        seconds = self._seconds = self.setup.timing.seconds(work, plan.step)
        self.history.step(seconds, work, scheduler.pool.num_held)
        return now + seconds

    def _work(self, asleep: StepCost, plan: Plan) -> StepWork:
        """What those asleep and those in the plan compute."""
        work, scheduler = StepWork(asleep.batch, asleep.query_context).add(plan), self.scheduler
        work.read_again = read_again(scheduler.pool, work.decodes, len(scheduler.running))
        return work

    def _skip(self, sleepers: FastForward, now: float, until: float) -> float:
        """Take the steps in which everybody sleeps; returns when the last of them has ended."""
        scheduler, history = self.scheduler, self.history
        while sleepers.steady:
            cost = sleepers.absent
            work = self._work(cost, _NOBODY)
            seconds = self.setup.timing.seconds(work, scheduler.statistics.steps)
            end = now + seconds
            if not end < until or not sleepers.skip(end):
                break
            scheduler.cost.observe(cost, seconds)
            history.step(seconds, work, scheduler.pool.num_held)
            before, told = self._told_at, self._tell(end, cost.batch)
            history.gap(told - before, cost.batch)
            now = end
        return now

    def complete(self, now: float) -> list[tuple[int, float]]:
        plan, scheduler = self._plan, self.scheduler
        outcomes = [self._draw(chunk) for chunk in plan.chunks]
        steady = scheduler.attendance.absent.batch
        progress = scheduler.commit(plan, outcomes, now, self._seconds)
        rows = (*progress, *scheduler.take_ended())
        before = self._told_at
        told = self._tell(now, steady + sum(bool(r.tokens) for r in rows), self._turning(rows))
        over: list[tuple[int, float]] = []
        happened = scheduler.take_events()
        if self.door is not None:
            self.door.stepped(scheduler, happened)
        for row in rows:
            index = int(row.sequence.request.id)
            if row.tokens:
                steady += self.history.token(index, told, before)
                if self.door is not None:
                    self.door.drew(index, now)
            if row.finish is not None:
                self.outstanding -= 1
                if self.door is not None:
                    self.door.finish(index, now, row.sequence.num_outputs)
                self.history.finish(index, told, row.sequence, row.finish is FinishReason.ERROR)
                over.append((index, told))
        if steady:
            self.history.gap(told - before, steady)
        self.history.events(happened)
        return over

    def _tell(self, now: float, rows: int, turning: int = 0) -> float:
        """When so many rows of a step that ends ``now`` are with their clients: not before those of
        the step before.
        """
        told = now + self.setup.front.delay(rows, turning)
        self._told_at = max(self._told_at, told)
        return self._told_at

    def _turning(self, rows: Iterable[Progress]) -> int:
        """With how many of these rows an answer begins or ends."""
        first = self.history.first
        return sum(
            row.finish is not None
            or (bool(row.tokens) and math.isnan(first[int(row.sequence.request.id)]))
            for row in rows
        )

    def _draw(self, chunk: Chunk) -> Outcome:
        if not chunk.samples:
            return _NOTHING
        sequence = chunk.sequence
        index = int(sequence.request.id)
        last = sequence.num_outputs + 1 == self.load.outputs[index]
        return Outcome((STOP if last and sequence.request.stop_ids else _token(index),))

    def _on_wake(self, sequence: Sequence) -> None:
        """Its last token so far came with the step before this one."""
        self.history.last[int(sequence.request.id)] = self._told_at


def _token(index: int) -> int:
    """What a request answers with, over and over: like no other request, and like no prompt."""
    return 2 * index + 1
