"""How families of models write tool calls: one parser each."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Collection
from dataclasses import dataclass

from turnstile.text.tool_calls import CallReader, Done


class Hermes(CallReader):
    """``<tool_call>{…}</tool_call>``, among content: Hermes, Qwen."""

    opening, closing = "<tool_call>", "</tool_call>"

    def _text(self) -> Done:
        found = yield from self._until(self.opening)
        while found:
            if found == self.opening and (yield from self._call(self.opening)):
                found = yield from self._until(self.opening, self.closing, mute=True)
            else:
                found = yield from self._until(self.opening)


class LlamaJson(CallReader):
    """An answer that is nothing but objects, one after the other: Llama 3."""

    opening = "<|python_tag|>"

    def _text(self) -> Done:
        source = self._source
        source.heard = heard = list[str]()
        character = yield from source.visible()
        source.heard = None
        source.unread(character)
        if character != "{":
            self._say("".join(heard[:-1]))
            if character != self.opening[0] or not (yield from self._until(self.opening)):
                return
        while (yield from self._call("")):
            if (character := (yield from source.visible())) not in (";", ","):
                source.unread(character)
            if character not in (";", ",", "{"):
                return


class Mistral(CallReader):
    """``[TOOL_CALLS]`` and a list of objects, or a name and its arguments, once for each call."""

    opening = "[TOOL_CALLS]"

    def _text(self) -> Done:
        source = self._source
        while (yield from self._until(self.opening)):
            character = yield from source.visible()
            if character == "[":
                if not (yield from self._list()):
                    return
            else:
                source.unread(character)
                if not (yield from self._announced(self.opening, self._named())):
                    return

    def _named(self) -> Done:
        """``name{…}``, where ``[CALL_ID]…[ARGS]`` may come between."""
        name = ""
        while (character := (yield from self._source.next())) not in ("{", "[", ""):
            name += character
        index = self._begin(name.strip())
        while character not in ("{", ""):
            character = yield from self._source.next()
        self._source.unread(character)
        yield from self._arguments(self._arguing(index))


class ListOfCalls(CallReader):
    """A JSON list of calls and nothing else: what ``tool_choice: required`` makes a model write."""

    def _text(self) -> Done:
        if (yield from self._source.visible()) == "[":
            yield from self._list()


class OnlyArguments(CallReader):
    """The arguments of one call: what a ``tool_choice`` that names its function makes a model
    write. ``names`` is that name alone.
    """

    def _text(self) -> Done:
        (name,) = self._names
        index = self._begin(name)
        while character := (yield from self._source.next()):
            self._argue(index, character)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls.

    Attributes
    ----------
    reader
        Finds them.
    marker
        What a call begins with.
    asked
        Matches in a chat template that asks its model for this.
    id_length
        Characters of a call's id; some templates refuse others when the call comes back.
    """

    reader: Callable[[Collection[str]], CallReader]
    marker: str
    asked: str
    id_length: int | None = None

    def make_id(self) -> str:
        """An id for a call."""
        if self.id_length is None:
            return f"call_{secrets.token_hex(12)}"
        letters = string.ascii_letters + string.digits
        return "".join(secrets.choice(letters) for _ in range(self.id_length))


FORMATS = {
    # Others have the same tags, and in them something that is no JSON.
    "hermes": ToolFormat(Hermes, Hermes.opening, r"<tool_call>(\\n|\s)*\{"),
    "mistral": ToolFormat(Mistral, Mistral.opening, r"\[TOOL_CALLS\]", id_length=9),
    "llama3_json": ToolFormat(LlamaJson, LlamaJson.opening, r"<\|python_tag\|>"),
}
"""By the name that ``--tool-call-parser`` takes."""


def format_of(template: str) -> str | None:
    """Name of the format that a chat template asks its model for, where it is one of these.

    A template that knows no tools is told of them (:func:`turnstile.text.tools.with_tools_told`)
    in ``hermes``.
    """
    if "tools" not in template:
        return "hermes"
    return next((name for name, one in FORMATS.items() if re.search(one.asked, template)), None)
