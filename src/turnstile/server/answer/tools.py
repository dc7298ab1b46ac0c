"""Tools that a request brings, and what they mean for its answer: :class:`ToolUse`."""

from __future__ import annotations

from dataclasses import dataclass

from turnstile.server.answer.grammar import Constraint, grammar_refusal
from turnstile.server.answer.schemas import ChatRequest
from turnstile.server.config import ServerConfig
from turnstile.server.errors import ApiError, message_refusal, unsupported
from turnstile.server.model import ServedModel
from turnstile.text.errors import GrammarError, MessageError
from turnstile.text.tokenizer import Tokenizer
from turnstile.text.tool_calls import CallReader
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
