"""Leaving in every state: pages and places are free at once, and nobody pays for who stalls.

The engine is a real process without a model, its steps long enough to be caught in the middle.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from e2e.harness import FAKED, ServerProcess, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SLOTS = 4
STATES = ("queued", "mid-prefill", "decoding", "decoding pair", "unforked pair", "engine down")


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file: while it is there no engine is started in place of one that died."""
    return tmp_path_factory.mktemp("engine") / "hold"


@pytest.fixture(scope="module")
def server(tiny: Path, hold: Path) -> Iterator[ServerProcess]:
    env = {"TEST_STEP": "0.02", "TEST_HOLD": str(hold)}
    with ServerProcess(
        tiny, command=FAKED, env=env, num_pages=512, max_num_seqs=SLOTS,
        max_num_batched_tokens=8, log_stats_interval=0, max_model_len=2048,
        stalled_reader_timeout=2, max_queue_wait=0,
    ) as running:  # fmt: skip
        yield running


def post(server: ServerProcess, *, window: int | None = None, **body: Any) -> socket.socket:
    """Send a request for a completion over a socket of its own, with little room to receive."""
    parts = urlsplit(server.url)
    client = socket.socket()
    if window is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    client.connect((parts.hostname, parts.port))
    payload = json.dumps({"prompt": [40] * 9, "max_tokens": 400, "ignore_eos": True, **body})
    client.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(payload), payload.encode())
    )
    return client


def hang_up(client: socket.socket, *, reset: bool) -> None:
    """Close politely, or as a host that crashed does."""
    if reset:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def load(server: ServerProcess) -> dict[str, Any]:
    found: dict[str, Any] = server.http.get("/load").json()
    return found


def bring_into(server: ServerProcess, state: str, stream: bool, hold: Path) -> list[socket.socket]:
    """Requests, the last of them in the wanted state."""
    if state == "queued":
        clients = [post(server, prompt=[41 + k], max_tokens=1900) for k in range(SLOTS)]
        until(lambda: load(server)["running"] == SLOTS, "the slots are not taken")
        clients.append(post(server, stream=stream))
        until(lambda: load(server)["waiting"] == 1, "nobody waits")
        return clients
    if state == "mid-prefill":
        clients = [post(server, prompt=[42] * 1600, stream=stream)]
    elif state == "unforked pair":
        clients = [post(server, prompt=[43] * 1600, stream=stream, n=3)]
    else:
        clients = [post(server, stream=stream, n=3 if state == "decoding pair" else 1)]
    until(lambda: load(server)["running"] > 0, "it does not run")
    if state.startswith("decoding"):
        before = server.metric("turnstile_generated_tokens_total")
        until(
            lambda: server.metric("turnstile_generated_tokens_total") > before + 6,
            "it does not decode",
        )
    if state == "engine down":
        hold.touch()
        os.kill(server.engine_pid, signal.SIGKILL)
        until(lambda: server.http.get("/readyz").status_code == 503, "it is not down")
    return clients


@pytest.mark.parametrize("reset", [False, True], ids=["close", "reset"])
@pytest.mark.parametrize("stream", [False, True], ids=["body", "stream"])
@pytest.mark.parametrize("state", STATES)
def test_who_leaves_takes_nothing_along(
    server: ServerProcess, hold: Path, state: str, stream: bool, reset: bool
) -> None:
    computed = server.metric("turnstile_prompt_tokens_total")
    aborted = server.metric("turnstile_requests_total", outcome="abort")
    clients = bring_into(server, state, stream, hold)
    steps = server.metric("turnstile_steps_total")
    hang_up(clients.pop(), reset=reset)
    if clients:  # of the queue, at once: those who run stay
        until(lambda: load(server)["waiting"] == 0, "it still waits")
        assert load(server)["running"] == SLOTS
        for other in clients:
            hang_up(other, reset=reset)
    until(lambda: load(server)["running"] == 0, "it still runs")
    until(lambda: server.metric("turnstile_requests_in_flight") == 0, "it is still inside")
    assert server.metric("turnstile_pages", state="held") == 0
    assert server.metric("turnstile_gate_waiting") == 0
    # Before its end: neither prompt nor outputs were computed for nobody.
    assert server.metric("turnstile_steps_total") < steps + 300
    if state in ("mid-prefill", "unforked pair"):
        assert server.metric("turnstile_prompt_tokens_total") == computed
    ended = server.metric("turnstile_requests_total", outcome="abort") - aborted
    assert ended == 1 + (SLOTS if state == "queued" else 0)
    hold.unlink(missing_ok=True)
    until(lambda: server.http.get("/readyz").status_code == 200, "it does not come back")


def test_a_reader_who_stalls_costs_a_bounded_amount_and_is_let_go(server: ServerProcess) -> None:
    """He asks for megabytes and reads nothing; his neighbour notices nothing of it."""
    memory = psutil.Process(server.process.pid).memory_info
    aborted = server.metric("turnstile_requests_total", outcome="abort")
    fields = {
        "prompt": [44], "max_tokens": 1900, "n": SLOTS - 1, "stream": True, "logprobs": 20,
        "return_token_ids": True, "stream_options": {"continuous_usage_stats": True},
    }  # fmt: skip
    before = memory().rss
    client = post(server, window=4096, **fields)
    until(lambda: load(server)["running"] == SLOTS - 1, "it does not run")
    status, answer = server.complete([45] * 5, max_tokens=30, ignore_eos=True)
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 30
    until(lambda: load(server)["running"] == 0, "it is still computed for")
    assert memory().rss - before < 24 << 20
    assert server.metric("turnstile_pages", state="held") == 0
    assert server.metric("turnstile_requests_total", outcome="abort") == aborted + 1
    client.close()


def test_a_thousand_idle_connections_stand_in_nobodys_way(server: ServerProcess) -> None:
    parts = urlsplit(server.url)
    assert parts.hostname is not None
    process = psutil.Process(server.process.pid)
    until(lambda: server.metric("turnstile_requests_in_flight") == 0, "somebody is inside")
    before, memory = process.num_fds(), process.memory_info().rss
    idle = [socket.create_connection((parts.hostname, parts.port or 80)) for _ in range(1000)]
    try:
        until(lambda: process.num_fds() >= before + 990, f"{process.num_fds()} are taken")
        status, answer = server.complete([46] * 5, max_tokens=10, ignore_eos=True)
        assert status == 200
        assert answer["usage"]["completion_tokens"] == 10
        assert process.memory_info().rss - memory < 64 << 20
    finally:
        for client in idle:
            client.close()
    until(lambda: process.num_fds() <= before + 2, "their descriptors are kept")


def test_afterwards_the_server_is_what_it_was(server: ServerProcess) -> None:
    server.check()
