"""An executor without a model: tokens are a hash.

For tests of everything around the model (the loop, the supervisor, the server): a token depends
on the seed, the sample and every token before it, so that one lost, repeated or changed shows in
all that follow. Torch-free.
"""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Sequence as Seq

from turnstile.core.plan import Chunk, Plan
from turnstile.core.request import Sequence
from turnstile.engine.executor import ChunkResult
from turnstile.engine.params import SamplingParams
from turnstile.engine.protocol import TokenLogprobs


def fake_token(
    history: Seq[int], params: SamplingParams, seed: int, index: int, vocab_size: int
) -> int:
    """The token after ``history`` (prompt and outputs). Greedy requests ignore seed and sample."""
    source = (0, 0) if params.greedy else (seed & 0xFFFFFFFFFFFFFFFF, index)
    packed = struct.pack(f"<QQ{len(history)}I", *source, *history)
    return zlib.crc32(packed) % vocab_size


class FakeExecutor:
    """See the module.

    Parameters
    ----------
    vocab_size
        Tokens are ``0 … vocab_size - 1``.
    seconds_per_step
        How long a step takes.
    fail_at
        The number (from 0) of an ``execute`` call that raises.
    """

    def __init__(
        self,
        vocab_size: int = 32000,
        seconds_per_step: float = 0.0,
        fail_at: int | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.seconds_per_step = seconds_per_step
        self.fail_at = fail_at
        self.calls = 0
        self.known: dict[Sequence, tuple[SamplingParams, int]] = {}

    def add(self, sequence: Sequence, params: SamplingParams, seed: int) -> None:
        self.known[sequence] = (params, seed)

    def remove(self, sequence: Sequence) -> None:
        self.known.pop(sequence, None)

    def copy_pages(self, copies: Seq[tuple[int, int]]) -> None:
        """There are no pages to copy."""

    def execute(self, plan: Plan) -> list[ChunkResult]:
        call = self.calls
        self.calls += 1
        if self.seconds_per_step:
            time.sleep(self.seconds_per_step)
        if call == self.fail_at:
            raise RuntimeError(f"The fake fails at step {call}, as it was told to.")
        return [self._draw(chunk) for chunk in plan.chunks]

    def _draw(self, chunk: Chunk) -> ChunkResult:
        """A forking chunk draws for samples 0, 1, …; every other for its own."""
        sequence = chunk.sequence
        params, seed = self.known[sequence]
        first = sequence.index
        if chunk.drafts:
            tokens = self._verify(sequence, chunk.drafts)
        else:
            tokens = tuple(
                fake_token(sequence.tokens, params, seed, first + k, self.vocab_size)
                for k in range(chunk.samples)
            )
        logprobs = prompt_logprobs = None
        if params.logprobs is not None:
            logprobs = [TokenLogprobs(-1.0, [(token, -1.0)]) for token in tokens]
        if chunk.score:
            end = min(chunk.end, sequence.num_prompt - 1)
            prompt_logprobs = [
                TokenLogprobs(-float(sequence.tokens[i + 1])) for i in range(chunk.start, end)
            ]
        return ChunkResult(tokens, None, logprobs, prompt_logprobs)

    def _verify(self, sequence: Sequence, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens drawn up to the first draft that is wrong, whose place is drawn last."""
        params, seed = self.known[sequence]
        history, drawn = list(sequence.tokens), []
        for draft in (*drafts, None):
            drawn.append(fake_token(history, params, seed, sequence.index, self.vocab_size))
            if drawn[-1] != draft:
                break
            history.append(drawn[-1])
        return tuple(drawn)


def make_fake(model: str) -> FakeExecutor:
    """The executor of a model named ``fake:SECONDS_PER_STEP:VOCABULARY``; both may be left out
    (no time, 1,000 tokens).
    """
    seconds, _, vocabulary = model.partition(":")[2].partition(":")
    return FakeExecutor(int(vocabulary or 1000), seconds_per_step=float(seconds or 0))
