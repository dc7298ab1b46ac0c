"""Reported faults of kind d: clients that leave, wait, retry or come from web pages; deaths."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from cases.servers import occupied, queued, text
from e2e.harness import PATIENCE, ServerProcess, free_port, text_of, until
from e2e.pool import Srv, flags
from e2e.raw import FAULTS, Raw, slowed

pytestmark = pytest.mark.e2e

BASE: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


# B75 ---------------------------------------------------------------------------------------------

GOOD, BAD = "https://good.example", "https://bad.example"
ASKS = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type",
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/models", "/x"])
def test_b75_preflights_of_allowed_pages_pass_without_a_key(srv: Srv, path: str) -> None:
    server = srv(pages=64, api_key="secret", allowed_origins=GOOD)

    def headers_of(answer: Any) -> dict[str, str]:
        return {k: v for k, v in answer.headers.items() if k.startswith("access-control")}

    with httpx.Client(base_url=server.url) as page:
        allowed = page.options(path, headers={"origin": GOOD, **ASKS})
        assert allowed.status_code == 204
        told = headers_of(allowed)
        assert told["access-control-allow-origin"] == GOOD
        assert "POST" in told["access-control-allow-methods"]
        assert "authorization" in told["access-control-allow-headers"].lower()
        assert "access-control-allow-credentials" not in told
        for origin in (BAD, GOOD + ".evil.example", "null", GOOD.replace("https", "http"), ""):
            assert not headers_of(page.options(path, headers={"origin": origin, **ASKS}))
        assert not headers_of(page.options(path, headers=ASKS))
        # A refusal carries the headers too, or the page could not read why.
        refused = page.post("/v1/completions", json={"prompt": "a"}, headers={"origin": GOOD})
        assert refused.status_code == 401
        assert headers_of(refused)["access-control-allow-origin"] == GOOD
        foreign = page.post("/v1/completions", json={"prompt": "a"}, headers={"origin": BAD})
        assert foreign.status_code == 401
        assert not headers_of(foreign)
    answer = server.http.post(
        "/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"origin": GOOD}
    )
    assert answer.status_code == 200
    assert headers_of(answer)["access-control-allow-origin"] == GOOD


def test_b75_without_the_flag_no_page_may_call(srv: Srv) -> None:
    server = srv(pages=64)
    for answer in (
        server.http.options("/v1/completions", headers={"origin": BAD, **ASKS}),
        server.http.post(
            "/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"origin": BAD}
        ),
    ):
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_a_refusal_is_read_by_clients_that_close_the_connection(server: ServerProcess) -> None:
    """A server that closes with the body unread resets the connection, and the 413 is lost."""
    url = httpx.URL(server.url)
    size = 17 * 2**20
    for head in (b"POST /v1/completions HTTP/1.1", b"POST /v1/nothing HTTP/1.1"):
        with socket.create_connection((url.host, url.port or 80), timeout=30) as connection:
            connection.sendall(
                head + b"\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
                b"content-length: %d\r\n\r\n" % size
            )
            connection.sendall(b"x" * size)
            answer = b""
            while piece := connection.recv(65536):
                answer += piece
        assert answer.startswith(b"HTTP/1.1 4")
        assert answer.endswith(b"}}")


# B79 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_b79_who_leaves_the_queue_is_never_computed(single: ServerProcess, stream: bool) -> None:
    counted = single.metric("turnstile_prompt_tokens_total")
    with occupied(single, 1) as (holder,):
        left = [
            Raw(single, "/v1/completions", prompt=single.tokens(200, seed=k), max_tokens=500,
                stream=stream, n=1, **BASE)
            for k in range(3)
        ]  # fmt: skip
        until(lambda: single.metric("turnstile_requests_waiting") == 3)
        for each in left:
            each.reset()
        until(lambda: single.metric("turnstile_requests_waiting") == 0)
        with ThreadPoolExecutor(1) as client:
            next_one = client.submit(single.complete, "abc", **BASE, max_tokens=4)
            until(lambda: single.metric("turnstile_requests_waiting") == 1)
            holder.reset()
            assert next_one.result()[0] == 200
    single.idle()
    # The one that held the slot (8 tokens, counted though it left), and the last (3 bytes).
    assert single.metric("turnstile_prompt_tokens_total") - counted <= 8 + 3


# B81 ---------------------------------------------------------------------------------------------


def test_b81_a_refusal_says_when_to_come_back(single: ServerProcess) -> None:
    with occupied(single, 1), queued(single, 4):
        for path, body in (
            ("/v1/completions", {"prompt": "abc"}),
            ("/v1/completions", {"prompt": "abc", "stream": True}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}]}),
        ):
            answer = single.post(path, **body, max_tokens=4)
            assert answer.status_code == 503
            error = answer.json()["error"]
            assert error["code"] == "engine_overloaded"
            seconds = int(answer.headers["retry-after"])
            assert 1 <= seconds <= 60
            assert 0 < int(answer.headers["retry-after-ms"]) <= 1000 * seconds
            assert answer.headers["x-should-retry"] == "true"
            assert answer.headers["content-type"].startswith("application/json")
        assert single.http.get("/health").status_code == 200


def test_b81_clients_that_follow_it_are_all_served(single: ServerProcess) -> None:
    words = ["number 0", "number 1"]
    expected = [text(single.complete(each, temperature=0, max_tokens=4)) for each in words]
    refused = single.metric("turnstile_requests_total", outcome="refused")

    def client(prompt: str) -> str:
        with openai.OpenAI(base_url=f"{single.url}/v1", api_key="none", max_retries=8) as api:
            name = api.models.list().data[0].id
            answer = api.completions.create(model=name, prompt=prompt, max_tokens=4, temperature=0)
            return answer.choices[0].text

    with ThreadPoolExecutor(2) as clients:
        # Short enough for a wait of seconds to be predicted, long enough to be there until then.
        with occupied(single, 1, max_tokens=15_000), queued(single, 4, max_tokens=4):
            said = [clients.submit(client, each) for each in words]
            until(
                lambda: single.metric("turnstile_requests_total", outcome="refused") >= refused + 2
            )
        assert [each.result(90) for each in said] == expected


# B87 ---------------------------------------------------------------------------------------------


def test_b87_a_stream_that_waits_is_not_silent(single: ServerProcess) -> None:
    with occupied(single, 1):
        raw = Raw(single, "/v1/completions", prompt="abc", max_tokens=4, stream=True)
        head = raw.until(b"\r\n\r\n").lower()  # sent when it is accepted, not at the first token
        assert head.startswith(b"http/1.1 200")
        assert b"content-type: text/event-stream" in head
        assert b"cache-control: no-cache" in head
        assert b"x-accel-buffering: no" in head
        while raw.received.count(b": keep-alive\n\n") < 2:
            raw.received += raw.socket.recv(65536)
        assert b"data:" not in raw.received
        # The refusals beside it are still refusals.
        bad = single.post("/v1/completions", prompt="", stream=True)
        assert bad.status_code == 400
    raw.until(b"data: [DONE]\n\n")
    raw.close()


def test_b87_the_official_client_does_not_see_the_comments(single: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{single.url}/v1", api_key="none", max_retries=0) as client:
        name = client.models.list().data[0].id
        with occupied(single, 1) as (holder,):
            stream = client.completions.create(
                model=name, prompt="abc", max_tokens=4, temperature=0, stream=True
            )
            time.sleep(1.2)
            holder.reset()
            said = "".join(chunk.choices[0].text for chunk in stream)
    assert said == text(single.complete("abc", temperature=0, max_tokens=4))


# B85 ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def seven(server: ServerProcess) -> Iterator[list[Any]]:
    """Six streams and an answer that is not streamed, five of them in their slots and far from
    their ends, two in the queue; when the block has ended, their events (or the whole answer) are
    in the list.
    """
    results: list[Any] = [None] * 7
    body = {"max_tokens": 700, "temperature": 1.0, "ignore_eos": True}

    def stream(k: int) -> None:
        prompt = server.tokens(20, seed=k)
        results[k] = list(server.stream("/v1/completions", prompt=prompt, **body, seed=k))

    def whole() -> None:
        results[6] = server.post(
            "/v1/completions", prompt=server.tokens(20, seed=6), **body, seed=6
        )

    threads = [threading.Thread(target=stream, args=(k,)) for k in range(6)]
    threads.append(threading.Thread(target=whole))
    with slowed(server):
        for thread in threads:
            thread.start()
        until(lambda: server.metric("turnstile_requests_running") == 1 + 5)
        until(lambda: server.metric("turnstile_requests_waiting") == 2)
        yield results
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a client hangs"


def test_b85_when_the_engine_dies_all_seven_end_right(tiny: Path) -> None:
    settings = flags(pages=400, ctx=1024, seqs=6)
    with ServerProcess(tiny, env=FAULTS, **settings) as server:
        with seven(server) as undisturbed:
            pass
        expected = [text_of(events) for events in undisturbed[:6]]
        with seven(server) as results:
            os.kill(server.engine_pid, signal.SIGKILL)
        for events in results[:6]:
            assert not any("error" in event for event in events)
        assert [text_of(events) for events in results[:6]] == expected
        assert results[6].json()["choices"] == undisturbed[6].json()["choices"]
        assert server.metric("turnstile_engine_starts_total") == 2
        server.check()


def test_b85_when_it_cannot_come_back_all_seven_are_told(tiny: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny, tmp_path / "model")
    settings = flags(pages=400, ctx=1024, seqs=6, max_restarts=1)
    with ServerProcess(model, env=FAULTS, **settings) as server:
        with seven(server) as results:
            (model / "model.safetensors").unlink()
            os.kill(server.engine_pid, signal.SIGKILL)
        for events in results[:6]:
            assert "error" in events[-1]
            reasons = [c["finish_reason"] for e in events[:-1] for c in e["choices"]]
            assert not any(reasons), "an answer that was cut off must not look complete"
        assert results[6].status_code == 500
        assert "error" in results[6].json()
        assert server.wait() == 1


# B93 ---------------------------------------------------------------------------------------------


def test_b93_after_a_kill_nothing_is_left_and_the_next_server_serves_on(tiny: Path) -> None:
    settings = flags(pages=64, seqs=8, port=free_port())
    with ServerProcess(tiny, **settings) as server:
        process = psutil.Process(server.process.pid)
        streams = [Raw(server, "/v1/completions", prompt=[70], max_tokens=200, stream=True, **BASE)
                   for _ in range(8)]  # fmt: skip
        streams[0].until(b"data: ")
        children = process.children(recursive=True)
        assert children
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        gone = time.monotonic() + PATIENCE
        while any(c.is_running() and c.status() != psutil.STATUS_ZOMBIE for c in children):
            assert time.monotonic() < gone, "a child outlives the server"
            time.sleep(0.02)
        for stream in streams:
            stream.close()
    with ServerProcess(tiny, **settings) as server:

        def one(k: int) -> int:
            return server.complete(server.tokens(4 + k % 20, seed=k), max_tokens=2)[0]

        for first in range(0, 300, 30):
            calls = [lambda k=k: one(k) for k in range(first, first + 30)]
            assert set(server.gather(calls)) == {200}
        server.check()
