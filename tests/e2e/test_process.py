"""The process around the server: starting, stopping, exit codes. The engine is a script."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from e2e.harness import PATIENCE, ROOT, SCRIPTED, ServerProcess, text_of, until

pytestmark = pytest.mark.e2e


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """A file: while it is there a scripted engine neither loads nor computes."""
    return tmp_path / "hold"


def scripted(model: Path, hold: Path | None = None, **settings: Any) -> ServerProcess:
    env = settings.pop("env", {}) | ({"TEST_HOLD": str(hold)} if hold else {})
    return ServerProcess(model, command=SCRIPTED, env=env, **settings)


def test_it_starts_serves_and_ends_with_code_0(tiny: Path) -> None:
    with scripted(tiny) as server:
        status, answer = server.complete("hi", max_tokens=3)
        assert status == 200
        assert answer["usage"]["completion_tokens"] == 3
        assert answer["model"] == tiny.name
        server.check()
        assert "Maximum concurrency for 256 tokens per request: 4.00x" in server.log
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert "Stopped." in server.log
        assert "Traceback" not in server.log


def test_while_it_loads_it_answers_503(tiny: Path, hold: Path) -> None:
    hold.touch()
    with scripted(tiny, hold, wait=False) as server:
        answer = server.post("/v1/completions", prompt="hi")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "model_loading"
        until(lambda: server.http.get("/health").json().get("stage") == "reading weights")
        assert server.http.get("/health").status_code == 503
        assert server.http.get("/livez").status_code == 200
        hold.unlink()
        until(lambda: server.http.get("/readyz").status_code == 200)
        assert server.complete("hi", max_tokens=1)[0] == 200


def test_sighup_reads_the_tenants_again_and_keeps_them_where_the_file_is_wrong(
    tiny: Path, tmp_path: Path
) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text('[tenants.a]\nkeys = ["one"]\n')
    with scripted(tiny, tenants=file, canary=False, wait=False) as server:

        def status(key: str) -> int:
            return server.http.get("/v1/models", headers={"x-api-key": key}).status_code

        def reload(text: str, said: str) -> None:
            file.write_text(text)
            server.signal(signal.SIGHUP)
            until(lambda: said in server.log, f"it does not say {said!r}")

        assert (status("one"), status("two")) == (200, 401)
        reload('[tenants.a]\nkeys = ["two"]\n', "read again")
        assert (status("one"), status("two")) == (401, 200)
        reload('[tenants.a]\nkeys = ["three"]\nweight = 0\n', "tenants.a.weight")
        assert (status("two"), status("three")) == (200, 401)
        assert "Traceback" not in server.log


def test_a_signal_while_loading_ends_it(tiny: Path, hold: Path) -> None:
    hold.touch()
    with scripted(tiny, hold, wait=False) as server:
        assert server.http.get("/livez").status_code == 200  # its signal handlers are in place
        server.signal(signal.SIGINT)
        assert server.wait() == 0


def test_an_engine_that_cannot_start_is_one_line_and_code_1(tiny: Path) -> None:
    with scripted(tiny, env={"TEST_START": "fail"}, wait=False) as server:
        assert server.wait() == 1
        assert "The weights are damaged" in server.log
        assert "Traceback" not in server.log


# B85: an engine that is gone for good ends its streams with an error, and the process.
def test_an_engine_that_dies_for_good_ends_the_process_with_code_1(tiny: Path) -> None:
    with scripted(tiny, env={"TEST_DELAY": "0.05"}, canary=False) as server:
        stream = server.stream("/v1/completions", prompt="hi", max_tokens=200)
        events = [next(stream)]
        server.signal(signal.SIGUSR1)
        events += list(stream)
        assert events[-1]["error"]["message"] == "The engine has died."
        assert not any(c["finish_reason"] for e in events[:-1] for c in e["choices"])
        assert server.wait() == 1


def test_an_engine_that_dies_for_good_while_draining_is_code_1_too(tiny: Path) -> None:
    with scripted(tiny, env={"TEST_DELAY": "0.05"}, canary=False) as server:
        stream = server.stream("/v1/completions", prompt="hi", max_tokens=200)
        first = next(stream)
        server.signal(signal.SIGTERM)
        until(lambda: server.http.get("/readyz").status_code != 200, "it does not drain")
        server.signal(signal.SIGUSR1)
        events = [first, *stream]
        assert "error" in events[-1]
        assert server.wait() == 1


@pytest.mark.parametrize(("signals", "code", "reason"), [(1, 0, "length"), (2, 130, "abort")])
def test_signals_drain_then_abort(
    tiny: Path, hold: Path, signals: int, code: int, reason: str
) -> None:
    with scripted(tiny, hold, canary=False) as server, ThreadPoolExecutor(1) as client:
        hold.touch()
        stream = server.stream("/v1/completions", prompt="hi", max_tokens=100)
        asked = client.submit(list, stream)
        until(lambda: server.metric("turnstile_requests_in_flight") == 1)
        server.signal(signal.SIGINT)
        until(lambda: server.http.get("/readyz").status_code != 200, "it does not drain")
        late = server.post("/v1/completions", prompt="hi")
        assert late.status_code == 503
        assert late.json()["error"]["code"] == "shutting_down"
        assert late.headers["connection"] == "close"
        if signals == 2:
            server.signal(signal.SIGINT)
        else:
            hold.unlink()
        events = asked.result()
        assert events[-1]["choices"][0]["finish_reason"] == reason
        assert (len(text_of(events)) == 100) == (signals == 1)
        assert server.wait() == code


def test_the_shutdown_timeout_bounds_the_drain(tiny: Path) -> None:
    env = {"TEST_DELAY": "0.5"}
    with scripted(tiny, env=env, canary=False, shutdown_timeout=0.5) as server:
        stream = server.stream("/v1/completions", prompt="hi", max_tokens=200)
        first = next(stream)
        server.signal(signal.SIGTERM)
        events = [first, *stream]
        assert events[-1]["choices"][0]["finish_reason"] == "abort"
        assert server.wait() == 0


def test_a_unix_socket_serves_and_is_taken_away(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    for _ in range(2):  # the second start finds no stale socket, or removes it
        with scripted(tiny, uds=path, port=None) as server:
            assert server.complete("hi", max_tokens=1)[0] == 200
            server.signal(signal.SIGTERM)
            assert server.wait() == 0
        assert not path.exists()
    with scripted(tiny, uds=path, port=None) as server:
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
    assert path.exists()
    with scripted(tiny, uds=path, port=None) as server:
        assert server.complete("hi", max_tokens=1)[0] == 200


def test_requests_leave_no_descriptors_and_no_tasks_behind(tiny: Path) -> None:
    with scripted(tiny) as server:
        process = psutil.Process(server.process.pid)
        server.check()
        before = process.num_fds()

        def one(number: int) -> int:
            if number % 3 == 0:
                stream = server.stream("/v1/completions", prompt="hi", max_tokens=50)
                next(stream)
                stream.close()  # type: ignore[attr-defined]
                return 200
            return server.complete("hi", max_tokens=1 + number % 20)[0]

        for _ in range(5):
            assert set(server.gather([lambda k=k: one(k) for k in range(30)])) == {200}
        server.reconnect()
        server.check()
        until(lambda: process.num_fds() <= before + 1, "descriptors are left behind")


def test_json_logs_have_one_object_a_line(tiny: Path) -> None:
    with scripted(tiny, log_format="json") as server:
        server.http.post(
            "/v1/completions",
            json={"prompt": "a secret", "max_tokens": 2},
            headers={"x-request-id": "mine"},
        )
        server.signal(signal.SIGTERM)
        server.wait()
        lines = [json.loads(line) for line in server.log.splitlines()]
        mine = [line for line in lines if line.get("request_id") == "mine"]
        assert mine[0]["status"] == 200
        assert mine[0]["completion_tokens"] == 2
        assert "secret" not in server.log


def test_chat_and_complete_print_what_the_server_says(tiny: Path) -> None:
    def turnstile(*arguments: str, text: str = "") -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "turnstile", *arguments, "--url", server.url],
            input=text, capture_output=True, text=True, timeout=PATIENCE,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "TURNSTILE_API_KEY": "k"},
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    with scripted(tiny, api_key="k") as server:
        said = server.complete("hi", max_tokens=26)[1]["choices"][0]["text"]
        assert turnstile("complete", "hi", "--max-tokens", "26") == (0, said + "\n", "")
        assert turnstile("complete", text="hi") == (0, (said * 5)[:128] + "\n", "")
        assert turnstile("chat", "hi", "--max-tokens", "26") == (0, said + "\n", "")
        turns = "hi\n/undo\nagain\n/reset\n\nhi\n/quit\nnever\n"
        code, out, error = turnstile("chat", "--max-tokens", "26", text=turns)
        assert (code, out, error) == (0, (said + "\n") * 3, "")
        code, out, error = turnstile("complete", "x", "--model", "other")
        assert code == 1
        assert "other" in error
        assert error.count("\n") == 1
        server.signal(signal.SIGTERM)
