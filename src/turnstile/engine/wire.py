"""Messages over a socket pair: a length (4 bytes, little-endian), then msgpack.

A socket pair rather than a message queue, for two properties that recovery stands on. A message
is with the kernel before ``send`` returns, so the members announced before a step are known even
if the step kills the process at once; and the end of the stream arrives after all that was sent,
so it tells of a death exactly when everything said before it has been heard.
"""

from __future__ import annotations

import select
import socket
import struct

_LENGTH = struct.Struct("<I")
_PIECE = 1 << 18


def frame(payload: bytes) -> bytes:
    """A message as it travels."""
    return _LENGTH.pack(len(payload)) + payload


class Unframer:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes; returns the messages they complete, in order."""
        if self._rest:
            data = self._rest + data
        messages = []
        at = 0
        while at + 4 <= len(data):
            end = at + 4 + _LENGTH.unpack_from(data, at)[0]
            if end > len(data):
                break
            messages.append(data[at + 4 : end])
            at = end
        self._rest = data[at:]
        return messages


class Channel:
    """The engine's end: sends at once, receives without waiting or blocks without using CPU."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._unframer = Unframer()
        self.num_sent = 0

    def send(self, payload: bytes) -> None:
        """Hand a message to the kernel; waits while its buffer is full."""
        self._socket.sendall(frame(payload))
        self.num_sent += 1

    def receive(self, timeout: float | None) -> list[bytes]:
        """All messages that are complete, after waiting up to ``timeout`` seconds for bytes (None:
        for ever; 0: not at all). Raises :class:`EOFError` when the other end is gone.
        """
        if timeout != 0:
            select.select([self._socket], [], [], timeout)
        messages: list[bytes] = []
        while True:
            try:
                data = self._socket.recv(_PIECE, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages
            if not data:
                raise EOFError("The API process is gone.")
            messages += self._unframer.feed(data)
