"""Chats to token ids: :class:`ChatEncoder` puts messages, template and tokenizer together."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnstile.text.control_text import Marks, choose_marks, encode_marked, mark, strings_in, unmark
from turnstile.text.errors import MessageError, TemplateError
from turnstile.text.messages import (
    Message,
    has_tool_calls,
    normalize_messages,
    with_string_arguments,
)
from turnstile.text.template import CompiledTemplate, TemplateTypeError, compile_template
from turnstile.text.tokenizer import Tokenizer
from turnstile.text.tool_formats import format_of
from turnstile.text.tools import with_calls_written, with_tools_told

_RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
     "chat_template", "tokenize"}
)  # fmt: skip
_ASKS_FOR_NULL = re.compile(r"content(?:['\"]\])?\s+is\s+(?:not\s+)?none")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatInput:
    """One chat to render.

    Attributes
    ----------
    messages
        As the client sent them: ``role``, ``content`` (string or text parts) and the rest.
    tools
        Given to the template, or written into the messages if it does not know the word.
    documents
        Given to the template; refused if it does not know the word.
    add_generation_prompt
        End with the header of the assistant's turn.
    continue_final_message
        Leave the last message open, to be continued. Excludes ``add_generation_prompt``.
    template
        Use this Jinja source in place of the model's own.
    variables
        More variables for the template (``chat_template_kwargs``).
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered chat: the text the model sees and its token ids."""

    text: str
    token_ids: list[int]


class ChatEncoder:
    """Renders chats with a model's template and encodes them.

    Control tokens come from the template alone: what users write is text, whatever it spells
    (see :mod:`turnstile.text.control_text`).

    Parameters
    ----------
    tokenizer
        Whose ``chat_templates`` are used.
    template
        A Jinja source in their place (``--chat-template``).
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._templates = (
            {"default": template} if template is not None else dict(tokenizer.chat_templates)
        )

    def check(self) -> None:
        """Compile the templates now, so that a broken one is found at start-up."""
        for source in self._templates.values():
            compile_template(source)

    def tool_format(self, template: str | None = None) -> str | None:
        """Name of the format (:data:`turnstile.text.tool_formats.FORMATS`) in which the model is
        asked to call tools; None where the template asks for one that is none of these.

        ``template`` is the request's own, where it has one.
        """
        return format_of(template or self._source("tool_use") or self._source())

    def mentions(self, word: str, template: str | None = None) -> bool:
        """Whether a word stands in the model's template, or in the request's own."""
        return word in (template or self._source())

    def _source(self, name: str = "default") -> str:
        return self._templates.get(name, "")

    def render(self, chat: ChatInput) -> str:
        """Text of the chat, as the model sees it."""
        text, marks = self._render(chat)
        return unmark(text, marks) if marks else text

    def encode(
        self, chat: ChatInput, encode: Callable[[str], list[int]] | None = None
    ) -> ChatPrompt:
        """Text and token ids of the chat.

        ``encode`` is another way to what :meth:`Tokenizer.encode` makes of a whole text.
        Raises :class:`MessageError` for malformed messages and :class:`TemplateError` where the
        template refuses them (a role it does not know, turns that do not alternate).
        """
        text, marks = self._render(chat)
        tokenizer = self._tokenizer
        if marks is None:
            if encode is not None:
                return ChatPrompt(text, encode(text))
            return ChatPrompt(text, tokenizer.encode(text, add_special_tokens=False))
        return ChatPrompt(unmark(text, marks), encode_marked(tokenizer, text, marks))

    # -- rendering ----------------------------------------------------------------------------

    def _render(self, chat: ChatInput) -> tuple[str, Marks | None]:
        """Text, and the marks in it if there are any to be looked for."""
        template = self._template_for(chat)
        _check(chat, template)
        messages = normalize_messages(
            chat.messages,
            keep_null_content=bool(_ASKS_FOR_NULL.search(template.source)),
        )
        if not template.mentions("developer"):
            messages = [
                {**m, "role": "system"} if m["role"] == "developer" else m for m in messages
            ]
        if chat.tools and not template.mentions("tools"):
            if not template.mentions("tool_calls"):
                messages = with_calls_written(messages)
            messages = with_tools_told(messages, chat.tools)
        data = {
            "messages": messages,
            "tools": chat.tools,
            "documents": chat.documents,
            "variables": dict(chat.variables),
        }
        marks, marking = None, self._needs_marks(data)
        if marking or chat.continue_final_message:
            marks = choose_marks(data)
        if marking and marks is not None:
            try:
                data = self._mark(data, marks)
            except RecursionError:
                raise MessageError("the messages are nested too deeply") from None
        if chat.continue_final_message and marks is not None:
            text = self._continue(template, data, marks)
        else:
            text = self._fill(template, data, chat.add_generation_prompt)
        return text, marks if marking else None

    def _mark(self, data: dict[str, Any], marks: Marks) -> dict[str, Any]:
        pattern = self._tokenizer.control_pattern
        messages = [
            # Roles are checked words; templates compare them.
            {**mark({k: v for k, v in m.items() if k != "role"}, pattern, marks), "role": m["role"]}
            for m in data["messages"]
        ]
        return {**mark({k: v for k, v in data.items() if k != "messages"}, pattern, marks),
                "messages": messages}  # fmt: skip

    def _needs_marks(self, data: object) -> bool:
        tokenizer = self._tokenizer
        if tokenizer.must_segment:
            return True
        search = tokenizer.control_pattern.search
        return any(search(text) is not None for text in strings_in(data))

    def _template_for(self, chat: ChatInput) -> CompiledTemplate:
        if chat.template is not None:
            return compile_template(chat.template)
        name = "tool_use" if chat.tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise TemplateError(
                "the model has no chat template: use /v1/completions, "
                "or start the server with --chat-template FILE"
            )
        return compile_template(self._templates[name])

    def _fill(
        self, template: CompiledTemplate, data: dict[str, Any], add_generation_prompt: bool
    ) -> str:
        """Render; where the template cannot take tool arguments as objects, as JSON text."""
        variables = {
            **self._tokenizer.special_tokens,
            **data["variables"],
            "messages": data["messages"],
            "tools": data["tools"],
            "documents": data["documents"],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.render(variables)
        except TemplateTypeError:
            messages: list[Message] = data["messages"]
            if not has_tool_calls(messages):
                raise
            return template.render({**variables, "messages": with_string_arguments(messages)})

    def _continue(self, template: CompiledTemplate, data: dict[str, Any], marks: Marks) -> str:
        """Render up to the end of the last message's content.

        A tag after the content shows where it ends; a space after the tag, whether the template
        trims it (then the content's own trailing space goes as well).
        """
        *others, last = data["messages"]
        content = last["content"]
        if content is None:
            raise MessageError("the final message has no content to continue")
        tagged = {**last, "content": f"{content}{marks.tag} "}
        text = self._fill(template, {**data, "messages": [*others, tagged]}, False)
        place = text.rfind(marks.tag)
        if place < 0:
            raise MessageError("the chat template drops the final message: it cannot be continued")
        kept = text[:place].replace(marks.tag, "")
        return kept if text.startswith(" ", place + 1) else kept.rstrip()


def _check(chat: ChatInput, template: CompiledTemplate) -> None:
    if chat.add_generation_prompt and chat.continue_final_message:
        raise MessageError(
            "continue_final_message and add_generation_prompt exclude each other",
            "continue_final_message",
        )
    # Names with an underscore are those of the bounds on templates (text/template.py).
    reserved = sorted(v for v in chat.variables if v in _RESERVED or v.startswith("_"))
    if reserved:
        raise MessageError(
            f"chat_template_kwargs must not set {', '.join(reserved)}", "chat_template_kwargs"
        )
    if chat.documents and not template.mentions("documents"):
        raise MessageError("this model's chat template does not support documents", "documents")
