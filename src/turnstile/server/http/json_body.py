"""From bytes to a typed request, or a 400 that names the field."""

from __future__ import annotations

import functools
import logging
import re
import typing
from typing import Any, TypeVar

import msgspec

from turnstile.server.errors import ApiError, bad_request

logger = logging.getLogger("turnstile.server")

T = TypeVar("T", bound=msgspec.Struct)

_AT = re.compile(r" - at `(key )?(?:in )?\$?([^`]*)`$")
_EXPECTED = re.compile(r"Expected `([^`]*)`, got `([^`]*)`")
_MISSING = re.compile(r"Object missing required field `([^`]*)`")
_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_UNKNOWN_SHOWN = 20
MAX_CONTAINERS = 1 << 17
MAX_KEYS = 1 << 18
MAX_VALUES = 1 << 20
"""Most arrays and objects, keys, and values in a body. Building millions holds up everybody: it
cannot be done in a thread, because the decoder keeps the interpreter's lock."""
_OUT_OF_RANGE = ("Number out of range", "Integer value out of range")
_MOST_EXACT = 2.0**53
"""Up to here each integer is a float of its own."""
_HALF_A_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
# A string need not end: looking for the end again from each quote would be quadratic.
_STRING_OR_SIGN = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{:,]', re.DOTALL)


def decode(body: bytes, kind: type[T]) -> T:
    """Parse ``body`` as a ``kind``.

    Unknown fields are ignored, with a debug line that names them. Raises :class:`ApiError` 400:
    ``invalid_json`` for what is no JSON, else with ``param`` set to the field at fault. A body of
    too many values is refused before it is parsed.
    """
    _check_counts(body)
    try:
        request: T = _decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        request = _with_whole_numbers(body, kind, error)
    except msgspec.DecodeError as error:
        why = _what_is_wrong(body, str(error)[:100])
        raise bad_request(f"The body is not valid JSON ({why}).", code="invalid_json") from None
    except RecursionError:
        raise bad_request("The body is nested too deeply.", code="invalid_json") from None
    if logger.isEnabledFor(logging.DEBUG):
        _log_unknown(body, kind)
    return request


def _with_whole_numbers(body: bytes, kind: type[T], error: msgspec.ValidationError) -> T:
    """Parse again with ``4.0`` for 4 where an integer belongs: not all languages tell them apart,
    and other servers take it. Raises :class:`ApiError` where that was not what is wrong.
    """
    said = str(error)
    if "int" not in said or "got `float`" not in said:
        raise _field_error(said) from None
    given: dict[str, Any] = msgspec.json.decode(body)
    for name in _fields_of_integers(kind) & given.keys():
        given[name] = _whole(given[name])
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as another:
        raise _field_error(str(another)) from None


@functools.cache
def _fields_of_integers(kind: type[Any]) -> frozenset[str]:
    hints = typing.get_type_hints(kind)
    return frozenset(name for name, hint in hints.items() if _mentions_integers(hint))


def _mentions_integers(hint: Any) -> bool:
    return hint is int or any(map(_mentions_integers, typing.get_args(hint)))


def _whole(value: Any) -> Any:
    """The value with integers for the numbers in it that have no fraction and are exact."""
    if isinstance(value, list):
        return [_whole(item) for item in value]
    exact = isinstance(value, float) and value.is_integer() and abs(value) <= _MOST_EXACT
    return int(value) if exact else value


def _what_is_wrong(body: bytes, said: str) -> str:
    """What to say of a body that is no JSON: the parser's words, unless they mislead."""
    if not body.strip():
        return "it is empty"
    # The parser calls a body that ends with the first half of a surrogate pair truncated.
    if "truncated" in said and _HALF_A_PAIR.search(body[-64:]):
        return "near its end is half of a surrogate pair, as of a text cut within a character"
    return said


def _check_counts(body: bytes) -> None:
    """Raise :class:`ApiError` 400 for too many values.

    Counting all brackets, colons and commas is fast, but counts those inside of strings too. Only
    a body that has too many by that count is scanned for the strings.
    """
    few = body.count(b"[") + body.count(b"{") <= MAX_CONTAINERS
    if few and body.count(b":") <= MAX_KEYS and body.count(b",") <= MAX_VALUES:
        return
    containers = 0
    for seen, match in enumerate(_STRING_OR_SIGN.finditer(body), start=1):
        containers += body[match.start()] in b"[{"
        # Brackets and strings together are bounded as well, so that this loop ends soon.
        if containers > MAX_CONTAINERS or seen > 4 * MAX_CONTAINERS:
            raise bad_request(
                f"The body holds more than {MAX_CONTAINERS} arrays and objects, {MAX_KEYS} keys "
                f"or {MAX_VALUES} values; split the request."
            )


@functools.cache
def _decoder(kind: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _field_error(text: str) -> ApiError:
    at = _AT.search(text)
    path = re.sub(r"\[(\w+)\]", r".\1", at.group(2)).replace("[...]", ".*") if at else ""
    param = path.lstrip(".").removesuffix(".*") or None
    reason = text[: at.start()] if at else text
    missing = _MISSING.search(reason)
    if missing:
        param = f"{param}.{missing.group(1)}" if param else missing.group(1)
        return bad_request(f"{param} is required.", param)
    expected = _EXPECTED.search(reason)
    name = param or "The body"
    if reason in _OUT_OF_RANGE:
        return bad_request(f"{name} is a number of more than 64 bits.", param)
    if expected:
        wanted = [_WORDS.get(word, word) for word in expected.group(1).split(" | ")]
        got = _WORDS.get(expected.group(2), expected.group(2))
        if got == "a number":  # and so are integers
            got = "a number with a fraction or above 2^53"
        return bad_request(f"{name} must be {' or '.join(wanted)}, not {got}.", param)
    return bad_request(f"{name}: {reason[:200]}.", param)


def _log_unknown(body: bytes, kind: type[msgspec.Struct]) -> None:
    """Name the top-level fields nobody reads: a typo in one is otherwise hard to find."""
    given: dict[str, Any] = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    unknown = sorted(given.keys() - set(kind.__struct_encode_fields__))
    if unknown:
        shown = ", ".join(repr(name[:64]) for name in unknown[:_UNKNOWN_SHOWN])
        more = len(unknown) - _UNKNOWN_SHOWN
        logger.debug("Ignored unknown fields: %s%s", shown, f" and {more} more" if more > 0 else "")
