"""Calls are found in what a model writes, whatever pieces it comes in."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstile.text.tool_calls import Arguments, Begin, CallReader, Content, Piece
from turnstile.text.tool_formats import FORMATS, ListOfCalls, OnlyArguments, format_of

NAMES = ("f", "g")
Read = tuple[str, list[tuple[str, str]]]


def read(reader: CallReader, *texts: str) -> Read:
    """Content and calls of an answer that comes in these pieces."""
    return gathered([*(piece for text in texts for piece in reader.push(text)), *reader.finish()])


def gathered(pieces: list[Piece]) -> Read:
    content, calls = "", list[tuple[str, str]]()
    for piece in pieces:
        if isinstance(piece, Content):
            content += piece.text
        elif isinstance(piece, Begin):
            assert piece.index == len(calls)
            calls.append((piece.name, ""))
        else:
            assert isinstance(piece, Arguments)
            assert piece.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return content, calls


X = [("f", '{"x": 1}')]
UNKNOWN = '<tool_call>{"name": "h", "arguments": {}}</tool_call> x'
BROKEN = '<tool_call>{"name": xyz, "arguments": {}}'
ANSWERS: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    # What each family writes when all is well.
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', "", X),
    (
        "hermes",
        'Sure.\n<tool_call>{"name": "f", "arguments": {"a": [1, "}\\""]}}</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        "Sure.",
        [("f", '{"a": [1, "}\\""]}'), ("g", "{}")],
    ),
    ("llama3_json", ' {"name": "f", "parameters": {"x": 1}}', "", X),
    (
        "llama3_json",
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"y": 2}}',
        "",
        [("f", "{}"), ("g", '{"y": 2}')],
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]',
        "",
        [("f", '{"x": 1}'), ("g", "{}")],
    ),
    (
        "mistral",
        'Well. [TOOL_CALLS]f{"x": 1}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{"y": []}',
        "Well.",
        [("f", '{"x": 1}'), ("g", '{"y": []}')],
    ),
    # Arguments before the name, as a string, or none at all.
    ("hermes", '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", X),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", X),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"id": [1, {}], "name": "f", "n": 2.5}</tool_call>', "", [("f", "{}")]),
    # What is no call is content, to the last character.
    ("hermes", "a < b <tool_cal> c\n\n d ", "a < b <tool_cal> c\n\n d ", []),
    ("hermes", UNKNOWN, UNKNOWN, []),
    ("hermes", "<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
    ("hermes", BROKEN, BROKEN, []),
    ("hermes", '<tool_call>{"nam', '<tool_call>{"nam', []),
    ("hermes", "<tool_call>", "<tool_call>", []),
    ("llama3_json", '{"x": 1}', '{"x": 1}', []),
    ("llama3_json", "  <b>bold", "  <b>bold", []),
    ("llama3_json", "f {", "f {", []),
    ("llama3_json", "", "", []),
    ("mistral", '[TOOL_CALLS]h{"x": 1}', '[TOOL_CALLS]h{"x": 1}', []),
    ("mistral", "a [1] [TOOLS", "a [1] [TOOLS", []),
    # Cut off, or with something broken behind: what was announced stays announced.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1', "", [("f", '{"x": 1')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}}}\n</tool_call> So.', " So.", X),
    ("hermes", '<tool_call><tool_call>{"name": "f"}', "<tool_call>", [("f", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "f"}<tool_call>{"name": "g"}</tool_call>',
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    ("llama3_json", '{"name": "f", "parameters": {}} Done.', "Done.", [("f", "{}")]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls"), ANSWERS)
def test_calls_are_told_from_content(
    name: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert read(FORMATS[name].reader(NAMES), text) == (content, calls)


@pytest.mark.parametrize(("name", "text", "content", "calls"), ANSWERS)
def test_calls_are_found_whatever_pieces_the_text_comes_in(
    name: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert read(FORMATS[name].reader(NAMES), *text) == (content, calls)
    for size in (2, 3, 7):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert read(FORMATS[name].reader(NAMES), *pieces) == (content, calls)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.lists(
        st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(), json_values)), max_size=3
    ),
    st.booleans(),
    st.sampled_from([None, 1]),
)
def test_whatever_arguments_hold_comes_out_again(
    calls: list[tuple[str, dict[str, Any]]], plain: bool, indent: int | None
) -> None:
    def written(name: str, key: str, arguments: dict[str, Any]) -> str:
        return json.dumps({"name": name, key: arguments}, ensure_ascii=plain, indent=indent)

    hermes = "".join(f"<tool_call>{written(n, 'arguments', a)}</tool_call>" for n, a in calls)
    llama = ";".join(written(n, "parameters", a) for n, a in calls)
    listed = "[" + ",".join(written(n, "parameters", a) for n, a in calls) + "]"
    for reader, text in (
        (FORMATS["hermes"].reader(NAMES), hermes),
        (FORMATS["llama3_json"].reader(NAMES), llama),
        (FORMATS["mistral"].reader(NAMES), f"[TOOL_CALLS]{listed}"),
        (ListOfCalls(NAMES), listed),
    ):
        content, found = read(reader, *text)
        assert content == ""
        assert [(name, json.loads(text)) for name, text in found] == calls


@given(st.sampled_from(sorted(FORMATS)), st.text(alphabet='<tool_c>{}[]",: fgnameARGS\\|TOLC;'))
def test_no_text_breaks_a_reader(name: str, text: str) -> None:
    whole = read(FORMATS[name].reader(NAMES), text)
    assert read(FORMATS[name].reader(NAMES), *text) == whole
    if not whole[1]:
        assert whole[0] == text


def test_arguments_are_passed_on_before_they_are_whole() -> None:
    reader = FORMATS["hermes"].reader(NAMES)
    assert reader.push('<tool_call>\n{"name": "f"') == [Begin(0, "f")]
    assert reader.push(', "arguments": {"x": ') == [Arguments(0, '{"x": ')]
    assert reader.push("1}") == [Arguments(0, "1}")]
    assert reader.num_calls == 1


def test_content_is_passed_on_unless_it_may_begin_a_call() -> None:
    reader = FORMATS["hermes"].reader(NAMES)
    assert reader.push("Hello") == [Content("Hello")]
    assert reader.push(" <tool") == []
    assert reader.push("box>") == [Content(" <toolbox>")]


def test_a_named_function_gets_the_whole_text_as_arguments() -> None:
    assert read(OnlyArguments(["f"]), '{"x"', ": 1}") == ("", [("f", '{"x": 1}')])


def test_much_space_takes_no_more_than_its_length() -> None:
    reader = FORMATS["hermes"].reader(NAMES)
    assert reader.push(" " * 1_000_000) == []
    assert reader.push("x") == [Content(" " * 1_000_000 + "x")]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ messages }}", "hermes"),
        ('{% if tools %}<tool_call>\n{"name": {% endif %}', "hermes"),
        ("{% if tools %}{{ '<tool_call>\\n{\\\"name' }}{% endif %}", "hermes"),
        ("{% if tools %}<tool_call>name<arg_key>{% endif %}", None),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", "mistral"),
        ("{% if tools %}<|python_tag|>{% endif %}", "llama3_json"),
        ("{% if tools %}<tool_call><function=f>{% endif %}", None),
        ("{% if tools %}<tools>{% endif %}", None),
    ],
)
def test_the_template_says_how_its_model_writes_calls(template: str, name: str | None) -> None:
    assert format_of(template) == name


def test_ids_are_what_templates_take_back() -> None:
    assert len(FORMATS["mistral"].make_id()) == 9
    assert FORMATS["mistral"].make_id().isalnum()
    assert FORMATS["hermes"].make_id().startswith("call_")
    assert FORMATS["hermes"].make_id() != FORMATS["hermes"].make_id()
