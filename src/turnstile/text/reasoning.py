"""What a model thinks, told from what it says: :class:`ReasoningReader`, :class:`AnswerReader`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from turnstile.text.tool_calls import Arguments, Begin, CallReader, Content

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that is not for the user."""

    text: str


AnswerPiece = Reasoning | Content | Begin | Arguments


class _Part(Enum):
    START = auto()
    THOUGHT = auto()  # its beginning, up to the first visible character
    THINKING = auto()
    BETWEEN = auto()
    SAYING = auto()


class ReasoningReader:
    """Finds ``<think>…</think>`` at the beginning of an answer, while it grows.

    Space around what is thought belongs to neither side. Tags anywhere else are content.

    Parameters
    ----------
    began
        The prompt ends with the opening tag, so that the answer begins inside.
    """

    def __init__(self, *, began: bool) -> None:
        self._part = _Part.THOUGHT if began else _Part.START
        self._held = ""

    @property
    def thinking(self) -> bool:
        """Whether what comes next is thought, as far as is known."""
        return self._part in (_Part.THOUGHT, _Part.THINKING)

    def push(self, text: str) -> tuple[str, str]:
        """Take more text; returns what is certain of it: thought, and said."""
        text, self._held = self._held + text, ""
        if self._part is _Part.START:
            visible = text.lstrip()
            if visible.startswith(OPEN):
                self._part, text = _Part.THOUGHT, visible.removeprefix(OPEN)
            elif OPEN.startswith(visible):
                self._held = text
                return "", ""
            else:
                self._part = _Part.SAYING
        if self._part is _Part.THOUGHT:
            text = text.lstrip()
            if text:
                self._part = _Part.THINKING
        thought = ""
        if self._part is _Part.THINKING:
            thought, text = self._think(text)
        if self._part is _Part.BETWEEN:
            text = text.lstrip()
            if text:
                self._part = _Part.SAYING
        return thought, text

    def _think(self, text: str) -> tuple[str, str]:
        thought, tag, rest = text.partition(CLOSE)
        if tag:
            self._part = _Part.BETWEEN
            return thought.rstrip(), rest
        most = min(len(text), len(CLOSE) - 1)
        begun = next(n for n in range(most, -1, -1) if CLOSE.startswith(text[len(text) - n :]))
        certain = text[: len(text) - begun].rstrip()
        self._held = text[len(certain) :]
        return certain, ""

    def finish(self) -> tuple[str, str]:
        """No more text comes; returns what was held back."""
        held, self._held = self._held, ""
        return (held, "") if self.thinking else ("", held)


class AnswerReader:
    """Takes an answer apart: what is thought, what is said, which tools are called.

    Parameters
    ----------
    reasoning, calls
        What finds the one and the other; None where there is none to be found.
    """

    def __init__(self, reasoning: ReasoningReader | None, calls: CallReader | None) -> None:
        self._reasoning = reasoning
        self._calls = calls

    @property
    def num_calls(self) -> int:
        """Calls announced so far."""
        return 0 if self._calls is None else self._calls.num_calls

    @property
    def thinking(self) -> bool:
        """Whether what comes next is thought, as far as is known."""
        return self._reasoning is not None and self._reasoning.thinking

    def push(self, text: str) -> list[AnswerPiece]:
        """Take more text; returns what is certain by now."""
        return self._pieces(
            *(("", text) if self._reasoning is None else self._reasoning.push(text))
        )

    def finish(self) -> list[AnswerPiece]:
        """No more text comes; returns what was held back."""
        pieces = [] if self._reasoning is None else self._pieces(*self._reasoning.finish())
        return pieces if self._calls is None else [*pieces, *self._calls.finish()]

    def _pieces(self, thought: str, said: str) -> list[AnswerPiece]:
        pieces: list[AnswerPiece] = [Reasoning(thought)] if thought else []
        if self._calls is not None:
            return [*pieces, *self._calls.push(said)]
        return [*pieces, Content(said)] if said else pieces
