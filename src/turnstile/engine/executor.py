"""What the step loop needs of whatever computes: :class:`Executor`.

The real one is :class:`turnstile.engine.runner.Runner`; tests use one that computes a hash.
Torch-free, so that the loop can be read and tested without it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from turnstile.core.plan import Outcome, Plan
from turnstile.core.request import Sequence
from turnstile.engine.params import SamplingParams
from turnstile.engine.protocol import TokenLogprobs


@dataclass(slots=True)
class ChunkResult(Outcome):
    """The outcome of one chunk, and log-probabilities where they were asked for.

    ``logprobs`` has one entry for each draw; ``prompt_logprobs`` one for each prompt token that
    the chunk's rows predict (the token at ``start + 1`` first).
    """

    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None


class Executor(Protocol):
    """Computes plans. Not thread-safe; called by the step loop alone."""

    def add(self, sequence: Sequence, params: SamplingParams, seed: int) -> None:
        """Learn how to draw for a sequence, before the first plan that holds it. A fork's siblings
        are added after the commit that made them, with the parameters of their request.
        """

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that has finished. Unknown ones are ignored."""

    def copy_pages(self, copies: Seq[tuple[int, int]]) -> None:
        """Copy whole pages ``(source, target)`` in order, once, before the plan that wants them:
        unlike the rest of a plan they cannot be repeated.
        """

    def execute(self, plan: Plan) -> list[ChunkResult]:
        """Compute the plan's chunks in one forward pass, and draw.

        One result for each chunk. A row that cannot be drawn (NaN, a grammar that allows nothing)
        is a result with an error; an exception means the step failed as a whole. Executing the
        same chunks again gives the same results.
        """
