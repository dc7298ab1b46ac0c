"""The executor that serves: one forward pass over one flat row of tokens, then the draws."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import accumulate, islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from turnstile.core.plan import Chunk, Outcome, Plan
from turnstile.core.request import Sequence
from turnstile.engine.batch import BatchBuilder, num_logit_rows, num_scored
from turnstile.engine.constraints import Job
from turnstile.engine.executor import ChunkResult
from turnstile.engine.params import SamplingParams
from turnstile.engine.protocol import TokenLogprobs
from turnstile.engine.sampler import BAD_LOGITS, Draw, Drawn, Sampler
from turnstile.kernels.base import Opaque
from turnstile.models.decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Callable

    from turnstile.text.grammar import GrammarCompiler


class Runner:
    """Executes plans with a :class:`Decoder` over its page pool.

    ``grammars`` makes the grammar compiler when the first constrained request arrives.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: Opaque,
        builder: BatchBuilder,
        grammars: Callable[[], GrammarCompiler],
    ) -> None:
        self._decoder = decoder
        self._kv = kv
        self._builder = builder
        self._sampler = Sampler(decoder.backend)
        self._jobs: dict[Sequence, Job] = {}
        self._make_grammars = grammars
        self._grammars: GrammarCompiler | None = None

    def add(self, sequence: Sequence, params: SamplingParams, seed: int) -> None:
        """See :class:`Executor`. Raises :class:`GrammarError` for one that does not compile."""
        grammar = None
        if params.grammar is not None:
            if self._grammars is None:
                self._grammars = self._make_grammars()
            grammar = self._grammars.start(params.grammar)
        self._jobs[sequence] = Job(sequence, params, seed, grammar)

    def remove(self, sequence: Sequence) -> None:
        self._jobs.pop(sequence, None)
        self._builder.forget(sequence)

    @torch.inference_mode()
    def copy_pages(self, copies: Seq[tuple[int, int]]) -> None:
        self._decoder.backend.copy_pages(self._kv, list(copies))

    @torch.inference_mode()
    def execute(self, plan: Plan) -> list[ChunkResult]:
        batch = self._builder.build(plan)
        logits = self._decoder.forward(batch, self._kv)
        ends = list(accumulate(map(num_logit_rows, plan.chunks)))
        draws: list[Draw] = []
        for chunk, end in zip(plan.chunks, ends, strict=True):
            if chunk.samples:
                draws += self._draws(chunk, end)
        drawn = iter(self._sampler.draw(logits, draws))
        results = []
        for chunk, end in zip(plan.chunks, ends, strict=True):
            # A view of a tensor costs as much as all else here: only who is scored gets one.
            rows = logits[end - num_logit_rows(chunk) : end] if chunk.score else None
            results.append(self._result(chunk, rows, drawn))
        return results

    def _draws(self, chunk: Chunk, end: int) -> list[Draw]:
        """The draws of a chunk whose logits end at row ``end``."""
        sequence = chunk.sequence
        job = self._jobs[sequence]
        position = sequence.num_outputs
        if chunk.samples > 1 and not chunk.drafts:
            return [Draw(job, end - 1, sample, position) for sample in range(chunk.samples)]
        first = end - chunk.samples
        return [Draw(job, first + i, sequence.index, position + i) for i in range(chunk.samples)]

    def _result(self, chunk: Chunk, scored: Tensor | None, drawn: Iterator[Drawn]) -> ChunkResult:
        if chunk.samples == 1 and not chunk.drafts and scored is None:
            # Whoever decodes, which is nearly everybody in a crowd: no lists, no loops.
            token, logprob, error = next(drawn)
            if error is not None:
                return ChunkResult(Outcome(error=error))
            return ChunkResult(Outcome((token,)), None if logprob is None else [logprob])
        draws = list(islice(drawn, chunk.samples))
        prompt_logprobs = None if scored is None else self._score(chunk, scored)
        for draw in draws:
            if draw.error is not None:
                return ChunkResult(Outcome(error=draw.error))
        tokens = [draw.token for draw in draws]
        if chunk.drafts:
            tokens = tokens[: accepted(chunk.drafts, tokens)]
        logprobs = [d.logprobs for d in draws[: len(tokens)] if d.logprobs is not None]
        if prompt_logprobs and any(p.logprob != p.logprob for p in prompt_logprobs):
            return ChunkResult(Outcome(error=BAD_LOGITS))
        return ChunkResult(Outcome(tuple(tokens)), logprobs or None, prompt_logprobs)

    def _score(self, chunk: Chunk, logits: Tensor) -> list[TokenLogprobs]:
        sequence = chunk.sequence
        count = num_scored(chunk)
        targets = sequence.tokens[chunk.start + 1 : chunk.start + 1 + count]
        top = self._jobs[sequence].params.prompt_logprobs or 0
        return self._sampler.score(logits[:count], targets, top)


def accepted(drafts: tuple[int, ...], drawn: list[int]) -> int:
    """How many of the draws count: each draft equal to the draw before it proves the next one."""
    for i, draft in enumerate(drafts):
        if drawn[i] != draft:
            return i + 1
    return len(drawn)
