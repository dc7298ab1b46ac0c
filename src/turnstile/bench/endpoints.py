"""What a request looks like on the wire: OpenAI's completions, and its chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec


class Said(NamedTuple):
    """A part of a conversation: what the user asked, or what the model answered."""

    role: str
    ids: list[int]
    text: str


class Endpoint(Protocol):
    """Encodes requests: greedy, streaming, usage at the end.

    Attributes
    ----------
    path
        Where to send them.
    needs_text
        Whether :attr:`Said.text` is used, and not its ids.
    """

    path: str
    needs_text: bool

    def body(self, history: Sequence[Said], output_tokens: int) -> bytes:
        """The JSON of a request for so many tokens after what was said."""
        ...


class Completions:
    """``/v1/completions`` with token ids, so that every server does exactly the same work.

    Parameters
    ----------
    ignore_eos
        Ask for an answer that does not end before its length.
    return_token_ids
        Ask for the ids of the answer, to go on after it.
    """

    path = "/v1/completions"
    needs_text = False

    def __init__(
        self, model: str, *, ignore_eos: bool = True, return_token_ids: bool = False
    ) -> None:
        self._fields = _fields(model, ignore_eos)
        if return_token_ids:
            self._fields["return_token_ids"] = True

    def body(self, history: Sequence[Said], output_tokens: int) -> bytes:
        """See :class:`Endpoint`."""
        prompt = history[0].ids if len(history) == 1 else [i for said in history for i in said.ids]
        return msgspec.json.encode(self._fields | {"prompt": prompt, "max_tokens": output_tokens})


class Chat:
    """``/v1/chat/completions`` with text: the server adds its template's tokens to the prompt."""

    path = "/v1/chat/completions"
    needs_text = True

    def __init__(self, model: str, *, ignore_eos: bool = True) -> None:
        self._fields = _fields(model, ignore_eos)

    def body(self, history: Sequence[Said], output_tokens: int) -> bytes:
        """See :class:`Endpoint`."""
        messages = [{"role": said.role, "content": said.text} for said in history]
        return msgspec.json.encode(
            self._fields | {"messages": messages, "max_completion_tokens": output_tokens}
        )


def _fields(model: str, ignore_eos: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "model": model,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    # Left out where it is not wanted: servers that do not know it may refuse it.
    return fields | {"ignore_eos": True} if ignore_eos else fields
