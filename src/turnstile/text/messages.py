"""Chat messages as clients send them, made into what chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from turnstile.text.errors import MessageError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
MAX_ARGUMENTS_CHARS = 128 << 10
"""Longest arguments of a tool call: they are parsed, and in one go."""
_REASONING = ("reasoning_content", "reasoning", "thinking")

Message = dict[str, Any]


def normalize_messages(messages: object, *, keep_null_content: bool = False) -> list[Message]:
    """Check messages and bring them into one form.

    Content parts become one string (joined by newlines); the arguments of tool calls become
    objects where they are JSON objects, and stay strings where they are not; reasoning is found
    under each of its names. ``keep_null_content`` leaves an assistant's null content null, for
    templates that ask; others get ``""``.

    Raises :class:`MessageError`, which names the message and the field.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise MessageError("messages must be a list of objects")
    if not messages:
        raise MessageError("messages must not be empty")
    return [
        _normalize(message, f"messages[{place}]", keep_null_content)
        for place, message in enumerate(messages)
    ]


def _normalize(message: object, where: str, keep_null_content: bool) -> Message:
    if not isinstance(message, Mapping):
        raise MessageError(f"{where} must be an object", where)
    role = message.get("role")
    if role not in ROLES:
        said = "is missing" if role is None else f"{str(role)[:40]!r} is unknown"
        raise MessageError(f"{where}.role {said}: use one of {', '.join(ROLES)}", f"{where}.role")
    result = {str(key): value for key, value in message.items() if value is not None}
    content = _content(message.get("content"), role, f"{where}.content")
    if content is not None or keep_null_content:
        result["content"] = content
    else:
        result["content"] = ""
    if "tool_calls" in result:
        result["tool_calls"] = _tool_calls(result["tool_calls"], f"{where}.tool_calls")
    reasoning = next((result[name] for name in _REASONING if name in result), None)
    if reasoning is not None:
        result.setdefault("thinking", reasoning)
        result["reasoning_content"] = reasoning
    return result


def _content(content: object, role: str, where: str) -> str | None:
    if isinstance(content, str):
        return content
    if content is None:
        if role in ("assistant", "tool", "function"):
            return None
        raise MessageError(f"{where} is missing: give a string or a list of text parts", where)
    if isinstance(content, Sequence):
        return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))
    raise MessageError(f"{where} must be a string or a list of text parts", where)


def _part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise MessageError(f"{where} must be an object with a type", where)
    kind = part.get("type", "text")
    if kind not in _TEXT_PARTS:
        raise MessageError(
            f"{where} is of type {str(kind)[:40]!r}: this server reads text only", where
        )
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise MessageError(f"{where}.text must be a string", where)
    return text


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise MessageError(f"{where} must be a list", where)
    return [_tool_call(call, f"{where}[{place}]") for place, call in enumerate(calls)]


def _tool_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise MessageError(f"{where}.function must be an object", where)
    if not isinstance(function.get("name"), str):
        raise MessageError(f"{where}.function.name must be a string", where)
    arguments = function.get("arguments")
    if isinstance(arguments, str) and len(arguments) > MAX_ARGUMENTS_CHARS:
        name = f"{where}.function.arguments"
        raise MessageError(
            f"{name} has {len(arguments)} characters; at most {MAX_ARGUMENTS_CHARS} may be", name
        )
    arguments = parse_arguments(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def parse_arguments(arguments: object) -> object:
    """Read the arguments of a tool call: an object if they are one, else the string as it is.

    Models write broken JSON now and then, and clients replay it faithfully (fault B67).
    """
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def has_tool_calls(messages: Sequence[Message]) -> bool:
    """Whether any message has tool calls."""
    return any(message.get("tool_calls") for message in messages)


def with_string_arguments(messages: Sequence[Message]) -> list[Message]:
    """Write the arguments of tool calls as JSON text again, for templates that splice them in."""
    result = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls:
            message = {**message, "tool_calls": [_string_call(call) for call in calls]}
        result.append(message)
    return result


def _string_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}
