"""The bytes of an answer: chunks of a stream and bodies of one piece, for both endpoints.

:class:`Frames` turns what a choice has ready into events. On the common path, nothing but text
asked for, a chunk is a prefix and a suffix encoded once per choice, and the text between them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from turnstile.server.answer.choices import Choice, Job
from turnstile.server.answer.prompt_logprobs import prompt_logprobs_of
from turnstile.server.answer.usage import Record, metrics_of, timings_of, usage_of
from turnstile.server.errors import ApiError
from turnstile.server.http.sse import DONE, encode, error_frames, frame, split_around
from turnstile.text.echo import echo_prompt
from turnstile.text.logprobs import LogprobEntry, chat_logprobs, completion_logprobs
from turnstile.text.output import Delta
from turnstile.text.tokenizer import Tokenizer

_TEXT = "\0the text goes here\0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What all chunks of an answer share."""

    id: str
    created: int
    model: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the client wants to see in the answer."""

    logprobs: bool = False
    prompt_logprobs: bool = False
    echo: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    interval: int = 1
    reasoning: bool = True


@dataclass(frozen=True, slots=True)
class Outline:
    """What an answer is written from.

    Attributes
    ----------
    head, wishes
        What stands in every chunk, and what the client asked to see.
    tokenizer
        To write prompts and their log-probabilities.
    record
        Whose jobs these are, and their times.
    """

    head: Head
    wishes: Wishes
    tokenizer: Tokenizer
    record: Record


class Frames(ABC):
    """Writes one answer."""

    chunk_object: str
    body_object: str

    def __init__(self, outline: Outline) -> None:
        self._head = outline.head
        self._wishes = wishes = outline.wishes
        self._tokenizer = outline.tokenizer
        self._record = outline.record
        self._plain = not (wishes.logprobs or wishes.token_ids or wishes.continuous_usage)
        self._around: dict[int, tuple[bytes, bytes]] = {}

    @property
    def answer_id(self) -> str:
        """The ``id`` in every chunk."""
        return self._head.id

    # -- streams ------------------------------------------------------------------------------

    def step(self, choice: Choice) -> bytes:
        """What can be sent of a choice now; empty where there is nothing."""
        if choice.finish is not None:
            return self._last(choice)
        text = choice.text
        if not choice.began:
            choice.began = True
            return self._first(choice) + self._middle(choice, text.take())
        interval = self._wishes.interval
        if interval > 1 and text.num_tokens - choice.sent_tokens < interval:
            return b""
        if self._plain:
            ready = text.take_text()
            if not ready:
                return b""
            choice.sent_tokens = text.num_tokens
            prefix, suffix = self._around[choice.index]
            return prefix + encode(ready) + suffix
        return self._middle(choice, text.take())

    def around(self, choice: Choice) -> tuple[bytes, bytes] | None:
        """What stands before and after the text in all events to come of a choice, but the last;
        None where it has not begun, or they carry more than text, or not all as it comes.
        """
        if not (choice.began and self._plain and self._wishes.interval == 1 and choice.text.passes):
            return None
        return self._around[choice.index]

    def _first(self, choice: Choice) -> bytes:
        self._around[choice.index] = split_around(
            self._chunk([self._part(choice, _TEXT)], choice), _TEXT
        )
        return b""

    def _middle(self, choice: Choice, delta: Delta) -> bytes:
        if not delta.text and (self._plain or not delta.token_ids):
            return b""
        choice.sent_tokens = choice.num_tokens
        return frame(self._chunk([self._part(choice, delta.text, delta)], choice))

    @abstractmethod
    def _last(self, choice: Choice) -> bytes:
        """Everything left of a finished choice, with its ``finish_reason``."""

    def _part(
        self, choice: Choice, text: str, delta: Delta | None = None, *, finished: bool = False
    ) -> dict[str, object]:
        """One item of a chunk's ``choices``."""
        part: dict[str, object] = {
            "index": choice.index,
            **self._content(text, finished=finished),
            "logprobs": None,
            "finish_reason": choice.finish if finished else None,
        }
        if finished:
            part["stop_reason"] = choice.stop_reason
        if delta is not None:
            if self._wishes.logprobs:
                part["logprobs"] = self._logprobs(delta.logprobs)
            if self._wishes.token_ids:
                part["token_ids"] = delta.token_ids
        return part

    @abstractmethod
    def _content(self, text: str, *, finished: bool) -> dict[str, object]:
        """Where the text stands in an item of a chunk."""

    @abstractmethod
    def _logprobs(self, entries: Sequence[LogprobEntry]) -> dict[str, object]:
        """Log-probabilities as this endpoint writes them."""

    def _chunk(self, choices: list[dict[str, object]], choice: Choice | None) -> dict[str, object]:
        chunk = {**self._opening(self.chunk_object), "choices": choices}
        if self._wishes.continuous_usage:
            chunk["usage"] = usage_of(self._record.jobs)
        elif self._wishes.include_usage:
            chunk["usage"] = None
        return chunk

    def _opening(self, kind: str) -> dict[str, object]:
        head = self._head
        return {
            "id": head.id,
            "object": kind,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
        }

    def ending(self) -> bytes:
        """What ends a stream."""
        return self.usage_frame() + DONE

    def failure(self, error: ApiError) -> bytes:
        """What ends a stream that fails."""
        return error_frames(error.body())

    def usage_frame(self) -> bytes:
        """The chunk with the usage, where the client wants it."""
        if not (self._wishes.include_usage or self._wishes.continuous_usage):
            return b""
        chunk = self._chunk([], None)
        return frame({**chunk, "usage": usage_of(self._record.jobs), **self._times()})

    # -- one piece ----------------------------------------------------------------------------

    def body(self, choices: Sequence[Choice]) -> bytes:
        """The whole answer."""
        return encode(
            {
                **self._opening(self.body_object),
                "choices": [self._whole(choice, choice.text.take()) for choice in choices],
                "usage": usage_of(self._record.jobs),
                **self._times(),
            }
        )

    @abstractmethod
    def _whole(self, choice: Choice, delta: Delta) -> dict[str, object]:
        """One item of the body's ``choices``."""

    def _times(self) -> dict[str, object]:
        return {"metrics": metrics_of(self._record), "timings": timings_of(self._record)}

    def _prompt_fields(self, job: Job) -> dict[str, object]:
        """Extras about the prompt that go with the first chunk of a choice, or its body."""
        fields: dict[str, object] = {}
        if self._wishes.prompt_logprobs:
            fields["prompt_logprobs"] = prompt_logprobs_of(job, self._tokenizer.vocabulary)
        if self._wishes.token_ids:
            fields["prompt_token_ids"] = job.generation.prompt
        return fields


class CompletionFrames(Frames):
    """``/v1/completions``: text directly in the choice; the last text carries the reason."""

    chunk_object = "text_completion"
    body_object = "text_completion"

    def _first(self, choice: Choice) -> bytes:
        super()._first(choice)
        if not (self._wishes.echo or self._wishes.prompt_logprobs or self._wishes.token_ids):
            return b""
        job = choice.job
        text = (job.prompt.text or "") if self._wishes.echo else ""
        delta = Delta(text, [], self._echo(job))
        part = {**self._part(choice, text, delta), **self._prompt_fields(job)}
        return frame(self._chunk([part], choice))

    def _last(self, choice: Choice) -> bytes:
        first = b"" if choice.began else self._first(choice)
        choice.began = True
        delta = choice.text.take()
        choice.sent_tokens = choice.num_tokens
        part = self._part(choice, delta.text, delta, finished=True)
        return first + frame(self._chunk([part], choice))

    def _content(self, text: str, *, finished: bool) -> dict[str, object]:
        return {"text": text}

    def _whole(self, choice: Choice, delta: Delta) -> dict[str, object]:
        job = choice.job
        if self._wishes.echo:
            text = (job.prompt.text or "") + delta.text
            delta = Delta(text, delta.token_ids, [*self._echo(job), *delta.logprobs])
        part = self._part(choice, delta.text, delta, finished=True)
        return {**part, **self._prompt_fields(job)}

    def _echo(self, job: Job) -> list[LogprobEntry]:
        if not (self._wishes.echo and self._wishes.logprobs):
            return []
        return echo_prompt(self._tokenizer, job.generation.prompt, job.prompt_logprobs).entries

    def _logprobs(self, entries: Sequence[LogprobEntry]) -> dict[str, object]:
        return completion_logprobs(entries, as_token_ids=self._wishes.tokens_as_ids)


class ChatFrames(Frames):
    """``/v1/chat/completions``: a role first, deltas, and an empty delta with the reason."""

    chunk_object = "chat.completion.chunk"
    body_object = "chat.completion"

    def _first(self, choice: Choice) -> bytes:
        super()._first(choice)
        part: dict[str, Any] = self._part(choice, "")
        part["delta"] = {"role": "assistant", "content": ""}
        return frame(self._chunk([{**part, **self._prompt_fields(choice.job)}], choice))

    def _last(self, choice: Choice) -> bytes:
        first = b"" if choice.began else self._first(choice)
        choice.began = True
        rest = self._middle(choice, choice.text.take())
        part = self._part(choice, "", finished=True)
        return first + rest + frame(self._chunk([part], choice))

    def _content(self, text: str, *, finished: bool) -> dict[str, object]:
        return {"delta": {} if finished else {"content": text}}

    def _whole(self, choice: Choice, delta: Delta) -> dict[str, object]:
        part: dict[str, object] = {
            "index": choice.index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": self._logprobs(delta.logprobs) if self._wishes.logprobs else None,
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
        }
        if self._wishes.token_ids:
            part["token_ids"] = delta.token_ids
        return {**part, **self._prompt_fields(choice.job)}

    def _logprobs(self, entries: Sequence[LogprobEntry]) -> dict[str, object]:
        return chat_logprobs(entries, as_token_ids=self._wishes.tokens_as_ids)
