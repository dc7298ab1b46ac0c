"""Answers in the form of OpenAI's Responses: items, and events with names.

An answer is a list of items: what was thought, a message, calls. :class:`_Items` grows them and
says what happens to them, event by event; a stream sends the events, an answer in one piece only
what is there at the end.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from turnstile.server.answer.choices import Choice
from turnstile.server.answer.frames import Outline
from turnstile.server.answer.parsed import ParsedFrames
from turnstile.server.answer.tools import ToolUse
from turnstile.server.answer.usage import Record, usage_of
from turnstile.server.errors import ApiError
from turnstile.server.http.sse import encode
from turnstile.text.output import Delta
from turnstile.text.reasoning import AnswerPiece, Reasoning
from turnstile.text.tool_calls import Arguments, Begin

Event = dict[str, Any]
_UNFINISHED = {"length": "max_output_tokens", "timeout": "timeout"}


class ResponseFrames(ParsedFrames):
    """``/v1/responses``.

    Parameters
    ----------
    repeated
        What a response repeats of its request.
    """

    def __init__(
        self, outline: Outline, use: ToolUse | None, *, thinks: bool, repeated: dict[str, Any]
    ) -> None:
        super().__init__(outline, use, thinks=thinks)
        self._repeated = repeated
        self._items = _Items(self._call_id)
        self._number = 0

    def _call_id(self) -> str:
        assert self._use is not None
        return self._use.format.make_id()

    # -- streams ------------------------------------------------------------------------------

    def _first(self, choice: Choice) -> bytes:
        response = self._response("in_progress", None)
        begun = (
            {"type": f"response.{kind}", "response": response}
            for kind in ("created", "in_progress")
        )
        return self._told(begun)

    def _events(self, choice: Choice, delta: Delta, pieces: list[AnswerPiece]) -> bytes:
        choice.sent_tokens = choice.num_tokens
        return self._told(event for piece in pieces for event in self._items.take(piece))

    def _last(self, choice: Choice) -> bytes:
        first = b"" if choice.began else self._first(choice)
        choice.began = True
        rest = self._middle(choice, choice.text.take())
        held = self._events(choice, Delta("", [], []), self._read_end(choice))
        return first + rest + held + self._told(self._items.close())

    def ending(self) -> bytes:
        """The whole response, once more."""
        (choice,) = self._record.jobs[0].choices
        response = self._response(self._status(choice), choice)
        return self._told([{"type": f"response.{response['status']}", "response": response}])

    def failure(self, error: ApiError) -> bytes:
        """An error, and a response that has failed of it."""
        told = {"code": error.code or error.kind, "message": error.message}
        response = {**self._response("failed", None), "error": told}
        return self._told(
            [
                {"type": "error", **told, "param": error.param},
                {"type": "response.failed", "response": response},
            ]
        )

    def _told(self, events: Iterable[Event]) -> bytes:
        data = b""
        for event in events:
            numbered = {**event, "sequence_number": self._number}
            data += b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(numbered))
            self._number += 1
        return data

    # -- one piece ----------------------------------------------------------------------------

    def body(self, choices: Sequence[Choice]) -> bytes:
        """The whole response."""
        (choice,) = choices
        for piece in (*self._read(choice, choice.text.take()), *self._read_end(choice)):
            self._items.take(piece)
        self._items.close()
        return encode(self._response(self._status(choice), choice))

    def _status(self, choice: Choice) -> str:
        return "incomplete" if choice.finish in _UNFINISHED else "completed"

    def _response(self, status: str, choice: Choice | None) -> dict[str, Any]:
        head = self._head
        why = None if status != "incomplete" or choice is None else _UNFINISHED[str(choice.finish)]
        return {
            "id": head.id,
            "object": "response",
            "created_at": head.created,
            "status": status,
            "error": None,
            "incomplete_details": None if why is None else {"reason": why},
            "model": head.model,
            "output": self._items.done,
            "usage": None if choice is None else _usage(self._record),
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            **self._repeated,
        }


def _usage(record: Record) -> dict[str, object]:
    usage: dict[str, Any] = usage_of(record.jobs)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }


class _Items:
    """The items of a response while they grow.

    Attributes
    ----------
    done
        Those that are whole.
    """

    def __init__(self, make_call_id: Callable[[], str]) -> None:
        self._make_call_id = make_call_id
        self._open: dict[str, Any] | None = None
        self._text = ""
        self.done: list[dict[str, Any]] = []

    def take(self, piece: AnswerPiece) -> list[Event]:
        """Take a piece of the answer; returns what happens by it."""
        if isinstance(piece, Begin):
            return self._begin(
                "function_call", "fc", name=piece.name, call_id=self._make_call_id(), arguments=""
            )
        if isinstance(piece, Arguments):
            self._text += piece.text
            return [self._event("function_call_arguments.delta", delta=piece.text)]
        kind = "reasoning" if isinstance(piece, Reasoning) else "message"
        events = []
        if self._open is None or self._open["type"] != kind:
            events = self._begin_text(kind)
        self._text += piece.text
        what = "reasoning_text" if kind == "reasoning" else "output_text"
        return [*events, self._event(f"{what}.delta", content_index=0, delta=piece.text)]

    def _begin_text(self, kind: str) -> list[Event]:
        more: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        events = self._begin(kind, "msg" if kind == "message" else "rs", content=[], **more)
        return [*events, self._event("content_part.added", content_index=0, part=self._part())]

    def _begin(self, kind: str, prefix: str, **fields: Any) -> list[Event]:
        before = self.close()
        item = {"id": f"{prefix}_{secrets.token_hex(16)}", "type": kind, "status": "in_progress"}
        self._open = item | fields
        self._text = ""
        return [*before, self._event("output_item.added", item=dict(self._open), of_item=False)]

    def close(self) -> list[Event]:
        """No more of the item comes; returns what happens by that."""
        item = self._open
        if item is None:
            return []
        item["status"] = "completed"
        if item["type"] == "function_call":
            item["arguments"] = self._text
            events = [
                self._event("function_call_arguments.done", name=item["name"], arguments=self._text)
            ]
        else:
            part = self._part()
            item["content"] = [part]
            what = part["type"]
            events = [
                self._event(f"{what}.done", content_index=0, text=self._text),
                self._event("content_part.done", content_index=0, part=part),
            ]
        events.append(self._event("output_item.done", item=item, of_item=False))
        self.done.append(item)
        self._open = None
        return events

    def _part(self) -> dict[str, Any]:
        assert self._open is not None
        if self._open["type"] == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}

    def _event(self, kind: str, *, of_item: bool = True, **fields: Any) -> Event:
        assert self._open is not None
        event: Event = {"type": f"response.{kind}", "output_index": len(self.done)}
        if of_item:
            event["item_id"] = self._open["id"]
        if kind.startswith("output_text"):
            event["logprobs"] = []
        return event | fields
