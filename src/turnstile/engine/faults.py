"""Disasters on demand: a prompt that begins with :data:`FAULT` makes its own step fail.

For tests of recovery, over any executor. They exist only in an engine whose operator has set
TURNSTILE_FAULTS=1 in the environment of the server: no request, header or flag can switch them
on, and where they are off such a prompt is a prompt like any other. Torch-free.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence as Seq
from enum import IntEnum

from turnstile.core.plan import Chunk, Plan
from turnstile.core.request import Sequence
from turnstile.engine.executor import ChunkResult, Executor
from turnstile.engine.params import SamplingParams

logger = logging.getLogger(__name__)

FAULT = (7, 7, 7)
"""How a prompt that asks for a fault begins: the kind comes next, then when it strikes."""

_HANG = 3600.0
_SLOW = 0.05


class Fault(IntEnum):
    """What a prompt can make happen in the step that draws for it."""

    EXIT = 1
    """The process ends, as if killed."""
    HANG = 2
    """The step does not end."""
    ERROR = 3
    """Its own row fails."""
    RAISE = 4
    """The step raises."""
    CORRUPT = 5
    """The step raises and leaves the page tables wrong."""
    SLOW = 6
    """Every step it is in takes a twentieth of a second."""


def fault_prompt(fault: Fault, at: int = 0, *rest: int) -> list[int]:
    """A prompt whose request suffers ``fault`` once it has ``at`` outputs."""
    return [*FAULT, int(fault), at, *rest]


def enabled() -> bool:
    """Whether the operator asked for faults."""
    return os.environ.get("TURNSTILE_FAULTS") == "1"


def with_faults(executor: Executor) -> Executor:
    """The executor, able to fail where the operator asked for it, itself everywhere else."""
    if not enabled():
        return executor
    logger.warning("TURNSTILE_FAULTS=1: prompts can end this engine. For tests only.")
    return FaultyExecutor(executor)


class FaultyExecutor:
    """An executor that obeys prompts which ask for a fault."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def add(self, sequence: Sequence, params: SamplingParams, seed: int) -> None:
        self._executor.add(sequence, params, seed)

    def remove(self, sequence: Sequence) -> None:
        self._executor.remove(sequence)

    def copy_pages(self, copies: Seq[tuple[int, int]]) -> None:
        self._executor.copy_pages(copies)

    def execute(self, plan: Plan) -> list[ChunkResult]:
        faults = [_fault(chunk) for chunk in plan.chunks]
        if Fault.EXIT in faults:
            os._exit(17)
        if Fault.HANG in faults:
            time.sleep(_HANG)
        if Fault.SLOW in faults:
            time.sleep(_SLOW)
        for chunk, fault in zip(plan.chunks, faults, strict=True):
            if fault is Fault.CORRUPT:
                chunk.sequence.table.pages.pop()
                raise RuntimeError("This step loses a page, as a prompt told it to.")
        if Fault.RAISE in faults:
            raise RuntimeError("This step fails, as a prompt told it to.")
        return [
            ChunkResult(error="This row fails, as its prompt told it to.")
            if fault is Fault.ERROR
            else result
            for fault, result in zip(faults, self._executor.execute(plan), strict=True)
        ]


def _fault(chunk: Chunk) -> Fault | None:
    sequence = chunk.sequence
    named = len(FAULT)
    if tuple(sequence.tokens[:named]) != FAULT or sequence.num_prompt < named + 2:
        return None
    kind, at = sequence.tokens[named : named + 2]
    if kind not in list(Fault):
        return None
    strikes = chunk.samples and sequence.num_outputs == at
    return Fault(kind) if strikes or kind == Fault.SLOW else None
