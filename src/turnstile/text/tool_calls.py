"""Tool calls in what a model writes: found while the text grows, whatever pieces it comes in.

A :class:`CallReader` takes the text of one sample and tells content from calls::

    reader = Hermes(names)
    for text in texts:
        send(reader.push(text))
    send(reader.finish())

Each format (:mod:`turnstile.text.tool_formats`) is a parser written as a generator that is sent
one character after the other, so that it reads like a grammar and can pause anywhere. A call is
announced as soon as its name is known, and its arguments are passed on as the model writes them.
What looked like a call and is none (no JSON, no tool of that name) is content.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from itertools import groupby

_SPACE = frozenset(" \n\r\t")
_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Begin:
    """A call of the tool ``name``; the first of an answer has index 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the arguments of call ``index``: JSON text, as the model wrote it."""

    index: int
    text: str


Piece = Content | Begin | Arguments
_Character = Generator[None, str, str]
_Found = Generator[None, str, bool]
Done = Generator[None, str, None]
"""A parser that returns nothing; characters are sent to it."""
_Take = Callable[[str], None]


class _NoCallError(Exception):
    """What is read is no call."""


class _Source:
    """Characters one by one, as text comes; ``""`` is its end, as often as it is asked for.

    Attributes
    ----------
    heard
        All that is read while this is a list.
    """

    def __init__(self) -> None:
        self._back = ""
        self._ended = False
        self.heard: list[str] | None = None

    def next(self) -> _Character:
        """Read a character."""
        character, self._back = self._back[:1], self._back[1:]
        if not character and not self._ended:
            character = yield
            self._ended = not character
        if self.heard is not None:
            self.heard.append(character)
        return character

    def visible(self) -> _Character:
        """Read the next character that is not space."""
        while (character := (yield from self.next())) in _SPACE:
            pass
        return character

    def unread(self, character: str) -> None:
        """Have the last character read again."""
        self._back = character + self._back
        if self.heard and character:
            self.heard.pop()

    # -- JSON ---------------------------------------------------------------------------------

    def value(self, take: _Take) -> Done:
        """Read one value; ``take`` gets its characters. Raises :class:`_NoCallError` at the end
        of the text.
        """
        character = yield from self.visible()
        if character == '"':
            yield from self.string(take)
        elif character in ("{", "["):
            yield from self._nested(character, take)
        else:
            while character and character not in _SPACE and character not in ",}]":
                take(character)
                character = yield from self.next()
            self.unread(character)

    def _nested(self, character: str, take: _Take) -> Done:
        depth = 0
        while True:
            if character == '"':
                yield from self.string(take)
            else:
                take(character)
                depth += (character in "{[") - (character in "}]")
            if not depth:
                return
            character = yield from self.next()
            if not character:
                raise _NoCallError

    def string(self, take: _Take) -> Done:
        """Read the rest of a string, whose first quote is read; ``take`` gets all of it."""
        take('"')
        escaped = False
        while character := (yield from self.next()):
            take(character)
            if character == '"' and not escaped:
                return
            escaped = character == "\\" and not escaped
        raise _NoCallError


class CallReader(ABC):
    """Finds the calls in the text of one sample.

    Parameters
    ----------
    names
        The tools there are. A call of another one is content.

    Attributes
    ----------
    num_calls
        Calls announced so far.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._source = _Source()
        self._out: list[Piece] = []
        self.num_calls = 0
        self._parser = self._parse()
        next(self._parser)

    def push(self, text: str) -> list[Piece]:
        """Take more text; returns what is certain by now."""
        for character in text:
            self._parser.send(character)
        return self._taken()

    def finish(self) -> list[Piece]:
        """No more text comes; returns what was held back."""
        self._parser.send("")
        return self._taken()

    def _taken(self) -> list[Piece]:
        out, self._out = self._out, []
        pieces: list[Piece] = []
        for (kind, index), same in groupby(out, _kind):
            if kind is Begin:
                pieces += same
            elif text := "".join(piece.text for piece in same if not isinstance(piece, Begin)):
                pieces.append(Content(text) if kind is Content else Arguments(index, text))
        return pieces

    def _parse(self) -> Done:
        yield from self._text()
        yield from self._rest()
        while True:
            yield

    @abstractmethod
    def _text(self) -> Done:
        """Read the whole text; what is left of it is content."""

    # -- what formats are made of -------------------------------------------------------------

    def _say(self, text: str) -> None:
        self._out.append(Content(text))

    def _rest(self) -> Done:
        while character := (yield from self._source.next()):
            self._say(character)

    def _until(self, *tags: str, mute: bool = False) -> _Character:
        """Read content up to one of ``tags``; returns the tag, or ``""`` where the text ends.

        Space before a tag is dropped; ``mute`` drops all. A tag's first character must not be
        in it again.
        """
        spaces: list[str] = []
        matched = ""
        while True:
            character = yield from self._source.next()
            if character and any(tag.startswith(matched + character) for tag in tags):
                matched += character
                if matched in tags:
                    return matched
                continue
            if not matched and character in _SPACE:
                spaces.append(character)
                continue
            held = "".join(spaces) + matched
            if matched and any(tag[0] == character for tag in tags):
                self._source.unread(character)
            else:
                held += character
            if not mute:
                self._say(held)
            spaces, matched = [], ""
            if not character:
                return ""

    def _call(self, opening: str) -> _Found:
        """Read a call, ``opening`` having been read before; returns whether it was one. If not,
        all of it is content.
        """
        return (yield from self._announced(opening, self._object()))

    def _announced(self, opening: str, parts: Done) -> _Found:
        source, before = self._source, self.num_calls
        source.heard = heard = list[str]()
        try:
            yield from parts
        except _NoCallError:
            if self.num_calls == before:
                source.unread(heard[-1] if heard else "")  # it may begin something else
                self._say(opening + "".join(heard))
                return False
        finally:
            source.heard = None
        return True

    def _object(self) -> Done:
        """``{"name": …, "arguments": …}``, in either order."""
        source = self._source
        if (yield from source.visible()) != "{":
            raise _NoCallError
        index: int | None = None
        early: list[str] | None = None
        while (character := (yield from source.visible())) != "}":
            if character == ",":
                continue
            if character != '"':
                raise _NoCallError
            key = yield from self._decoded(source.string)
            if (yield from source.visible()) != ":":
                raise _NoCallError
            if key == "name" and index is None:
                index = self._begin((yield from self._decoded(source.value)))
                if early is not None:
                    self._argue(index, "".join(early))
            elif key in _ARGUMENTS and early is None:
                early = []
                yield from self._arguments(early.append if index is None else self._arguing(index))
            else:
                yield from source.value(_nobody)
        if index is None:
            raise _NoCallError
        if early is None:
            self._argue(index, "{}")

    def _arguments(self, take: _Take) -> Done:
        """Read the value of a call's arguments: an object, or one written into a string."""
        source = self._source
        character = yield from source.visible()
        source.unread(character)
        if character == "{":
            yield from source.value(take)
            return
        value = yield from self._decoded(source.value)
        text = value if isinstance(value, str) else json.dumps(value)
        take(text if value is not None and text.strip() else "{}")

    def _decoded(self, read: Callable[[_Take], Done]) -> Generator[None, str, object]:
        characters: list[str] = []
        yield from read(characters.append)
        try:
            return json.loads("".join(characters), strict=False)
        except (ValueError, RecursionError):
            raise _NoCallError from None

    def _begin(self, name: object) -> int:
        if not isinstance(name, str) or name not in self._names:
            raise _NoCallError
        self._out.append(Begin(self.num_calls, name))
        self._source.heard = None
        self.num_calls += 1
        return self.num_calls - 1

    def _argue(self, index: int, text: str) -> None:
        self._out.append(Arguments(index, text))

    def _arguing(self, index: int) -> _Take:
        return lambda text: self._argue(index, text)

    def _list(self) -> _Found:
        """Read calls up to the end of their list, whose bracket is read; False where one is
        none.
        """
        source = self._source
        while (character := (yield from source.visible())) not in ("]", ""):
            if character == ",":
                continue
            source.unread(character)
            if not (yield from self._call("")):
                return False
        return True


def _nobody(_: str) -> None:
    """Take characters that nobody wants."""


def _kind(piece: Piece) -> tuple[type[Piece], int]:
    return type(piece), -1 if isinstance(piece, Content) else piece.index
