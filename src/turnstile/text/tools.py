"""The tools of a chat request: what they are, which must be called, and how a model is told.

How models write calls is in :mod:`turnstile.text.tool_formats`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnstile.text.errors import GrammarError, MessageError
from turnstile.text.grammar_request import check_size, json_schema
from turnstile.text.messages import Message
from turnstile.text.tool_formats import Hermes

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_ARGUMENTS_KEY = "parameters"
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may ask to have called. ``parameters`` is a JSON schema."""

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request and what is to be done with them.

    Attributes
    ----------
    tools
        All that may be called.
    must
        At least one is to be called.
    only
        The name of the one that is to be called, where it is named.
    several
        More than one call may be in an answer.
    """

    tools: Sequence[Tool]
    must: bool = False
    only: str | None = None
    several: bool = True

    @property
    def names(self) -> list[str]:
        """What may be called."""
        return [tool.name for tool in self.tools] if self.only is None else [self.only]

    def grammar(self) -> str | None:
        """What the whole answer has to match where a call is demanded: the arguments of the one
        that is named, or a list of calls. Raises :class:`GrammarError`.
        """
        if self.only is not None:
            (schema,) = (tool.parameters for tool in self.tools if tool.name == self.only)
            return json_schema({"type": "object", **schema})
        if not self.must:
            return None
        check_size([tool.parameters for tool in self.tools])
        try:
            calls = [_call_schema(tool, f"#/items/anyOf/{i}") for i, tool in enumerate(self.tools)]
        except RecursionError:
            raise GrammarError("the tools' parameters are nested too deeply") from None
        schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
        return json_schema(schema if self.several else {**schema, "maxItems": 1})


def read_tools(tools: object, choice: object, *, several: bool = True) -> Tools | None:
    """Check ``tools`` and ``tool_choice`` as OpenAI has them; None where nothing may be called.

    Raises :class:`MessageError`, which names the field.
    """
    if tools is None or tools == []:
        if choice in (None, "none", "auto"):
            return None
        raise MessageError("tool_choice asks for a tool, and there are no tools", "tool_choice")
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise MessageError("tools must be a list of objects", "tools")
    if len(tools) > MAX_TOOLS:
        raise MessageError(f"there are {len(tools)} tools; at most {MAX_TOOLS} may be", "tools")
    read = [_tool(tool, f"tools[{place}]") for place, tool in enumerate(tools)]
    seen: set[str] = set()
    for place, tool in enumerate(read):
        if tool.name in seen:
            where = f"tools[{place}].function.name"
            raise MessageError(f"{where}: there is a tool {tool.name} already", where)
        seen.add(tool.name)
    if choice == "none":
        return None
    if choice is None or choice == "auto":
        return Tools(read, several=several)
    if choice == "required":
        return Tools(read, must=True, several=several)
    return Tools(read, must=True, only=_chosen(choice, seen), several=False)


def _tool(tool: object, where: str) -> Tool:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise MessageError(f"{where} must be an object of type function", where)
    function, where = tool.get("function"), f"{where}.function"
    if not isinstance(function, Mapping):
        raise MessageError(f"{where} must be an object with a name", where)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise MessageError(
            f"{where}.name must be 1 to 64 letters, digits, or any of _ - . :", f"{where}.name"
        )
    if not isinstance(function.get("description", ""), str | None):
        raise MessageError(f"{where}.description must be a string", f"{where}.description")
    if not isinstance(parameters, Mapping | None):
        raise MessageError(f"{where}.parameters must be a JSON schema", f"{where}.parameters")
    if parameters is not None and parameters.get("type", "object") != "object":
        where = f"{where}.parameters.type"
        raise MessageError(f"{where} must be object", where)
    return Tool(name, parameters or _NOTHING)


def _chosen(choice: object, names: set[str]) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    if (
        not isinstance(choice, Mapping)
        or choice.get("type") != "function"
        or not isinstance(function, Mapping)
        or not isinstance(name := function.get("name"), str)
    ):
        raise MessageError(
            "tool_choice must be none, auto, required, or an object that names a function",
            "tool_choice",
        )
    if name not in names:
        raise MessageError(
            f"tool_choice names {name[:64]!r}, which is none of the tools", "tool_choice"
        )
    return name


def _call_schema(tool: Tool, place: str) -> dict[str, Any]:
    """Schema of a call, which stands at ``place`` in a larger one."""
    moved = _with_references(tool.parameters, f"{place}/properties/{_ARGUMENTS_KEY}")
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, _ARGUMENTS_KEY: {"type": "object", **moved}},
        "required": ["name", _ARGUMENTS_KEY],
        "additionalProperties": False,
    }


def _with_references(schema: Any, place: str) -> Any:
    """A schema whose references to itself are right where it stands at ``place`` in another."""
    if isinstance(schema, Mapping):
        return {
            key: place + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _with_references(value, place)
            for key, value in schema.items()
        }
    if isinstance(schema, list):
        return [_with_references(item, place) for item in schema]
    return schema


# -- telling a model whose template knows no tools ----------------------------------------------

_TOLD = """You may call functions to help with the user's request. The functions, one JSON object \
a line:
<tools>
{tools}
</tools>
To call one, write a JSON object with its name and arguments between tags, and nothing else:
{opening}
{{"name": <name>, "arguments": <arguments as an object>}}
{closing}"""


def with_tools_told(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> list[Message]:
    """Messages whose system message says which tools there are and how to call them."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    told = _TOLD.format(tools=lines, opening=Hermes.opening, closing=Hermes.closing)
    first, *others = messages
    if first["role"] != "system":
        return [{"role": "system", "content": told}, *messages]
    return [{**first, "content": f"{first['content']}\n\n{told}"}, *others]


def with_calls_written(messages: Sequence[Message]) -> list[Message]:
    """Messages that say as text which tools were called and what they answered."""
    result: list[Message] = []
    before = ""
    for message in messages:
        role = message["role"]
        if role == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if before == "tool":  # one turn, whatever the number of answers
                result[-1]["content"] += "\n" + text
            else:
                result.append({"role": "user", "content": text})
        elif message.get("tool_calls"):
            calls = [_written_call(call) for call in message["tool_calls"]]
            content = "\n".join([message["content"] or "", *calls]).lstrip("\n")
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            result.append({**kept, "content": content})
        else:
            result.append(message)
        before = role
    return result


def _written_call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    body = {"name": function["name"], "arguments": function["arguments"]}
    return f"{Hermes.opening}\n{json.dumps(body, ensure_ascii=False)}\n{Hermes.closing}"
