"""What the Python API returns: :class:`RequestOutput`, with one :class:`CompletionOutput` a sample.

Names and shapes are those users of vLLM know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from turnstile.engine.client import Generation
from turnstile.engine.protocol import Row, TokenLogprobs
from turnstile.text.output import TextOptions, TextStream
from turnstile.text.stop import StopAutomaton
from turnstile.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely a token was to the model itself. ``rank`` counts from 1, where it is known."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One sample.

    ``finish_reason`` is None while it grows, then ``stop``, ``length``, ``abort``, ``timeout`` or
    ``error`` (``error`` then says what went wrong). ``stop_reason`` is the stop string or the stop
    token of the request that ended it.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """One prompt and its samples. ``prompt`` is None where token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = False
    num_cached_tokens: int = 0


class OutputBuilder:
    """Makes a :class:`RequestOutput` of the rows that arrive for one request.

    ``client_stop_ids`` are the stop tokens the request itself named: only these are a
    ``stop_reason``.
    """

    def __init__(
        self,
        generation: Generation,
        prompt: str | None,
        tokenizer: Tokenizer,
        client_stop_ids: Sequence[int],
    ) -> None:
        params = generation.params
        options = TextOptions(
            stop=StopAutomaton(params.stop) if params.stop else None,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )
        self._tokenizer = tokenizer
        self._client_stop_ids = frozenset(client_stop_ids)
        self._texts = [TextStream(tokenizer.vocabulary, options) for _ in range(generation.n)]
        self._parts: list[list[str]] = [[] for _ in range(generation.n)]
        scored = params.logprobs is not None
        self.output = RequestOutput(
            generation.request_id,
            prompt,
            generation.prompt,
            [
                CompletionOutput(i, cumulative_logprob=0.0 if scored else None,
                                 logprobs=[] if scored else None)
                for i in range(generation.n)
            ],
            [None] if params.prompt_logprobs is not None else None,
        )  # fmt: skip

    def take(self, row: Row) -> bool:
        """Add a row. True where a stop string is complete, so that the sample must be cancelled."""
        output, text = self.output.outputs[row.sample_index], self._texts[row.sample_index]
        self.output.num_cached_tokens = max(self.output.num_cached_tokens, row.cached_tokens)
        self._take_prompt_logprobs(row.prompt_logprobs or ())
        last = len(row.tokens) - 1
        for place, token in enumerate(row.tokens):
            stopped = text.push(token, is_stop=place == last and row.stop_token is not None)
            output.token_ids.append(token)
            if output.logprobs is not None and row.logprobs:
                entry = row.logprobs[place]
                output.logprobs.append(self._logprobs(token, entry))
                output.cumulative_logprob = (output.cumulative_logprob or 0.0) + entry.logprob
            if stopped:
                break
        if row.finish is not None and not text.stopped:
            text.finish()
            output.finish_reason, output.error = row.finish, row.error
            if row.stop_token in self._client_stop_ids:
                output.stop_reason = row.stop_token
        if text.stopped:
            output.finish_reason, output.stop_reason = "stop", text.stop_reason
        self._parts[row.sample_index].append(text.take().text)
        self.output.finished = all(o.finish_reason is not None for o in self.output.outputs)
        return text.stopped and row.finish is None

    def abort_unfinished(self) -> bool:
        """The stream has ended: what has not finished was aborted. True if there was any."""
        left = [o for o in self.output.outputs if o.finish_reason is None]
        for output in left:
            output.finish_reason = "abort"
            text = self._texts[output.index]
            text.finish()
            self._parts[output.index].append(text.take().text)
        self.output.finished = True
        return bool(left)

    def update(self) -> RequestOutput:
        """The output so far, its texts brought up to date."""
        for output, parts in zip(self.output.outputs, self._parts, strict=True):
            output.text = "".join(parts)
            parts[:] = [output.text]
        return self.output

    def _take_prompt_logprobs(self, entries: Sequence[TokenLogprobs]) -> None:
        scores = self.output.prompt_logprobs
        if scores is not None:
            for entry in entries:
                token = self.output.prompt_token_ids[len(scores)]
                scores.append(self._logprobs(token, entry))

    def _logprobs(self, token: int, entry: TokenLogprobs) -> dict[int, Logprob]:
        text = self._tokenizer.token_text
        found = {
            other: Logprob(value, rank, text(other))
            for rank, (other, value) in enumerate(entry.top, 1)
        }
        own = found.pop(token, None) or Logprob(entry.logprob, None, text(token))
        return {token: own, **found}
