"""What is thought is told from what is said, whatever pieces it comes in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstile.text.reasoning import AnswerReader, Reasoning, ReasoningReader
from turnstile.text.tool_calls import Arguments, Begin, Content
from turnstile.text.tool_formats import Hermes


def read(reader: ReasoningReader, *texts: str) -> tuple[str, str]:
    thought, said = zip(*[reader.push(text) for text in texts], reader.finish(), strict=True)
    return "".join(thought), "".join(said)


ANSWERS = [
    ("<think>\nHm. \n</think>\n\nYes.", False, "Hm.", "Yes."),
    ("\n <think>Hm.</think>Yes. ", False, "Hm.", "Yes. "),
    ("Hm.\n</think>\nYes.", True, "Hm.", "Yes."),
    ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
    ("Yes. <think>no</think>", False, "", "Yes. <think>no</think>"),
    (" Yes.", False, "", " Yes."),
    ("<thin", False, "", "<thin"),
    ("  ", False, "", "  "),
    ("<think>cut off", False, "cut off", ""),
    ("cut </thi", True, "cut </thi", ""),
    ("a </th b </think> c", True, "a </th b", "c"),
    ("", False, "", ""),
]


@pytest.mark.parametrize(("text", "began", "thought", "said"), ANSWERS)
def test_thought_and_said_are_told_apart(text: str, began: bool, thought: str, said: str) -> None:
    assert read(ReasoningReader(began=began), text) == (thought, said)
    assert read(ReasoningReader(began=began), *text) == (thought, said)


@given(st.text(alphabet="<think/> \n"), st.booleans())
def test_thoughts_are_found_whatever_pieces_the_text_comes_in(text: str, began: bool) -> None:
    assert read(ReasoningReader(began=began), *text) == read(ReasoningReader(began=began), text)


def test_it_is_known_whether_the_model_still_thinks() -> None:
    reader = ReasoningReader(began=False)
    assert not reader.thinking
    reader.push("<think>")
    assert reader.thinking
    assert reader.push("well") == ("well", "")
    reader.push("</think>")
    assert not reader.thinking


def test_calls_are_looked_for_in_what_is_said() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    reader = AnswerReader(ReasoningReader(began=False), Hermes(["f"]))
    pieces = [*reader.push(f"<think>{call}</think>{call} So."), *reader.finish()]
    assert pieces == [Reasoning(call), Begin(0, "f"), Arguments(0, "{}"), Content(" So.")]
    assert reader.num_calls == 1
