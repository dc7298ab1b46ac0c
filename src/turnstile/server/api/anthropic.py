"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: a chat in Anthropic's form.

A request becomes a :class:`ChatRequest` (:func:`as_chat`), and all that follows is the chat's; the
answer is written by :class:`turnstile.server.api.anthropic_frames.MessageFrames`, refusals as
Anthropic's clients read them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from turnstile.server.answer.frames import Frames, Outline
from turnstile.server.answer.intake import answer
from turnstile.server.answer.parameters import deadline_of
from turnstile.server.answer.schemas import ChatRequest, CountRequest, Message, MessagesRequest
from turnstile.server.answer.tools import ToolUse
from turnstile.server.api.anthropic_frames import MessageFrames, error_body
from turnstile.server.api.chat import render_chat
from turnstile.server.api.translate import Translated, TranslatedChats
from turnstile.server.errors import bad_request, from_exception, unsupported
from turnstile.server.http.exchange import Exchange
from turnstile.server.http.json_body import decode
from turnstile.server.service import Service
from turnstile.server.threads import ends_by

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKS = ("enabled", "adaptive")


class Messages(TranslatedChats):
    """A conversation, and what is said next."""

    id_prefix = "msg"
    names: ClassVar[dict[str, str]] = {
        "max_completion_tokens": "max_tokens",
        "stop": "stop_sequences",
        "parameters": "input_schema",
    }

    def parse(self, body: bytes) -> ChatRequest:
        """Read the body, and make a chat of it."""
        return as_chat(decode(body, MessagesRequest))

    def make_frames(
        self, request: ChatRequest, outline: Outline, use: ToolUse | None, *, thinks: bool
    ) -> Frames:
        """One that writes blocks."""
        return MessageFrames(outline, use, thinks=thinks)


_MESSAGES = Messages()


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Have errors told as Anthropic's clients read them."""
    try:
        yield
    except Exception as error:
        known = from_exception(error)
        if known is None:
            raise
        known.form = error_body
        raise known from None


async def messages(service: Service, exchange: Exchange) -> None:
    """Answer a conversation, in the form of Anthropic's Messages."""
    with _refusing():
        await answer(_MESSAGES, service, exchange)


async def count_tokens(service: Service, exchange: Exchange) -> None:
    """Count the tokens of a conversation, without running it."""
    with _refusing():
        model, _ = service.require_model()
        body = await exchange.json_body(service.bodies)
        request = as_chat(decode(body, CountRequest))
        model.check_name(request.model)
        with _MESSAGES.naming(request):
            _MESSAGES.tool_use(request, model, service.config)
            async with ends_by(deadline_of(None, exchange, service.config)):
                reader = service.reader(model, exchange.tenant)
                rendered = await render_chat(request, reader, len(body), trust=False)
        await exchange.respond_json({"input_tokens": len(rendered.token_ids)})


def as_chat(request: MessagesRequest | CountRequest) -> ChatRequest:
    """The chat that a request means. Raises :class:`ApiError` 400 for what cannot be one here."""
    choice = request.tool_choice or {}
    chat = Translated(
        model=request.model,
        tools=None if request.tools is None else [_tool(t, i) for i, t in enumerate(request.tools)],
        tool_choice=_choice(choice),
        parallel_tool_calls=not choice.get("disable_parallel_tool_use"),
        include_reasoning=(request.thinking or {}).get("type") in _THINKS,
        messages=[],
        places=[],
    )
    if request.system is not None:
        _add(chat, {"role": "system", "content": _text(request.system, "system")}, "system")
    for place, message in enumerate(request.messages):
        _add_message(chat, message, f"messages.{place}")
    if isinstance(request, MessagesRequest):
        for name in ("stream", "temperature", "top_p", "top_k", "seed", "priority", "timeout"):
            setattr(chat, name, getattr(request, name))
        chat.stop = request.stop_sequences
        chat.max_completion_tokens = request.max_tokens
        chat.user = (request.metadata or {}).get("user_id")
    return chat


# -- the conversation ------------------------------------------------------------------------------


def _add(chat: Translated, message: Message, where: str) -> None:
    chat.messages.append(message)
    chat.places.append(where)


def _add_message(chat: Translated, message: Mapping[str, Any], where: str) -> None:
    """Add a message; the results of tools are messages of their own, before what the user says."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise bad_request(f"{where}.role must be user or assistant.", f"{where}.role")
    if not isinstance(content, list):
        _add(chat, {"role": role, "content": content}, where)
        return
    texts: list[Any] = []
    calls: list[Any] = []
    results: list[Message] = []
    for place, block in enumerate(content):
        at = f"{where}.content.{place}"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            texts.append(block)
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            text = _text(block.get("content") or "", f"{at}.content")
            results.append(
                {"role": "tool", "content": text, "tool_call_id": block.get("tool_use_id")}
            )
        elif kind not in ("thinking", "redacted_thinking"):  # those are not told again
            shown = str(kind)[:40]
            raise unsupported(f"Blocks of type {shown!r} are not supported.", f"{at}.type")
    for result in results:
        _add(chat, result, where)
    if texts or calls or not results:
        said: Message = {"role": role, "content": texts or ("" if role == "user" else None)}
        _add(chat, said | ({"tool_calls": calls} if calls else {}), where)


def _text(value: Any, where: str) -> str:
    """Text, or blocks of text, as text."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(
        isinstance(b, Mapping) and b.get("type") == "text" and isinstance(b.get("text"), str)
        for b in value
    ):
        return "\n".join(block["text"] for block in value)
    raise bad_request(f"{where} must be text, or a list of text blocks.", where)


# -- tools -----------------------------------------------------------------------------------------


def _tool(tool: Mapping[str, Any], place: int) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise unsupported("Only tools of the client's own can be called.", f"tools.{place}.type")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _choice(choice: Mapping[str, Any]) -> str | dict[str, Any] | None:
    kind = choice.get("type")
    if not choice or kind in _CHOICES:
        return _CHOICES.get(str(kind))
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    raise bad_request("tool_choice.type must be auto, any, tool or none.", "tool_choice.type")
