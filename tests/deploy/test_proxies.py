"""The proxy configurations in ``deploy/proxy``, tried with the proxies that are installed here.

Behind them stands the real server, its engine a process without a model.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from deploy.proxies import PROXIES, SILENCE, Proxy, configure, program
from e2e.harness import FAKED, PATIENCE, ServerProcess, free_port, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

SLOTS, QUEUE = 2, 1
KEY = "sk-plenty"
TENANTS = """
[tenants.plenty]
keys = ["sk-plenty"]
admin = true
[tenants.scarce]
keys = ["sk-scarce"]
requests_per_minute = 1
"""


def start(tiny: Path, directory: Path, **settings: Any) -> ServerProcess:
    file = directory / "tenants.toml"
    file.write_text(TENANTS)
    flags = {
        "num_pages": 512, "max_model_len": 2048, "max_num_seqs": SLOTS, "tenants": file,
        "max_num_queued_reqs": QUEUE, "max_queue_wait": 0, "sse_keep_alive_interval": 0.2,
        "log_stats_interval": 0, "log_format": "json",
    } | settings  # fmt: skip
    server = ServerProcess(
        tiny,
        command=FAKED,
        env={"TURNSTILE_FAULTS": "1", "TEST_STEP": "0.02"},
        canary=False,
        **flags,
    )
    server.headers = {"authorization": f"Bearer {KEY}"}
    return server


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    if not any(program(name) for name in PROXIES):
        pytest.skip("no proxy is installed here")
    with start(tiny, tmp_path_factory.mktemp("server")) as running:
        yield running


def proxies(
    name: str, server: ServerProcess, directory: Path, silence: int = 600
) -> Iterator[Proxy]:
    if program(name) is None:
        pytest.skip(f"{name} is not installed here")
    with Proxy(name, directory, server.url.removeprefix("http://"), silence) as running:
        yield running


@pytest.fixture(scope="module", params=PROXIES)
def proxy(
    request: pytest.FixtureRequest,
    server: ServerProcess,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Proxy]:
    yield from proxies(request.param, server, tmp_path_factory.mktemp(request.param))


@pytest.fixture(params=PROXIES)
def hasty(
    request: pytest.FixtureRequest, server: ServerProcess, tmp_path: Path
) -> Iterator[httpx.Client]:
    """A client of a proxy that has little patience with silence."""
    for proxy in proxies(request.param, server, tmp_path, SILENCE):
        with proxy.client(KEY) as speaking:
            yield speaking
    server.idle()


@pytest.fixture
def client(proxy: Proxy, server: ServerProcess) -> Iterator[httpx.Client]:
    server.idle()
    with proxy.client(KEY) as speaking:
        yield speaking
    server.idle()


def body(**fields: Any) -> dict[str, Any]:
    whole = {"prompt": [40] * 9, "max_tokens": 400, "ignore_eos": True, "stream": True} | fields
    return whole | ({"stream_options": {"include_usage": True}} if whole["stream"] else {})


def tokens(lines: list[str]) -> int:
    """The tokens of a stream that has come to its end, as its last event says."""
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return int(json.loads(events[-2])["usage"]["completion_tokens"])


def running(server: ServerProcess) -> float:
    return server.metric("turnstile_requests_running")


@pytest.mark.parametrize("name", PROXIES)
def test_the_proxy_takes_its_configuration(name: str, tmp_path: Path) -> None:
    binary = program(name)
    if binary is None:
        pytest.skip(f"{name} is not installed here")
    _, check = configure(name, tmp_path, free_port(), "127.0.0.1:8000")
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)}
    done = subprocess.run(
        [binary, *check], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "warn" not in said.lower().replace('"level":"warn"', ""), said


def test_tokens_pass_one_by_one_and_uncompressed(
    client: httpx.Client, server: ServerProcess
) -> None:
    headers = {"accept-encoding": "gzip, br, zstd"}
    with client.stream(
        "POST", "/v1/completions", json=body(max_tokens=150), headers=headers
    ) as answer:
        assert answer.status_code == 200
        assert "content-encoding" not in answer.headers
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        # The first has come while the last are still to be computed.
        assert running(server) == 1
        assert tokens(list(lines)) == 150


@pytest.mark.parametrize("state", ["streaming", "unstreamed", "queued"])
def test_a_client_that_leaves_frees_its_request(
    client: httpx.Client, server: ServerProcess, proxy: Proxy, state: str
) -> None:
    waiting = "turnstile_requests_waiting"
    with contextlib.ExitStack() as others:
        if state == "queued":
            for _ in range(SLOTS):
                ask = client.stream("POST", "/v1/completions", json=body(max_tokens=1900))
                others.enter_context(ask)
            until(lambda: running(server) == SLOTS, "the slots are not taken")
        aborted = server.metric("turnstile_requests_total", outcome="abort")
        guest = raw(proxy, body(stream=state == "streaming", max_tokens=1900))
        if state == "queued":
            until(lambda: server.metric(waiting) == 1, "nobody waits")
        else:
            until(lambda: running(server) == 1, "it does not run")
        guest.close()
        # Long before their ends, of which each is 38 s away.
        if state == "queued":
            until(lambda: server.metric(waiting) == 0, "it still waits", 20.0)
            assert running(server) == SLOTS
        else:
            until(lambda: running(server) == 0, "it still runs", 20.0)
        assert server.metric("turnstile_requests_total", outcome="abort") == aborted + 1


def raw(proxy: Proxy, content: dict[str, Any]) -> socket.socket:
    """A client that asks, and can leave without reading anything."""
    guest = socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE)
    if proxy.secure:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        guest = context.wrap_socket(guest, server_hostname="llm.example.org")
    payload = json.dumps(content).encode()
    guest.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: llm.example.org\r\n"
        b"Content-Type: application/json\r\nAuthorization: Bearer %b\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (KEY.encode(), len(payload), payload)
    )
    return guest


def test_a_stream_outlives_silence_longer_than_the_proxys_timeout(
    hasty: httpx.Client, server: ServerProcess
) -> None:
    with contextlib.ExitStack() as asking:
        with server.frozen():
            ask = hasty.stream("POST", "/v1/completions", json=body(max_tokens=10))
            lines = asking.enter_context(ask).iter_lines()
            time.sleep(SILENCE + 1.0)
        told = list(lines)
    assert ": keep-alive" in told
    assert tokens(told) == 10
    assert told[-2:] == ["data: [DONE]", ""] or told[-1] == "data: [DONE]"


def test_an_unstreamed_answer_that_takes_too_long_is_given_up_on_both_sides(
    hasty: httpx.Client, server: ServerProcess
) -> None:
    answer = hasty.post("/v1/completions", json=body(stream=False, max_tokens=1900))
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "proxy_timeout"
    assert answer.headers["x-should-retry"] == "false"
    until(lambda: running(server) == 0, "it is still computed for nobody")


def test_refusals_pass_with_all_they_say(client: httpx.Client, server: ServerProcess) -> None:
    scarce = {"authorization": "Bearer sk-scarce", "x-request-id": "mine"}
    whole = body(stream=False, max_tokens=1)
    until(
        lambda: client.post("/v1/completions", json=whole, headers=scarce).status_code == 429,
        "it is never refused",
    )
    answer = client.post("/v1/completions", json=whole, headers=scarce)
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    assert answer.headers["x-request-id"] == "mine"
    assert int(answer.headers["retry-after-ms"]) > 0
    assert int(answer.headers["retry-after"]) > 0
    assert answer.headers["x-ratelimit-limit-requests"] == "1"
    assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    wrong = client.post("/v1/completions", json=whole, headers={"authorization": "Bearer no"})
    assert wrong.status_code == 401
    assert wrong.json()["error"]["code"] == "invalid_api_key"
    assert wrong.headers["x-request-id"]


def test_a_full_queue_is_a_503_that_says_when_to_come_back(
    client: httpx.Client, server: ServerProcess
) -> None:
    with contextlib.ExitStack() as inside:
        for _ in range(SLOTS):
            ask = client.stream("POST", "/v1/completions", json=body(max_tokens=1900))
            inside.enter_context(ask)
        until(lambda: running(server) == SLOTS, "the slots are not taken")
        ask = client.stream("POST", "/v1/completions", json=body(max_tokens=1900))
        inside.enter_context(ask)
        answer = client.post("/v1/completions", json=body(max_tokens=1))
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_overloaded"
        assert int(answer.headers["retry-after"]) > 0
        assert answer.headers["x-should-retry"] == "true"


@pytest.mark.parametrize("counted", [True, False], ids=["length", "chunked"])
def test_a_body_over_the_limit_is_a_413_that_clients_can_read(
    client: httpx.Client, server: ServerProcess, counted: bool
) -> None:
    content = b'{"prompt": "' + b"a" * (17 << 20) + b'"}'
    headers = {"content-type": "application/json"}

    def pieces() -> Iterator[bytes]:
        for at in range(0, len(content), 1 << 16):
            yield content[at : at + (1 << 16)]

    answer = client.post(
        "/v1/completions", content=content if counted else pieces(), headers=headers
    )
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"
    assert client.get("/readyz").status_code == 200


def test_a_body_just_below_the_limit_reaches_the_server(client: httpx.Client) -> None:
    content = b'{"prompt": "' + b"a" * ((16 << 20) - 100) + b'"}'
    headers = {"content-type": "application/json"}
    answer = client.post("/v1/completions", content=content, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_connections_to_the_server_are_used_again(
    proxy: Proxy, client: httpx.Client, server: ServerProcess
) -> None:
    process = psutil.Process(server.process.pid)

    def connections() -> set[int]:
        return {
            each.raddr.port
            for each in process.net_connections("tcp4")
            if each.status == psutil.CONN_ESTABLISHED and each.raddr
        }

    seen: set[int] = set()
    before = connections()
    for _ in range(10):
        with proxy.client(KEY) as another:  # a new client connection each time
            assert another.get("/v1/models").status_code == 200
        seen |= connections() - before
    assert len(seen) <= 2, seen


def test_only_the_api_and_the_probe_can_be_reached(client: httpx.Client) -> None:
    assert client.get("/readyz").status_code == 200
    assert client.get("/v1/models").status_code == 200
    for path in ("/", "/metrics", "/docs", "/server_info", "/health", "/load"):
        assert client.get(path).status_code == 404, path
    assert client.post("/reset_prefix_cache").status_code == 404


def test_the_access_log_has_the_clients_address_and_not_one_it_made_up(
    client: httpx.Client, server: ServerProcess, proxy: Proxy
) -> None:
    transport = httpx.HTTPTransport(verify=False, local_address="127.0.0.7")
    headers = {**client.headers, "x-request-id": f"from-{proxy.port}", "x-forwarded-for": "1.2.3.4"}
    with httpx.Client(base_url=proxy.url, transport=transport, headers=headers) as guest:
        assert guest.get("/v1/models").status_code == 200
    until(lambda: f"from-{proxy.port}" in server.log, "it is not logged")
    line = next(line for line in server.log.splitlines() if f"from-{proxy.port}" in line)
    assert json.loads(line)["client"] == "127.0.0.7"


@pytest.mark.parametrize("name", PROXIES)
def test_a_server_that_drains_says_so_and_ends_its_streams(
    name: str, tiny: Path, tmp_path: Path
) -> None:
    if program(name) is None:
        pytest.skip(f"{name} is not installed here")
    with (
        start(tiny, tmp_path) as server,
        Proxy(name, tmp_path, server.url.removeprefix("http://")) as proxy,
        proxy.client(KEY) as client,
    ):
        with contextlib.ExitStack() as asking:
            with server.frozen():
                ask = client.stream("POST", "/v1/completions", json=body(max_tokens=20))
                lines = asking.enter_context(ask).iter_lines()
                server.signal(signal.SIGTERM)
                until(lambda: client.get("/readyz").status_code == 503, "it does not drain")
                late = client.post("/v1/completions", json=body())
                assert late.status_code == 503
                assert late.json()["error"]["code"] == "shutting_down"
                assert int(late.headers["retry-after"]) > 0
            assert tokens(list(lines)) == 20
        assert server.wait() == 0
        gone = client.post("/v1/completions", json=body())
        assert gone.status_code == 503
        assert gone.json()["error"]["code"] == "unreachable"
        assert int(gone.headers["retry-after"]) > 0
