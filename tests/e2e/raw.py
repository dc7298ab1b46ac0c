"""Clients that see every byte, and what they are good for: :class:`Raw` and :func:`slowed`."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
from collections.abc import Iterator
from typing import Any

import httpx

from e2e.harness import PATIENCE, ServerProcess, until
from turnstile.engine.faults import Fault, fault_prompt

FAULTS = {"TURNSTILE_FAULTS": "1"}
"""The environment of a server whose prompts may ask for faults."""


class Raw:
    """A client that sees every byte, and can leave without a goodbye."""

    def __init__(self, server: ServerProcess, path: str, **body: Any) -> None:
        url = httpx.URL(server.url)
        content = json.dumps(body).encode()
        self.socket = socket.create_connection((url.host, url.port or 80), timeout=PATIENCE)
        self.received = b""
        self.socket.sendall(
            b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (path.encode(), len(content), content)
        )

    def until(self, what: bytes) -> bytes:
        """Everything received so far, once ``what`` is in it."""
        while what not in self.received:
            piece = self.socket.recv(65536)
            assert piece, f"the connection ended before {what!r}: {self.received[-500:]!r}"
            self.received += piece
        return self.received

    @property
    def has_answer(self) -> bool:
        """Whether anything has come that was not read yet."""
        return bool(select.select([self.socket], [], [], 0)[0])

    def reset(self) -> None:
        """RST instead of FIN. May be said again."""
        if self.socket.fileno() < 0:
            return
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def close(self) -> None:
        self.socket.close()


@contextlib.contextmanager
def slowed(server: ServerProcess, max_tokens: int = 150) -> Iterator[None]:
    """In the block every step takes a twentieth of a second, and whoever decodes goes on doing so
    for a while however fast the machine is: a request that asks for it is in all of them. The
    server must allow faults (:data:`FAULTS`) and have a slot and a page for it.
    """
    running = server.metric("turnstile_requests_running") + 1
    prompt = fault_prompt(Fault.SLOW)
    holder = Raw(server, "/v1/completions", prompt=prompt, max_tokens=max_tokens, ignore_eos=True)
    try:
        until(lambda: server.metric("turnstile_requests_running") >= running, "it does not run")
        yield
    finally:
        holder.reset()
