"""What a request asks of the shape of its output, as one string: a grammar.

The string is what :class:`turnstile.text.grammar.GrammarCompiler` compiles, and what travels to
the engine in ``SamplingParams.grammar``. It is llguidance's own notation: JSON around a JSON
schema, or a Lark grammar. Making it costs nothing and checks only the request's shape; whether
the schema or grammar itself is any good is found by :func:`turnstile.text.grammar.check_grammar`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from turnstile.text.errors import GrammarError

MAX_GRAMMAR_CHARS = 128 << 10
MAX_CHOICES = 1000

# Unbounded space between JSON tokens is an invitation to small models to write nothing else.
_SPACE = r"[\x20\x0A\x0D\x09]{1,40}"
_JSON_OPTIONS = {"whitespace_pattern": _SPACE, "coerce_one_of": True}
_SURROGATE = re.compile("[\ud800-\udfff]")
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def json_object() -> str:
    """Grammar of any JSON object."""
    return json_schema({"type": "object"})


def json_schema(schema: object) -> str:
    """Grammar of the JSON values a schema allows (an object, a boolean, or either as text)."""
    check_size(schema)
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise GrammarError("the JSON schema is not valid JSON") from None
    if schema is False:
        raise GrammarError("the JSON schema is false, which no value satisfies")
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise GrammarError("the JSON schema must be an object")
    # The schema's author may set these too; what they say wins.
    options = schema.get("x-guidance")
    own = dict(options) if isinstance(options, Mapping) else {}
    whole = {**schema, "x-guidance": {**_JSON_OPTIONS, **own}}
    try:
        text = json.dumps({"grammars": [{"json_schema": whole}]}, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise GrammarError("the JSON schema is nested too deeply or is not JSON") from None
    return _bounded(text)


def regex(pattern: object) -> str:
    """Grammar of the texts a regular expression matches from end to end (Rust's syntax)."""
    if not isinstance(pattern, str):
        raise GrammarError("structured_outputs.regex must be a string")
    check_size(pattern)
    return _wrapped(f"start: {_lark_regex(pattern)}")


def choice(options: object) -> str:
    """Grammar of exactly one of some texts."""
    if not isinstance(options, Sequence) or isinstance(options, (str, bytes)) or not options:
        raise GrammarError("structured_outputs.choice must be a list of at least one string")
    if len(options) > MAX_CHOICES:
        raise GrammarError(
            f"structured_outputs.choice has {len(options)} options; at most {MAX_CHOICES} may be"
        )
    check_size(options)
    if not all(isinstance(option, str) and option for option in options):
        raise GrammarError("structured_outputs.choice must have strings that are not empty")
    literals = " | ".join(_lark_string(option) for option in options)
    return _wrapped(f"start: {literals}")


def lark(grammar: object) -> str:
    """Take a context-free grammar, in Lark's notation or as GBNF/EBNF with ``::=``."""
    if not isinstance(grammar, str):
        raise GrammarError("structured_outputs.grammar must be a string that is not empty")
    _bounded(grammar)
    if not grammar.strip():
        raise GrammarError("structured_outputs.grammar must be a string that is not empty")
    if "::=" in grammar:
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            grammar = any_to_lark(grammar)
        except Exception as error:  # the converter raises whatever its parser does
            raise GrammarError(f"the grammar cannot be read: {str(error)[:300]}") from None
    return _wrapped(grammar)


def grammar_of_response_format(value: object) -> str | None:
    """Read OpenAI's ``response_format``; None where it asks for nothing (``text``)."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(kind, str):
        raise GrammarError("response_format must be an object with a type")
    if kind == "text":
        return None
    if kind == "json_object":
        return json_object()
    if kind == "json_schema":
        inner = value.get("json_schema")
        if not isinstance(inner, Mapping) or inner.get("schema") is None:
            raise GrammarError("response_format.json_schema.schema is missing")
        return json_schema(inner["schema"])
    raise GrammarError(
        f"response_format type {kind[:40]!r} is unknown: use text, json_object or json_schema"
    )


def grammar_of_structured_outputs(value: object) -> str | None:
    """Read vLLM's ``structured_outputs``: one of json, regex, choice, grammar, json_object.

    Raises :class:`GrammarError` for none or several of them, and for a field that would have no
    effect. None and False stand for a field that is not there.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise GrammarError("structured_outputs must be an object")
    given: dict[str, Any] = {
        kind: value[kind] for kind in _KINDS if value.get(kind) not in (None, False)
    }
    others = [
        str(name) for name in value if name not in _KINDS and value[name] not in (None, False)
    ]
    if others:
        raise GrammarError(
            f"structured_outputs.{others[0][:40]} is not supported: give one of json, regex, "
            "choice, grammar, json_object"
        )
    if len(given) != 1:
        raise GrammarError(
            "structured_outputs must have exactly one of json, regex, choice, grammar, json_object"
        )
    ((kind, spec),) = given.items()
    if kind == "structural_tag":
        raise GrammarError("structured_outputs.structural_tag is not supported")
    if kind == "json_object":
        return json_object()
    return {"json": json_schema, "regex": regex, "choice": choice, "grammar": lark}[kind](spec)


def _lark_string(text: str) -> str:
    """Write a text as a Lark literal: JSON's escapes, and DEL has to be one as well."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _lark_regex(pattern: str) -> str:
    """Write a pattern as a Lark terminal: slashes and line breaks need escapes there."""
    escaped, after_backslash = [], False
    for character in pattern:
        if character == "/" and not after_backslash:
            escaped.append("\\/")
        elif character in "\n\r":
            # A backslash before a line break means the line break itself.
            if after_backslash:
                escaped.pop()
            escaped.append("\\n" if character == "\n" else "\\r")
        else:
            escaped.append(character)
        after_backslash = character == "\\" and not after_backslash
    return f"/{''.join(escaped)}/"


def check_size(value: object) -> None:
    """Raise :class:`GrammarError` for what is longer, written as JSON, than a grammar may be.

    Stops as soon as that is certain: a request can hold a hundred times as much.
    """
    size = 0
    pending: list[Collection[object]] = [[value]]
    while pending:
        items = pending.pop()
        size += len(items)  # each is a character at least
        if size <= MAX_GRAMMAR_CHARS:
            values: Iterable[object] = items
            if isinstance(items, Mapping):
                values = (*items.keys(), *items.values())
            for item in values:
                if isinstance(item, str):
                    size += len(item)
                elif isinstance(item, (Mapping, list, tuple)):
                    pending.append(item)
        if size > MAX_GRAMMAR_CHARS:
            raise _too_long()


def _too_long() -> GrammarError:
    return GrammarError(f"the schema or grammar is longer than {MAX_GRAMMAR_CHARS} characters")


def _bounded(grammar: str) -> str:
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise _too_long()
    if _SURROGATE.search(grammar):
        raise GrammarError("the schema or grammar holds half of a surrogate pair")
    return grammar


def _wrapped(lark_grammar: str) -> str:
    entry = {"grammars": [{"lark_grammar": lark_grammar}]}
    return _bounded(json.dumps(entry, ensure_ascii=False))
