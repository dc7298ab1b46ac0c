"""Answers of a model that may call tools: :class:`ToolUse` and :class:`ToolFrames`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from turnstile.server.choices import Choice
from turnstile.server.config import ServerConfig
from turnstile.server.errors import ApiError, message_refusal, unsupported
from turnstile.server.frames import ChatFrames, Head, Wishes
from turnstile.server.grammar import Constraint, grammar_refusal
from turnstile.server.model import ServedModel
from turnstile.server.schemas import ChatRequest
from turnstile.server.sse import frame
from turnstile.server.usage import Record
from turnstile.text.errors import GrammarError, MessageError
from turnstile.text.output import Delta
from turnstile.text.tokenizer import Tokenizer
from turnstile.text.tool_calls import Begin, CallReader, Content, Piece
from turnstile.text.tool_formats import FORMATS, ListOfCalls, OnlyArguments, ToolFormat
from turnstile.text.tools import Tools, read_tools


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request's tools mean for its answer.

    Attributes
    ----------
    tools
        What may be called, and what must be.
    format
        How the model writes calls of its own accord, and what their ids look like.
    """

    tools: Tools
    format: ToolFormat

    def reader(self) -> CallReader:
        """Finds the calls in the text of one choice."""
        names = self.tools.names
        if self.tools.only is not None:
            return OnlyArguments(names)
        return ListOfCalls(names) if self.tools.must else self.format.reader(names)

    def constraint(self) -> Constraint | None:
        """What the whole answer has to match. Raises :class:`ApiError` 400."""
        try:
            grammar = self.tools.grammar()
        except GrammarError as error:
            raise grammar_refusal(error, "tools") from None
        return None if grammar is None else Constraint(grammar, "tools")

    def shows_control_tokens(self, tokenizer: Tokenizer) -> bool:
        """Whether calls are found by a control token, which otherwise is no text."""
        marker = self.format.marker
        if self.tools.must or tokenizer.control_pattern.fullmatch(marker) is None:
            return False
        return tokenizer.control_token(marker)[0] in tokenizer.vocabulary.special


def tool_use(request: ChatRequest, model: ServedModel, config: ServerConfig) -> ToolUse | None:
    """Check what a request says of tools; None where there is nothing to call.

    Raises :class:`ApiError` 400 that names the field.
    """
    several = request.parallel_tool_calls is not False
    try:
        tools = read_tools(request.tools, request.tool_choice, several=several)
    except MessageError as error:
        raise message_refusal(error) from None
    if tools is None:
        return None
    name: str | None = config.tool_call_parser
    if name == "auto":
        name = model.chat.tool_format(request.chat_template)
    if not tools.must and (name is None or not config.enable_auto_tool_choice):
        raise _no_auto(name)
    return ToolUse(tools, FORMATS[name or "hermes"])


def _no_auto(name: str | None) -> ApiError:
    why = "is turned off here (--no-enable-auto-tool-choice)"
    if name is None:
        known = ", ".join(FORMATS)
        why = (
            "cannot be had: this model's chat template asks for calls in a form that is none of "
            f"those read here (--tool-call-parser: {known})"
        )
    return unsupported(
        f"tool_choice auto {why}; use none, required, or a function's name.", "tool_choice"
    )


class ToolFrames(ChatFrames):
    """``/v1/chat/completions`` with tools: calls stand beside the content, or in its place."""

    def __init__(
        self, head: Head, wishes: Wishes, tokenizer: Tokenizer, record: Record, use: ToolUse
    ) -> None:
        super().__init__(head, wishes, tokenizer, record)
        self._plain = False  # all text goes through a reader
        self._use = use
        self._readers: dict[int, CallReader] = {}

    def _reader(self, choice: Choice) -> CallReader:
        reader = self._readers.get(choice.index)
        if reader is None:
            reader = self._readers[choice.index] = self._use.reader()
        return reader

    def _middle(self, choice: Choice, delta: Delta) -> bytes:
        return self._events(choice, delta, self._reader(choice).push(delta.text))

    def _last(self, choice: Choice) -> bytes:
        first = b"" if choice.began else self._first(choice)
        choice.began = True
        rest = self._middle(choice, choice.text.take())
        held = self._events(choice, Delta("", [], []), self._reader(choice).finish())
        part = self._part(choice, "", finished=True)
        return first + rest + held + frame(self._chunk([part], choice))

    def _events(self, choice: Choice, delta: Delta, pieces: list[Piece]) -> bytes:
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

    def _written(self, piece: Piece) -> dict[str, object]:
        """What a delta says of a piece."""
        if isinstance(piece, Content):
            return {"content": piece.text}
        if isinstance(piece, Begin):
            return {"tool_calls": [{"index": piece.index, **self._call(piece.name, "")}]}
        return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}

    def _call(self, name: str, arguments: str) -> dict[str, Any]:
        function = {"name": name, "arguments": arguments}
        return {"id": self._use.format.make_id(), "type": "function", "function": function}

    def _part(
        self, choice: Choice, text: str, delta: Delta | None = None, *, finished: bool = False
    ) -> dict[str, object]:
        part = super()._part(choice, text, delta, finished=finished)
        if finished:
            part["finish_reason"] = self._finish(choice)
        return part

    def _finish(self, choice: Choice) -> str | None:
        called = choice.finish == "stop" and self._reader(choice).num_calls
        return "tool_calls" if called else choice.finish

    def _whole(self, choice: Choice, delta: Delta) -> dict[str, object]:
        reader = self._reader(choice)
        content, calls = self._gathered([*reader.push(delta.text), *reader.finish()])
        whole = super()._whole(choice, delta)
        message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        return {**whole, "message": message, "finish_reason": self._finish(choice)}

    def _gathered(self, pieces: Iterable[Piece]) -> tuple[str, list[dict[str, Any]]]:
        """The content and the calls that pieces add up to."""
        content, calls = "", list[dict[str, Any]]()
        for piece in pieces:
            if isinstance(piece, Content):
                content += piece.text
            elif isinstance(piece, Begin):
                calls.append(self._call(piece.name, ""))
            else:
                calls[piece.index]["function"]["arguments"] += piece.text
        return content, calls
