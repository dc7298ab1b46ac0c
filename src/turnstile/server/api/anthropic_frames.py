"""Answers in the form of Anthropic's Messages: blocks, and events with names."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from turnstile.server.answer.choices import Choice
from turnstile.server.answer.parsed import ParsedFrames
from turnstile.server.errors import ApiError
from turnstile.server.http.sse import encode
from turnstile.text.output import Delta
from turnstile.text.reasoning import AnswerPiece, Reasoning
from turnstile.text.tool_calls import Arguments, Begin

Event = dict[str, Any]
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: ApiError) -> bytes:
    """The JSON error object, one line."""
    return encode(error_of(error))


def error_of(error: ApiError) -> dict[str, Any]:
    """The error object. ``param`` and ``code`` are ours."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    details = {"message": error.message, "param": error.param, "code": error.code, **error.extra}
    return {"type": "error", "error": {"type": kind, **details}}


class MessageFrames(ParsedFrames):
    """``/v1/messages``."""

    _block = -1
    """Index of the block that grows, or grew last."""
    _kind = ""
    """What kind of block it is; empty where none is open."""

    # -- streams ------------------------------------------------------------------------------

    def _first(self, choice: Choice) -> bytes:
        message = {
            **self._message_head(),
            "content": [],
            **self._stop(None),
            "usage": self._usage(),
        }
        return _told([{"type": "message_start", "message": message}, {"type": "ping"}])

    def _events(self, choice: Choice, delta: Delta, pieces: list[AnswerPiece]) -> bytes:
        choice.sent_tokens = choice.num_tokens
        return _told(event for piece in pieces for event in self._grow(piece))

    def _grow(self, piece: AnswerPiece) -> list[Event]:
        if isinstance(piece, Begin):
            return self._open("tool_use", self._tool_use(piece.name))
        if isinstance(piece, Arguments):
            return [self._delta("input_json_delta", partial_json=piece.text)]
        kind = "thinking" if isinstance(piece, Reasoning) else "text"
        empty = {kind: "", "signature": ""} if kind == "thinking" else {kind: ""}
        begun = [] if self._kind == kind else self._open(kind, {"type": kind, **empty})
        return [*begun, self._delta(f"{kind}_delta", **{kind: piece.text})]

    def _tool_use(self, name: str) -> dict[str, Any]:
        assert self._use is not None
        return {"type": "tool_use", "id": self._use.format.make_id(), "name": name, "input": {}}

    def _open(self, kind: str, block: dict[str, Any]) -> list[Event]:
        closed = self._close()
        self._kind = kind
        self._block += 1
        return [*closed, self._of_block("start", content_block=block)]

    def _close(self) -> list[Event]:
        if not self._kind:
            return []
        signed = [self._delta("signature_delta", signature="")] if self._kind == "thinking" else []
        self._kind = ""
        return [*signed, self._of_block("stop")]

    def _delta(self, kind: str, **fields: str) -> Event:
        return self._of_block("delta", delta={"type": kind, **fields})

    def _of_block(self, what: str, **fields: object) -> Event:
        return {"type": f"content_block_{what}", "index": self._block, **fields}

    def _last(self, choice: Choice) -> bytes:
        first = b"" if choice.began else self._first(choice)
        choice.began = True
        rest = self._middle(choice, choice.text.take())
        held = self._events(choice, Delta("", [], []), self._read_end(choice))
        return first + rest + held + _told(self._close())

    def ending(self) -> bytes:
        """Why the message ended, and what it took."""
        (choice,) = self._record.jobs[0].choices
        ended = {"type": "message_delta", "delta": self._stop(choice), "usage": self._usage()}
        return _told([ended, {"type": "message_stop"}])

    def failure(self, error: ApiError) -> bytes:
        """An error in the middle of a stream."""
        return _told([error_of(error)])

    # -- one piece ----------------------------------------------------------------------------

    def body(self, choices: Sequence[Choice]) -> bytes:
        """The whole message."""
        (choice,) = choices
        blocks: list[dict[str, Any]] = []
        for piece in (*self._read(choice, choice.text.take()), *self._read_end(choice)):
            if isinstance(piece, Begin):
                blocks.append({**self._tool_use(piece.name), "input": ""})
            elif isinstance(piece, Arguments):
                blocks[-1]["input"] += piece.text
            elif isinstance(piece, Reasoning):
                _add_text(blocks, "thinking", piece.text, signature="")
            else:
                _add_text(blocks, "text", piece.text)
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = _as_object(block["input"])
        message = {**self._message_head(), "content": blocks, **self._stop(choice)}
        return encode({**message, "usage": self._usage()})

    # -- what both have -----------------------------------------------------------------------

    def _message_head(self) -> dict[str, Any]:
        head = self._head
        return {"id": head.id, "type": "message", "role": "assistant", "model": head.model}

    def _stop(self, choice: Choice | None) -> dict[str, Any]:
        if choice is None:
            return {"stop_reason": None, "stop_sequence": None}
        finish = self._finish(choice)
        string = choice.stop_reason if isinstance(choice.stop_reason, str) else None
        reason = {"length": "max_tokens", "timeout": "max_tokens", "tool_calls": "tool_use"}.get(
            str(finish), "end_turn" if string is None else "stop_sequence"
        )
        return {"stop_reason": reason, "stop_sequence": string}

    def _usage(self) -> dict[str, int]:
        (job,) = self._record.jobs
        return {
            "input_tokens": job.num_prompt - job.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": job.cached_tokens,
            "output_tokens": job.num_output,
        }


def _add_text(blocks: list[dict[str, Any]], kind: str, text: str, **more: str) -> None:
    if not (blocks and blocks[-1]["type"] == kind):
        blocks.append({"type": kind, kind: "", **more})
    blocks[-1][kind] += text


def _as_object(arguments: str) -> object:
    """Arguments as JSON; what is none (it was cut off) as the model wrote it."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(arguments)
    return {"unfinished": arguments}


def _told(events: Iterable[Event]) -> bytes:
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event)) for event in events
    )
