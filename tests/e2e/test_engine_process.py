"""The server and its engine process together: bad models, small pools, deaths of the parent."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest

from e2e.conftest import Launch
from e2e.harness import PATIENCE, ServerProcess, text_of
from e2e.pool import Srv
from e2e.raw import FAULTS, slowed

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("damage", ["cut", "empty", "missing", "not a model"])
def test_a_damaged_model_is_one_line_and_exit_code_1(
    tiny: Path, tmp_path: Path, damage: str
) -> None:
    model = shutil.copytree(tiny, tmp_path / "model")
    weights = model / "model.safetensors"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "empty":
        weights.write_bytes(b"")
    elif damage == "missing":
        weights.unlink()
    else:
        (model / "config.json").write_text('{"architectures": ["Unheard"]}')
    server = ServerProcess(model, wait=False)
    try:
        assert server.wait() == 1
        lines = [line for line in server.log.splitlines() if "Listening" not in line]
        assert "Traceback" not in server.log
        assert len(lines) == 1, lines
        assert len(lines[0]) > 20
    finally:
        server.kill()


# B01: what never fits is refused, and nobody waits behind it.
def test_a_request_larger_than_the_pool_is_refused_at_once(srv: Srv) -> None:
    server = srv(pages=20, ctx=2048, seqs=4)
    limit = server.http.get("/v1/models").json()["data"][0]["max_model_len"]
    status, answer = server.complete(server.tokens(600, seed=1), max_tokens=4)
    assert status == 400
    assert str(min(limit, 320)) in answer["error"]["message"]
    assert server.complete(server.tokens(20, seed=2), max_tokens=4)[0] == 200
    assert server.metric("turnstile_requests_waiting") == 0


# B07, B15: a pool too small for all makes them take turns, not mistakes.
def test_preempted_requests_end_with_the_text_they_would_have_had(srv: Srv) -> None:
    server = srv(pages=12, chunk=64)
    body = {"max_tokens": 60, "ignore_eos": True, "temperature": 1.0}
    prompts = [server.tokens(60, seed=k) for k in range(8)]
    alone = [
        server.complete(prompt, **body, seed=k)[1]["choices"][0]["text"]
        for k, prompt in enumerate(prompts)
    ]
    calls = [
        lambda k=k: text_of(
            list(server.stream("/v1/completions", prompt=prompts[k], **body, seed=k))
        )
        for k in range(8)
    ]
    assert server.together(calls) == alone


# B93: nobody outlives the server.
def test_the_engine_dies_with_the_server(tiny: Path) -> None:
    with ServerProcess(tiny) as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert children
        os.kill(server.process.pid, signal.SIGKILL)
        end = time.monotonic() + PATIENCE
        while any(child.is_running() and child.status() != "zombie" for child in children):
            assert time.monotonic() < end, "the engine is an orphan"
            time.sleep(0.05)


def test_streams_survive_the_death_of_the_engine(launch: Launch) -> None:
    server = launch(num_pages=128, max_num_seqs=8, max_num_batched_tokens=64, env=FAULTS)
    body = {"max_tokens": 400, "ignore_eos": True, "temperature": 1.0}
    prompts = [server.tokens(30, seed=k) for k in range(4)]
    alone = [
        server.complete(prompt, **body, seed=k)[1]["choices"][0]["text"]
        for k, prompt in enumerate(prompts)
    ]
    streams = [
        server.stream("/v1/completions", prompt=prompt, **body, seed=k)
        for k, prompt in enumerate(prompts)
    ]
    pid = server.engine_pid
    with slowed(server):
        first = [next(stream) for stream in streams]
        os.kill(pid, signal.SIGKILL)
    rest = server.gather([lambda s=stream: list(s) for stream in streams])
    for k in range(4):
        events = [first[k], *rest[k]]
        assert not any("error" in event for event in events)
        assert text_of(events) == alone[k]
    assert server.metric("turnstile_engine_starts_total") == 2
    assert server.engine_pid != pid
