"""Keeping a user's words from becoming control tokens when a chat is rendered to one text.

A chat template writes control tokens (``<|im_start|>``) and the users' words into one string, and
in that string nobody can tell them apart. So before rendering, every piece of control text in
what users sent is put between two marks, and after rendering, marked text is read as text and
unmarked text as the template's own. The marks are Unicode noncharacters (U+FDD0…U+FDEF) that do
not occur in the request. Ordinary chats hold no control text: they are rendered and encoded in
one go, exactly as elsewhere.

Templates cut and join strings. A mark that has lost its partner still marks the control text it
touches, and one that stands alone still separates what is left and right of it; both vanish from
the text. What is not covered: control text that forms only in the template, where it *joins* two
user strings, or takes something out of the middle of one (``replace('<think>', '')`` makes the
marker of ``<|im_<think>end|>``). No model's template is known to do either; whoever writes one
should cut strings (``split``), which is safe.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from turnstile.text.errors import MessageError
from turnstile.text.tokenizer import Tokenizer

_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


@dataclass(frozen=True, slots=True)
class Marks:
    """Three characters that do not occur in a request."""

    start: str
    end: str
    tag: str


def strings_in(value: object) -> Iterator[str]:
    """Every string in a JSON value, the keys of objects among them."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, (list, tuple)):
            stack.extend(item)


def choose_marks(value: object) -> Marks:
    """Pick marks that occur nowhere in ``value``."""
    taken = {character for text in strings_in(value) if not text.isascii() for character in text}
    free = [character for character in _NONCHARACTERS if character not in taken]
    if len(free) < 3:
        raise MessageError("the messages use every Unicode noncharacter from U+FDD0 on")
    return Marks(*free[:3])


def mark(value: Any, pattern: re.Pattern[str], marks: Marks) -> Any:
    """Copy a JSON value with all control text in its strings between marks."""
    if isinstance(value, str):
        return pattern.sub(lambda found: f"{marks.start}{found[0]}{marks.end}", value)
    if isinstance(value, Mapping):
        return {mark(k, pattern, marks): mark(v, pattern, marks) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [mark(item, pattern, marks) for item in value]
    return value


def unmark(text: str, marks: Marks) -> str:
    """Take the marks out of a rendered text."""
    return _mark_pattern(marks).sub("", text)


def encode_marked(tokenizer: Tokenizer, text: str, marks: Marks) -> list[int]:
    """Encode a rendered chat: unmarked control text as control tokens, all else as plain text."""
    ids: list[int] = []
    segment: list[str] = []
    first, strip_left = True, False

    def flush(strip_right: bool) -> None:
        plain = "".join(segment)
        segment.clear()
        plain = plain.lstrip() if strip_left else plain
        plain = plain.rstrip() if strip_right else plain
        if plain:
            ids.extend(tokenizer.encode_segment(plain, first=first))

    place = 0
    only_mark = _mark_pattern(marks)
    for found in _piece_pattern(tokenizer.control_pattern, marks).finditer(text):
        segment.append(text[place : found.start()])
        place = found.end()
        control = found["control"]
        if control is None:
            segment.append(only_mark.sub("", found[0]))
            continue
        token_id, strips_left, strips_right = tokenizer.control_token(control)
        flush(strips_left)
        ids.append(token_id)
        first, strip_left = False, strips_right
    segment.append(text[place:])
    flush(False)
    return ids


def _either(mark_character: str) -> str:
    """Match a mark as it is, or as JSON writes it where a template asks for ASCII."""
    return rf"(?:{mark_character}|\\u{ord(mark_character):04x})"


@lru_cache(maxsize=32)
def _mark_pattern(marks: Marks) -> re.Pattern[str]:
    return re.compile(f"{_either(marks.start)}|{_either(marks.end)}")


@lru_cache(maxsize=32)
def _piece_pattern(control: re.Pattern[str], marks: Marks) -> re.Pattern[str]:
    """Match marked control text, a lone mark, or control text of the template's own."""
    start, end, text = _either(marks.start), _either(marks.end), f"(?:{control.pattern})"
    return re.compile(f"{start}(?:{text}{end}?)?|{text}{end}|{end}|(?P<control>{text})")
