"""``POST /v1/responses``: a conversation in OpenAI's newer form, answered as a chat is.

A request becomes a :class:`ChatRequest` (:func:`as_chat`), and all that follows is the chat's; the
answer is written by :class:`ResponseFrames`. Nothing is stored: who goes on with a conversation
sends all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from turnstile.server.answer.frames import Frames, Outline
from turnstile.server.answer.intake import answer
from turnstile.server.answer.schemas import ChatRequest, Message, ResponsesRequest
from turnstile.server.answer.tools import ToolUse
from turnstile.server.api.response_frames import ResponseFrames
from turnstile.server.api.translate import Translated, TranslatedChats
from turnstile.server.errors import bad_request, unsupported
from turnstile.server.http.exchange import Exchange
from turnstile.server.http.json_body import decode
from turnstile.server.http.sse import encode
from turnstile.server.service import Service

MOST_METADATA, MOST_KEY, MOST_VALUE = 16, 64, 512
MOST_REPEATED = 1 << 18
"""Bytes of a field that the answer repeats, and that need not be part of the prompt."""
_SAME = (
    "model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
    "parallel_tool_calls", "priority", "timeout", "cache_salt", "user", "chat_template_kwargs",
)  # fmt: skip


class Responses(TranslatedChats):
    """A conversation, and what is said next."""

    id_prefix = "resp"
    names: ClassVar[dict[str, str]] = {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
    }

    def parse(self, body: bytes) -> ChatRequest:
        """Read the body, and make a chat of it."""
        return as_chat(decode(body, ResponsesRequest))

    def make_frames(
        self, request: ChatRequest, outline: Outline, use: ToolUse | None, *, thinks: bool
    ) -> Frames:
        """One that writes items, in events with names."""
        assert isinstance(request, Translated)
        return ResponseFrames(outline, use, thinks=thinks, repeated=request.repeated)


_RESPONSES = Responses()


async def responses(service: Service, exchange: Exchange) -> None:
    """Answer a conversation, in the form of OpenAI's Responses."""
    await answer(_RESPONSES, service, exchange)


def as_chat(request: ResponsesRequest) -> ChatRequest:
    """The chat that a request means. Raises :class:`ApiError` 400 for what cannot be one here."""
    _refuse_unsupported(request)
    same = {name: getattr(request, name) for name in _SAME}
    messages, places = _messages(request)
    return Translated(
        **same,
        repeated=_repeated(request),
        messages=messages,
        places=places,
        max_completion_tokens=request.max_output_tokens,
        response_format=_format(request.text),
        tools=None if request.tools is None else [_tool(t, i) for i, t in enumerate(request.tools)],
        tool_choice=_choice(request.tool_choice),
    )


def _repeated(request: ResponsesRequest) -> dict[str, Any]:
    """What a response repeats of its request. It is kept until the answer has ended, so it is
    bounded; the instructions are, by the context. Raises :class:`ApiError` 400.
    """
    pairs = request.metadata or {}
    if len(pairs) > MOST_METADATA or any(
        len(key) > MOST_KEY or len(value) > MOST_VALUE for key, value in pairs.items()
    ):
        raise bad_request(
            f"metadata may have {MOST_METADATA} pairs, of keys of {MOST_KEY} characters and values "
            f"of {MOST_VALUE}.",
            "metadata",
        )
    for name in ("tools", "text", "tool_choice"):
        if (size := len(encode(getattr(request, name)))) > MOST_REPEATED:
            raise bad_request(f"{name} is {size} bytes long; {MOST_REPEATED} may be.", name)
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": pairs,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "temperature": request.temperature,
        "text": request.text or {"format": {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_p": request.top_p,
    }


def _refuse_unsupported(request: ResponsesRequest) -> None:
    for name in ("previous_response_id", "conversation"):
        if getattr(request, name) is not None:
            raise unsupported(f"Nothing is stored here: send the whole input, not {name}.", name)
    if request.prompt is not None:
        raise unsupported("There are no stored prompts here.", "prompt")
    if request.background:
        raise unsupported("Nothing runs in the background here.", "background")
    if request.truncation not in (None, "disabled"):
        raise unsupported("The input is never cut; truncation must be disabled.", "truncation")
    if request.top_logprobs:
        raise unsupported("Ask /v1/chat/completions for log-probabilities.", "top_logprobs")


# -- the conversation ------------------------------------------------------------------------------


def _messages(request: ResponsesRequest) -> tuple[list[Message], list[str]]:
    """The messages, and where each comes from."""
    messages: list[Message] = []
    places: list[str] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
        places.append("instructions")
    items = request.input
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}], [*places, "input"]
    for place, item in enumerate(items):
        _add(messages, item, f"input.{place}")
        places += [f"input.{place}"] * (len(messages) - len(places))
    return messages, places


def _add(messages: list[Message], item: Mapping[str, Any], where: str) -> None:
    """Add what an item says to the messages: one of its own, or a call to the one before."""
    kind = item.get("type", "message")
    if kind == "message":
        messages.append({"role": item.get("role"), "content": item.get("content")})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if not (messages and messages[-1]["role"] == "assistant"):
            messages.append({"role": "assistant", "content": None})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        message = {"role": "tool", "content": item.get("output")}
        messages.append({**message, "tool_call_id": item.get("call_id")})
    elif kind != "reasoning":  # what was thought before is not told again, as elsewhere
        raise unsupported(f"Items of type {str(kind)[:40]!r} are not supported.", f"{where}.type")


def _format(text: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """``text.format`` as a chat's ``response_format``."""
    form = (text or {}).get("format")
    if form is None:
        return None
    if not isinstance(form, Mapping):
        raise bad_request("text.format must be an object with a type.", "text.format")
    if form.get("type") != "json_schema":
        return dict(form)
    return {"type": "json_schema", "json_schema": {k: form[k] for k in form if k != "type"}}


# -- tools -----------------------------------------------------------------------------------------


def _tool(tool: Mapping[str, Any], place: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise unsupported("Only tools of type function can be called.", f"tools.{place}.type")
    return {"type": "function", "function": {k: tool[k] for k in tool if k != "type"}}


def _choice(choice: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    if choice is None or isinstance(choice, str):
        return choice
    if choice.get("type") != "function":
        raise bad_request("tool_choice must be a word or name a function.", "tool_choice")
    return {"type": "function", "function": {"name": choice.get("name")}}
