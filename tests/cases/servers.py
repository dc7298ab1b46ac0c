"""Servers for the reported cases: started once for each set of flags, checked after every case.

The files of this directory follow the letters of the reports: what the flags of ``srv`` mean is
in :func:`flags`, what is checked after a case in :func:`check_after`.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from e2e.harness import ServerProcess, text_of

CANARY_SECONDS = 5.0
MOST_ALIVE = 4
"""Servers that are kept for the next case; the one used longest ago goes first."""


def flags(
    *,
    pages: int = 64,
    ctx: int | None = None,
    chunk: int = 128,
    seqs: int = 8,
    queue: int = 32,
    prefix: bool = True,
    **more: Any,
) -> dict[str, Any]:
    """Flags of ``turnstile serve`` for the reports' words. Without ``ctx``: what the pool holds."""
    return {
        "num_pages": pages,
        "max_model_len": ctx,
        "max_num_batched_tokens": chunk,
        "max_num_seqs": seqs,
        "max_num_queued_reqs": queue,
        "enable_prefix_caching": prefix,
        **more,
    }


class ServerPool:
    """Servers by model and flags."""

    def __init__(self) -> None:
        self._alive: OrderedDict[str, ServerProcess] = OrderedDict()

    def get(self, model: str | Path, settings: dict[str, Any]) -> ServerProcess:
        """The server with these flags, started if need be."""
        key = json.dumps([str(model), settings], sort_keys=True, default=str)
        server = self._alive.pop(key, None)
        if server is None:
            while len(self._alive) >= MOST_ALIVE:
                self._alive.popitem(last=False)[1].kill()
            server = ServerProcess(model, **settings).__enter__()
        self._alive[key] = server
        return server

    def close(self) -> None:
        """End them all."""
        while self._alive:
            self._alive.popitem()[1].kill()

    def drop(self, server: ServerProcess) -> None:
        """End one that a case has spoilt, so that the next case starts its own."""
        for key, alive in list(self._alive.items()):
            if alive is server:
                del self._alive[key]
        server.kill()


def engine_pid(server: ServerProcess) -> int:
    """The process that computes."""
    return int(server.http.get("/server_info").json()["engine"]["pid"])


def check_after(server: ServerProcess, pid: int) -> None:
    """What must hold after every case: healthy, the canary as before and soon, nobody runs or
    waits, no page held, free and cached are all there are, no traceback, the same processes.
    """
    assert server.http.get("/health").status_code == 200
    answer = server.http.post(
        "/v1/completions",
        json={"prompt": server.tokens(24, seed=99), "max_tokens": 16, "temperature": 0},
        timeout=httpx.Timeout(CANARY_SECONDS),
    )
    assert answer.json()["choices"][0]["text"] == server.canary
    server.check()
    assert engine_pid(server) == pid, "the engine was restarted"


def teach_short_outputs(server: ServerProcess, key: str | None = None) -> None:
    """Let admission learn that outputs are one token long: it will then let in more than fits
    when they are not, and pages run out. Without this hardly anybody is ever preempted.
    """
    headers = {"authorization": f"Bearer {key}"} if key else None
    for _ in range(8):
        prompts = [[3 + k] for k in range(32)]
        body = {"prompt": prompts, "max_tokens": 1, "temperature": 0}
        answer = server.http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text


def preemptions(server: ServerProcess) -> float:
    """Sequences that lost their pages so far."""
    return server.metric("turnstile_preemptions_total")


LONG_CONTEXT = 32_768
LONG_POOL = 6_400


@contextlib.contextmanager
def occupied(server: ServerProcess, slots: int, **body: Any) -> Iterator[list[Raw]]:
    """Slots taken by requests that would run for a minute; they leave when the block ends.

    They are not streamed: reading them would be more work than computing them. The server must
    have a context of :data:`LONG_CONTEXT` (the fixture ``long``).
    """
    with _endless(server, slots, body) as holders:
        until(lambda: server.metric("turnstile_requests_running") >= slots)
        yield holders


@contextlib.contextmanager
def queued(server: ServerProcess, count: int, **body: Any) -> Iterator[list[Raw]]:
    """The same without a slot: requests that wait behind those of :func:`occupied`."""
    with _endless(server, count, body) as waiters:
        until(lambda: server.metric("turnstile_requests_waiting") >= count)
        yield waiters


@contextlib.contextmanager
def _endless(server: ServerProcess, count: int, body: dict[str, Any]) -> Iterator[list[Raw]]:
    body = {"temperature": 0, "ignore_eos": True, "max_tokens": 30_000, **body}
    requests = [
        Raw(server, "/v1/completions", prompt=server.tokens(8, seed=500 + k), **body)
        for k in range(count)
    ]
    try:
        yield requests
    finally:
        for request in requests:
            request.reset()


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait for something to become true; fail if it does not."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.005)


class Raw:
    """A client that sees every byte, and can leave without a goodbye."""

    def __init__(self, server: ServerProcess, path: str, **body: Any) -> None:
        url = httpx.URL(server.url)
        content = json.dumps(body).encode()
        self.socket = socket.create_connection((url.host, url.port or 80), timeout=30)
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


def text(answer: tuple[int, dict[str, Any]], index: int = 0) -> str:
    """The text of one choice of a whole answer, which must be 200."""
    status, body = answer
    assert status == 200, body
    choice = body["choices"][index]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def four_ways(
    server: ServerProcess, messages: list[dict[str, Any]] | None = None, **fields: Any
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Text, finish reason and usage of the same greedy request on both endpoints, streamed and
    not. The completion is given the very ids that the chat becomes.
    """
    messages = messages or [{"role": "user", "content": "abc"}]
    rendered = server.post("/v1/chat/completions/render", messages=messages).json()
    body = {"temperature": 0, "ignore_eos": True} | fields
    for path, prompt in (
        ("/v1/completions", {"prompt": rendered["prompt_token_ids"]}),
        ("/v1/chat/completions", {"messages": messages}),
    ):
        answer = server.post(path, **prompt, **body)
        assert answer.status_code == 200, answer.text
        whole = answer.json()
        usage = {**whole["usage"], "prompt_tokens_details": None}
        yield text((200, whole)), whole["choices"][0]["finish_reason"], usage
        options = {"include_usage": True}
        events = list(server.stream(path, **prompt, **body, stream_options=options))
        reasons = [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]]
        assert len(reasons) == 1
        yield text_of(events), reasons[0], {**events[-1]["usage"], "prompt_tokens_details": None}
