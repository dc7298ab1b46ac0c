"""What a request says of tools is checked, and demanded calls become a grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest

from turnstile.text.errors import GrammarError, MessageError
from turnstile.text.grammar import check_grammar
from turnstile.text.tools import MAX_TOOLS, read_tools


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


LINKED = {
    "type": "object",
    "$defs": {"P": {"type": "object", "properties": {"next": {"$ref": "#/$defs/P"}}}},
    "properties": {"p": {"$ref": "#/$defs/P"}},
    "required": ["p"],
}


@pytest.mark.parametrize(
    ("tools", "choice", "param", "says"),
    [
        ("x", None, "tools", "list"),
        ([5], None, "tools[0]", "type function"),
        ([{"type": "web_search"}], None, "tools[0]", "type function"),
        ([{"type": "function"}], None, "tools[0].function", "name"),
        ([tool("a b")], None, "tools[0].function.name", "letters"),
        ([tool("a" * 65)], None, "tools[0].function.name", "64"),
        ([tool("f"), tool("f")], None, "tools[1].function.name", "already"),
        ([tool("f", [])], None, "tools[0].function.parameters", "schema"),
        ([tool("f", {"type": "array"})], None, "tools[0].function.parameters.type", "object"),
        ([tool("f", description=5)], None, "tools[0].function.description", "string"),
        ([tool(f"f{i}") for i in range(MAX_TOOLS + 1)], None, "tools", str(MAX_TOOLS)),
        (None, "required", "tool_choice", "no tools"),
        ([], named("f"), "tool_choice", "no tools"),
        ([tool("f")], "any", "tool_choice", "required"),
        ([tool("f")], {"type": "function"}, "tool_choice", "names a function"),
        ([tool("f")], named("g"), "tool_choice", "none of the tools"),
        ([5], "none", "tools[0]", "type function"),
    ],
)
def test_what_is_wrong_with_tools_is_named(tools: Any, choice: Any, param: str, says: str) -> None:
    with pytest.raises(MessageError, match=says) as caught:
        read_tools(tools, choice)
    assert caught.value.param == param


def test_a_choice_says_what_must_be_called() -> None:
    tools = [tool("f", LINKED), tool("g")]
    for choice, must, only in (
        (None, False, None),
        ("auto", False, None),
        ("required", True, None),
        (named("g"), True, "g"),
    ):
        read = read_tools(tools, choice)
        assert read is not None
        assert (read.must, read.only) == (must, only)
        assert (read.grammar() is None) == (not must)
    assert read_tools(tools, "none") is None
    assert read_tools([], "auto") is read_tools(None, None) is None


@pytest.mark.parametrize("choice", ["required", named("f"), named("g")])
def test_a_demanded_call_is_a_grammar_that_compiles(choice: Any) -> None:
    read = read_tools([tool("f", LINKED), tool("g")], choice)
    assert read is not None
    check_grammar(read.grammar() or "")


def test_references_are_right_where_a_schema_stands_in_a_list_of_calls() -> None:
    read = read_tools([tool("g"), tool("f", LINKED)], "required", several=False)
    assert read is not None
    schema = json.loads(read.grammar() or "")["grammars"][0]["json_schema"]
    assert schema["maxItems"] == 1
    reference = schema["items"]["anyOf"][1]["properties"]["parameters"]["properties"]["p"]["$ref"]
    found: Any = schema
    for key in reference.removeprefix("#/").split("/"):
        found = found[int(key) if isinstance(found, list) else key]
    assert found["properties"]["next"]["$ref"] == reference


def test_what_no_grammar_can_be_made_of_is_refused() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"not": deep}
    for parameters in (deep, {"description": "x" * 200_000}):
        read = read_tools([tool("f", parameters)], "required")
        assert read is not None
        with pytest.raises(GrammarError):
            read.grammar()
