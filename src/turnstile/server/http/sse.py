r"""Server-sent events, as OpenAI's clients read them.

A frame is ``data: <one line of JSON>\n\n``; a stream ends with ``data: [DONE]\n\n``. All that
stays the same from chunk to chunk is encoded once per choice: a token costs one JSON-encoded
string and one join.
"""

from __future__ import annotations

import msgspec

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
COMMENT = "turnstile.comment"
"""Key in a request's scope: bytes its stream may carry between two pieces without a meaning."""

encode = msgspec.json.Encoder().encode


def frame(value: object) -> bytes:
    """One event with ``value`` as its JSON."""
    return b"data: %b\n\n" % encode(value)


def error_frames(body: bytes) -> bytes:
    """An error after the head was sent, and the end of the stream."""
    return b"data: %b\n\n%b" % (body, DONE)


def split_around(value: object, marker: str) -> tuple[bytes, bytes]:
    """The bytes of the frame of ``value`` before and after the string ``marker`` in it."""
    before, _, after = frame(value).partition(encode(marker))
    return before, after
