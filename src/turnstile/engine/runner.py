"""The executor that serves: one forward pass over one flat row of tokens, then the draws."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import islice
from typing import TYPE_CHECKING

from turnstile.core.plan import Chunk, Plan
from turnstile.core.request import Sequence
from turnstile.engine.batch import BatchBuilder, num_logit_rows, num_scored
from turnstile.engine.constraints import Job
from turnstile.engine.executor import ChunkResult
from turnstile.engine.params import SamplingParams
from turnstile.engine.protocol import TokenLogprobs
from turnstile.engine.sampler import BAD_LOGITS, Draw, Drawn, Sampler
from turnstile.kernels.base import FloatArray, Opaque
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

    def copy_pages(self, copies: Seq[tuple[int, int]]) -> None:
        self._decoder.backend.copy_pages(self._kv, list(copies))

    def execute(self, plan: Plan) -> list[ChunkResult]:
        batch = self._builder.build(plan)
        logits = self._decoder.forward(batch, self._kv)
        likeliest = self._sampler.likeliest(logits)
        chunks, decodes = plan.chunks, plan.num_decodes
        results = [ChunkResult((token,)) for token in likeliest.tokens[:decodes]]
        results += [ChunkResult()] * (len(chunks) - decodes)
        # A greedy sequence in decode has its token already; `asking` are the chunks that need more.
        sound = likeliest.sound
        asking = [
            i for i in range(decodes) if not (sound[i] and self._jobs[chunks[i].sequence].plain)
        ]
        ends = list(range(1, decodes + 1))
        for i, chunk in enumerate(chunks[decodes:], decodes):
            rows = num_logit_rows(chunk)
            end = (ends[-1] if ends else 0) + rows
            ends.append(end)
            if chunk.drafts and self._jobs[chunk.sequence].plain and all(sound[end - rows : end]):
                tokens = likeliest.tokens[end - rows : end]
                results[i] = ChunkResult(tuple(tokens[: accepted(chunk.drafts, tokens)]))
            else:
                asking.append(i)
        drawing = [i for i in asking if chunks[i].samples]
        draws = [draw for i in drawing for draw in self._draws(chunks[i], ends[i])]
        drawn = iter(self._sampler.draw(logits, likeliest, draws))
        for i in asking:
            results[i] = self._result(chunks[i], logits, ends[i], drawn)
        return results

    def _draws(self, chunk: Chunk, end: int) -> list[Draw]:
        """The draws of a chunk whose logits end before row ``end``."""
        sequence = chunk.sequence
        job = self._jobs[sequence]
        position = sequence.num_outputs
        if chunk.samples > 1 and not chunk.drafts:
            return [Draw(job, end - 1, sample, position) for sample in range(chunk.samples)]
        first = end - chunk.samples
        return [Draw(job, first + i, sequence.index, position + i) for i in range(chunk.samples)]

    def _result(
        self, chunk: Chunk, logits: FloatArray, end: int, drawn: Iterator[Drawn]
    ) -> ChunkResult:
        """What came of a chunk whose logits end before row ``end``, and whose draws are next."""
        draws = list(islice(drawn, chunk.samples))
        if chunk.drafts:  # what was drawn after a wrong draft, an error too, does not count
            draws = draws[: accepted(chunk.drafts, [draw.token for draw in draws])]
        for draw in draws:
            if draw.error is not None:
                return ChunkResult(error=draw.error)
        tokens = [draw.token for draw in draws]
        logprobs = [draw.logprobs for draw in draws if draw.logprobs is not None]
        scored = None
        if chunk.score:
            scored = self._score(chunk, logits[end - num_logit_rows(chunk) : end])
            if any(score.logprob != score.logprob for score in scored):
                return ChunkResult(error=BAD_LOGITS)
        return ChunkResult(tuple(tokens), None, logprobs or None, scored)

    def _score(self, chunk: Chunk, logits: FloatArray) -> list[TokenLogprobs]:
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
