"""The answer while it grows: :class:`Job` (one prompt) and :class:`Choice` (one sample of it)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from turnstile.engine.client import Generation, Stream
from turnstile.engine.protocol import Row, TokenLogprobs
from turnstile.server.answer.prompts import TokenizedPrompt
from turnstile.server.gate import Place
from turnstile.text.output import TextOptions, TextStream
from turnstile.text.vocabulary import Vocabulary


class Choice:
    """One sample: its text so far, and how it ended.

    Attributes
    ----------
    index
        Its place among the choices of the whole answer.
    finish
        None while it grows, then ``stop``, ``length``, ``timeout``, ``abort`` or ``error``.
    stop_reason
        The stop string or the client's stop token that ended it.
    first_time, last_time
        When its first and its newest tokens arrived, if any have.
    first_tokens
        How many the first were; every later one had to wait for those before it.
    sent_tokens
        Tokens covered by what was streamed.
    began
        Something of it was streamed.
    reasoning_tokens
        Tokens of what was thought before anything was said.
    logprob_sum
        Of its tokens, where log-probabilities were asked for.
    """

    __slots__ = (
        "began",
        "finish",
        "first_time",
        "first_tokens",
        "index",
        "job",
        "last_time",
        "logprob_sum",
        "reasoning_tokens",
        "sent_tokens",
        "stop_reason",
        "text",
    )

    def __init__(self, index: int, job: Job, text: TextStream) -> None:
        self.index = index
        self.job = job
        self.text = text
        self.finish: str | None = None
        self.stop_reason: str | int | None = None
        self.first_time = 0.0
        self.last_time = 0.0
        self.first_tokens = 0
        self.sent_tokens = 0
        self.began = False
        self.logprob_sum = 0.0
        self.reasoning_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens to charge and to report."""
        return self.text.num_tokens

    def take(self, row: Row) -> int:
        """Add a row's tokens; returns how many count. What lies behind a stop string does not."""
        text = self.text
        before = text.num_tokens
        tokens = row.tokens
        if row.stop_token is None and row.logprobs is None:
            for token in tokens:
                if text.push(token):
                    break
        else:
            self._take_with_details(row)
        if text.stopped:
            self.finish, self.stop_reason = "stop", text.stop_reason
        elif row.finish is not None:
            self._end(row)
        return text.num_tokens - before

    def _take_with_details(self, row: Row) -> None:
        last = len(row.tokens) - 1
        for place, token in enumerate(row.tokens):
            logprobs = row.logprobs[place] if row.logprobs else None
            if logprobs is not None:
                self.logprob_sum += logprobs.logprob
            is_stop = place == last and row.stop_token is not None
            if self.text.push(token, logprobs, is_stop=is_stop):
                return

    def _end(self, row: Row) -> None:
        self.text.finish()
        if self.text.stopped:  # the end of a half character completed a stop string
            self.finish, self.stop_reason = "stop", self.text.stop_reason
            return
        self.finish = row.finish
        if row.stop_token in self.job.client_stop_ids:
            self.stop_reason = row.stop_token


class Job:
    """One prompt of a request, with its samples.

    Attributes
    ----------
    generation
        What was handed to the engine.
    prompt
        The prompt as it was sent and as it was tokenized.
    stream, place
        The engine's answer and the place at the gate, once accepted.
    cached_tokens
        Prompt tokens that came from the prefix cache.
    expired
        Its deadline passed while the engine was silent.
    computed
        Its prompt went through the model.
    accepted_drafts, rejected_drafts
        Tokens that were guessed and verified for it.
    prompt_logprobs
        Of prompt tokens 1…, as far as they have arrived.
    grammar_field
        The field of the request that asked for the grammar, if one did.
    """

    def __init__(
        self,
        generation: Generation,
        prompt: TokenizedPrompt,
        client_stop_ids: Sequence[int],
        vocabulary: Vocabulary,
        options: TextOptions,
        first_index: int,
        grammar_field: str | None = None,
    ) -> None:
        self.generation = generation
        self.prompt = prompt
        self.client_stop_ids = frozenset(client_stop_ids)
        self.stream: Stream | None = None
        self.place: Place | None = None
        self.cached_tokens = 0
        self.accepted_drafts = 0
        self.rejected_drafts = 0
        self.computed = False
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.choices = [
            Choice(first_index + k, self, TextStream(vocabulary, options))
            for k in range(generation.n)
        ]
        self.unfinished = generation.n
        self.grammar_field = grammar_field
        self.expired = False
        self._timer: asyncio.TimerHandle | None = None

    def expire_in(self, seconds: float) -> None:
        """End it then, with what there is by that time, unless the engine has ended it before."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    def _expire(self) -> None:
        self.expired = True
        if self.stream is not None and self.unfinished:
            self.stream.cancel()

    def count_drafts(self, row: Row) -> None:
        """Count the draft tokens of a row that had some."""
        accepted = max(0, len(row.tokens) - 1)
        self.accepted_drafts += accepted
        self.rejected_drafts += row.drafted - accepted

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.generation.prompt)

    @property
    def num_output(self) -> int:
        """Tokens of all samples so far."""
        return sum(choice.text.num_tokens for choice in self.choices)

    def release(self, now: float) -> None:
        """Let go of the engine and the gate, whatever state this is in."""
        if self._timer is not None:
            self._timer.cancel()
        if self.stream is not None and self.unfinished:
            self.stream.cancel()
        if self.place is not None:
            ended = [c.text.num_tokens for c in self.choices if c.finish in ("stop", "length")]
            self.place.leave(now, ended, drawn=self.num_output)
