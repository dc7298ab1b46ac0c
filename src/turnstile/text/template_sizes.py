"""How large a value would be that a chat template asks for: told before it is made.

Sizes are about characters; an item of a list counts as ``_ITEM`` of them, a bit of an integer as
``_BIT``. What cannot be large, or is not known here, is 0: whatever is wrong with the arguments is
for the operation itself to say. Nothing here makes anything, and no answer takes longer than the
walk through ``MOST`` characters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

MOST = 64 << 20
"""The largest size a template may ask for."""
_ITEM = 64
_BIT = 64
"""So integers stay below a million bits, which can be multiplied in milliseconds."""

Size = Callable[..., float]


def of_text(value: object) -> float:
    """What ``str(value)`` takes, where lists may hold the same long text many times."""
    if isinstance(value, str):
        return len(value)
    size, stack = 0.0, [value]
    while stack and size <= MOST:
        item = stack.pop()
        size += _ITEM
        if isinstance(item, (str, bytes)):
            size += len(item)
        elif isinstance(item, int):
            size += item.bit_length() / 3
        elif isinstance(item, Mapping):
            stack += item.keys()
            stack += item.values()
        elif isinstance(item, (list, tuple)):
            stack += item
    return size


def of_operation(operator: str, left: Any, right: Any) -> float:
    """Of ``left operator right``, for ``+``, ``*``, ``**`` and ``%``."""
    if operator == "%":
        return _of_percent(left, right)
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else 0
        return _BIT * (left.bit_length() + right.bit_length() if operator == "*" else bits)
    if operator == "+":
        return _length(left) + _length(right)
    if operator == "*":
        return _length(left) * _whole(right) + _length(right) * _whole(left)
    return 0


def of_call(function: object, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> float:
    """Of a call of a method of a text, bytes or an integer; 0 for every other."""
    method = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
    owner = getattr(method, "__self__", None)
    if not isinstance(owner, (str, bytes, int)):
        return 0
    size = _METHODS.get(getattr(method, "__name__", ""))
    return 0 if size is None else size(owner, *arguments, **named)


def _of_percent(left: Any, right: Any) -> float:
    if not isinstance(left, str):
        return 0
    # A width is a demand for that many characters; * takes it from the arguments.
    widths = [int(digits[:9]) for digits in re.findall(r"\d+", left)]
    if "*" in left:
        return math.inf
    often = left.count("%") if isinstance(right, Mapping) else 1
    return len(left) + sum(widths) + often * of_text(right)


def _of_format(text: str, *arguments: Any, **named: Any) -> float:
    """``str.format``: any of the values may stand in any of the braces, in a width too."""
    widths = [int(digits[:9]) for digits in re.findall(r"\d+", text)]
    if re.search(r"\{[^{}]*\{", text):
        widths += [_whole(value) for value in (*arguments, *named.values())]
    return len(text) + sum(widths) + text.count("{") * of_text([*arguments, named])


def _of_replace(text: Any, old: Any = "", new: Any = "", count: Any = None) -> float:
    if not isinstance(text, str) or not isinstance(old, str):
        return 0
    return len(text) + text.count(old) * _length(new)


def _of_join(items: Any, d: Any = "", attribute: Any = None) -> float:
    if not isinstance(items, (list, tuple, Mapping)):
        return 0
    return of_text(items) + len(items) * _length(d)


def _of_width(text: Any, width: Any = 80, fill: Any = " ") -> float:
    return _length(text) + _whole(width)


def _of_indent(text: Any, width: Any = 4, first: Any = False, blank: Any = False) -> float:
    if not isinstance(text, str):
        return 0
    return len(text) + (len(text.splitlines()) + 1) * (_length(width) + _whole(width))


def _of_wrapped(
    text: Any, width: Any = 79, break_long_words: Any = True, wrapstring: Any = None,
    break_on_hyphens: Any = True,
) -> float:  # fmt: skip
    most_lines = _length(text) / max(1, _whole(width)) + 1
    if isinstance(text, str):
        most_lines += text.count("\n") + text.count(" ")
    return _length(text) + most_lines * _length(wrapstring)


def _of_json(
    value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None,
    sort_keys: Any = False,
) -> float:  # fmt: skip
    between = _whole(indent) + _length(indent) + (0 if separators is None else of_text(separators))
    return of_text(value) * (1 + between / _ITEM)


def _of_sum(items: Any, attribute: Any = None, start: Any = 0) -> float:
    """Of numbers; of lists only where they are the items themselves."""
    if not isinstance(start, (list, tuple)):
        return 0
    if attribute is not None or not isinstance(items, (list, tuple)):
        return math.inf
    return sum(map(_length, items))


def _of_rounded(value: Any, precision: Any = 0, method: Any = "common") -> float:
    return _BIT * 4 * abs(_whole(precision))


def _of_list(items: Any) -> float:
    return _ITEM * len(items) if hasattr(items, "__len__") else 0


def _length(value: Any) -> float:
    if isinstance(value, (str, bytes)):
        return len(value)
    return _ITEM * len(value) if isinstance(value, (list, tuple)) else 0


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


_METHODS: dict[str, Size] = {
    "center": _of_width,
    "ljust": _of_width,
    "rjust": _of_width,
    "zfill": _of_width,
    "to_bytes": lambda number, length=1, *_, **__: _whole(length),
    "expandtabs": lambda text, tabsize=8: len(text) + len(text) * _whole(tabsize),
    "replace": _of_replace,
    "join": lambda separator, items=(), *_: _of_join(items, separator),
    "translate": lambda text, table=(), *_: len(text) * of_text(table),
    "format": _of_format,
    "format_map": lambda text, values: _of_format(text, *values.values()),
}

FILTERS: dict[str, Size] = {
    "batch": lambda items, linecount, fill_with=None: _ITEM * _whole(linecount),
    "center": _of_width,
    "format": lambda text, *values, **named: _of_percent(text, named or values),
    "indent": _of_indent,
    "join": _of_join,
    "list": _of_list,
    "pprint": of_text,
    "replace": _of_replace,
    "round": _of_rounded,
    "slice": lambda items, slices, fill_with=None: _ITEM * _whole(slices),
    "string": of_text,
    "sum": _of_sum,
    "tojson": _of_json,
    "wordwrap": _of_wrapped,
    "xmlattr": lambda values, autospace=True: of_text(values),
}
"""By filter: the size of what it makes, from its arguments."""
