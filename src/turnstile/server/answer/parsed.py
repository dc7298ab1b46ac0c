"""Answers that are taken apart: what the model thinks and which tools it calls.

:class:`ParsedFrames` writes them, where a chat has more to find in its answer than text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from turnstile.server.answer.choices import Choice
from turnstile.server.answer.frames import ChatFrames, Outline
from turnstile.server.answer.tools import ToolUse
from turnstile.server.http.sse import frame
from turnstile.text.output import Delta
from turnstile.text.reasoning import (
    CLOSE,
    OPEN,
    AnswerPiece,
    AnswerReader,
    Reasoning,
    ReasoningReader,
)
from turnstile.text.tool_calls import Begin, Content

_TAIL = 8
"""Tokens at a prompt's end in which the opening tag is looked for."""


@dataclass(slots=True)
class _Parsed:
    """One choice while it grows.

    Attributes
    ----------
    reader
        Takes its text apart.
    tokens
        How many there were up to the closing tag.
    closed, thought
        The tag has come; something was thought.
    """

    reader: AnswerReader
    tokens: int = 0
    closed: bool = False
    thought: bool = False


class ParsedFrames(ChatFrames):
    """``/v1/chat/completions`` whose answers are taken apart.

    Parameters
    ----------
    use
        The tools that may be called, if any.
    thinks
        The model may think before it answers.
    """

    def __init__(self, outline: Outline, use: ToolUse | None, *, thinks: bool) -> None:
        super().__init__(outline)
        self._plain = False  # all text goes through a reader
        self._use = use
        self._thinks = thinks
        self._parsed: dict[int, _Parsed] = {}

    def _parsing(self, choice: Choice) -> _Parsed:
        parsed = self._parsed.get(choice.index)
        if parsed is None:
            reasoning = ReasoningReader(began=self._has_begun(choice)) if self._thinks else None
            calls = None if self._use is None else self._use.reader()
            parsed = self._parsed[choice.index] = _Parsed(AnswerReader(reasoning, calls))
        return parsed

    def _has_begun(self, choice: Choice) -> bool:
        """Whether the template has opened the thought already."""
        tail = self._tokenizer.decode(choice.job.generation.prompt[-_TAIL:])
        return tail.rstrip().endswith(OPEN)

    def _read(self, choice: Choice, delta: Delta) -> list[AnswerPiece]:
        """Take the text of a delta apart, and count the tokens that were thought."""
        parsed = self._parsing(choice)
        pieces = parsed.reader.push(delta.text)
        if self._thinks:
            self._count(parsed, delta.token_ids)
            parsed.thought |= any(isinstance(piece, Reasoning) for piece in pieces)
            thinks = parsed.thought or parsed.reader.thinking
            choice.reasoning_tokens = parsed.tokens if thinks else 0
        return self._shown(pieces)

    def _read_end(self, choice: Choice) -> list[AnswerPiece]:
        return self._shown(self._parsing(choice).reader.finish())

    def _shown(self, pieces: list[AnswerPiece]) -> list[AnswerPiece]:
        if self._wishes.reasoning:
            return pieces
        return [piece for piece in pieces if not isinstance(piece, Reasoning)]

    def _count(self, parsed: _Parsed, ids: Sequence[int]) -> None:
        for token in ids:
            if parsed.closed:
                return
            parsed.tokens += 1
            parsed.closed = self._tokenizer.vocabulary.token_text(token) == CLOSE

    def _middle(self, choice: Choice, delta: Delta) -> bytes:
        return self._events(choice, delta, self._read(choice, delta))

    def _last(self, choice: Choice) -> bytes:
        first = b"" if choice.began else self._first(choice)
        choice.began = True
        rest = self._middle(choice, choice.text.take())
        held = self._events(choice, Delta("", [], []), self._read_end(choice))
        part = self._part(choice, "", finished=True)
        return first + rest + held + frame(self._chunk([part], choice))

    def _events(self, choice: Choice, delta: Delta, pieces: list[AnswerPiece]) -> bytes:
        """One event a piece; what goes with the tokens stands in the first."""
        written = [self._written(piece) for piece in pieces]
        if not written:
            if not (delta.token_ids and (self._wishes.token_ids or self._wishes.logprobs)):
                return b""
            written = [{}]
        choice.sent_tokens = choice.num_tokens
        data = b""
        for item in written:
            part = {**self._part(choice, "", delta), "delta": item}
            data += frame(self._chunk([part], choice))
            delta = Delta("", [], [])
        return data

    def _written(self, piece: AnswerPiece) -> dict[str, object]:
        """What a delta says of a piece."""
        if isinstance(piece, Content):
            return {"content": piece.text}
        if isinstance(piece, Reasoning):
            return {"reasoning_content": piece.text, "reasoning": piece.text}
        if isinstance(piece, Begin):
            return {"tool_calls": [{"index": piece.index, **self._call(piece.name)}]}
        return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}

    def _call(self, name: str) -> dict[str, Any]:
        """A call whose arguments are still to come."""
        assert self._use is not None
        function = {"name": name, "arguments": ""}
        return {"id": self._use.format.make_id(), "type": "function", "function": function}

    def _part(
        self, choice: Choice, text: str, delta: Delta | None = None, *, finished: bool = False
    ) -> dict[str, object]:
        part = super()._part(choice, text, delta, finished=finished)
        if finished:
            part["finish_reason"] = self._finish(choice)
        return part

    def _finish(self, choice: Choice) -> str | None:
        called = choice.finish == "stop" and self._parsing(choice).reader.num_calls
        return "tool_calls" if called else choice.finish

    def _whole(self, choice: Choice, delta: Delta) -> dict[str, object]:
        pieces = [*self._read(choice, delta), *self._read_end(choice)]
        message = {"role": "assistant", **self._message(pieces), "refusal": None}
        return {
            **super()._whole(choice, delta),
            "message": message,
            "finish_reason": self._finish(choice),
        }

    def _message(self, pieces: Iterable[AnswerPiece]) -> dict[str, object]:
        """What pieces add up to."""
        content, reasoning, calls = "", "", list[dict[str, Any]]()
        for piece in pieces:
            if isinstance(piece, Content):
                content += piece.text
            elif isinstance(piece, Reasoning):
                reasoning += piece.text
            elif isinstance(piece, Begin):
                calls.append(self._call(piece.name))
            else:
                calls[piece.index]["function"]["arguments"] += piece.text
        message: dict[str, object] = {"content": content}
        if reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        return message
