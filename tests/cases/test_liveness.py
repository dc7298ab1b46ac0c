"""Cases about health, readiness and logs: B83, B89, and what an operator's probes live on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import ServerProcess, text_of, until
from e2e.raw import FAULTS, slowed
from e2e.test_process import scripted
from server.conftest import serve, tokenizer  # noqa: F401 - fixtures
from server.fake_engine import Failure
from server.served import Serve
from turnstile.engine.client import EngineState
from turnstile.server.service import Phase

ANSWERS_IN = 5.0
"""Seconds within which a probe must answer on a busy machine: far above what it takes, far below
what gets a server killed."""


# -- what the probes say ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "state", "healthy", "expected"),
    [
        # livez, health, readyz
        (Phase.LOADING, EngineState.LOADING, False, (200, 503, 503)),
        (Phase.READY, EngineState.READY, True, (200, 200, 200)),
        (Phase.READY, EngineState.READY, False, (200, 503, 503)),  # work waits, and no step ends
        (Phase.READY, EngineState.RECOVERING, False, (200, 503, 503)),
        (Phase.READY, EngineState.DEAD, False, (503, 503, 503)),
        (Phase.DRAINING, EngineState.READY, True, (200, 200, 503)),
        (Phase.DRAINING, EngineState.DRAINING, True, (200, 200, 503)),
        (Phase.FAILED, EngineState.DEAD, False, (503, 503, 503)),
    ],
)
def test_probes_say_what_an_orchestrator_should_do(
    serve: Serve,  # noqa: F811
    phase: Phase,
    state: EngineState,
    healthy: bool,
    expected: tuple[int, int, int],
) -> None:
    async def test() -> None:
        async with serve() as served:
            served.service.phase = phase
            served.engine.state, served.engine.alive = state, healthy
            paths = ("/livez", "/health", "/readyz")
            answers = [await served.client.get(path) for path in paths]
            assert tuple(answer.status_code for answer in answers) == expected
            for answer in answers:
                assert answer.json()["status"]
            asked = await served.complete(max_tokens=1)
            assert (asked.status_code == 200) == (
                phase is Phase.READY and state is EngineState.READY
            )
            if asked.status_code != 200:
                assert asked.status_code == 503
                assert asked.json()["error"]["code"] in (
                    "model_loading", "engine_recovering", "shutting_down", "engine_dead",
                )  # fmt: skip

    asyncio.run(test())


# -- with the real engine ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[ServerProcess]:
    settings: dict[str, Any] = {"num_pages": 128, "max_num_seqs": 8, "step_timeout": 2.0}
    with ServerProcess(tiny, env=FAULTS, **settings) as running:
        yield running
        running.check()


class Probe:
    """Asks a path again and again, on a thread of its own."""

    def __init__(self, server: ServerProcess, path: str = "/health") -> None:
        self._server, self._path = server, path
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.answers: list[tuple[int, float]] = []

    def __enter__(self) -> Probe:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            began = time.monotonic()
            status = self._server.http.get(self._path).status_code
            self.answers.append((status, time.monotonic() - began))
            if self._done.wait(0.02):
                return


@pytest.mark.e2e
def test_b89_the_first_request_may_come_late(server: ServerProcess) -> None:
    time.sleep(2.2)  # longer than a step may take, were there one
    assert server.complete([5] * 20, max_tokens=3)[0] == 200


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["a prompt of 10 MB", "a chat of 20,000 messages"])
def test_b83_probes_and_streams_go_on_while_a_giant_is_read(
    server: ServerProcess, kind: str
) -> None:
    stream = server.stream("/v1/completions", prompt=[5] * 20, max_tokens=1500, ignore_eos=True)
    events = [next(stream)]
    with Probe(server) as probe:
        if kind.startswith("a prompt"):
            giant = server.post("/v1/completions", prompt="word " * 2_000_000, max_tokens=1)
        else:
            messages = [
                {"role": ("user", "assistant")[k % 2], "content": "hi there"} for k in range(20_001)
            ]
            giant = server.post("/v1/chat/completions", messages=messages, max_tokens=1)
        events += [next(stream) for _ in range(20)]
    assert giant.status_code == 400
    assert giant.json()["error"]["code"] == "context_length_exceeded"
    assert probe.answers
    assert {status for status, _ in probe.answers} == {200}
    assert max(seconds for _, seconds in probe.answers) < ANSWERS_IN
    stream.close()  # type: ignore[attr-defined]


@pytest.mark.e2e
def test_a_step_that_does_not_end_shows_at_the_probes_and_the_stream_goes_on(
    server: ServerProcess,
) -> None:
    body: dict[str, Any] = {"prompt": [7] * 20, "max_tokens": 1900, "ignore_eos": True, "seed": 3}
    alone = text_of(list(server.stream("/v1/completions", **body)))
    engine = server.engine_pid
    with slowed(server):
        stream = server.stream("/v1/completions", **body)
        events = [next(stream)]
        os.kill(engine, signal.SIGSTOP)  # alive to the kernel, and no step ends
    with Probe(server) as health, Probe(server, "/readyz") as ready:
        events += list(stream)
    assert text_of(events) == alone
    assert 503 in {status for status, _ in health.answers}
    assert 503 in {status for status, _ in ready.answers}
    assert server.http.get("/livez").status_code == 200
    assert server.http.get("/health").status_code == 200
    listed = server.http.get("/v1/requests?state=ended&limit=1").json()["data"][0]
    assert listed["crashes"] == 1
    assert listed["time"]["recovery"] > 1
    assert listed["time"]["recompute"] > 0
    assert sum(listed["time"].values()) == pytest.approx(listed["age_seconds"], abs=1e-3)
    assert server.metric("turnstile_engine_restarts_total") == 1
    assert server.metric("turnstile_engine_epoch") == 2
    assert server.metric("turnstile_recovered_requests_total") == 1


@pytest.mark.e2e
def test_a_signal_to_the_whole_group_drains_too(tiny: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    with ServerProcess(tiny, num_pages=128, canary=False, trace=trace) as running:
        stream = running.stream("/v1/completions", prompt=[5] * 9, max_tokens=300, ignore_eos=True)
        events = [next(stream)]
        os.killpg(running.process.pid, signal.SIGTERM)
        events += list(stream)
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert running.wait() == 0
        assert "Traceback" not in running.log
    told = json.loads(trace.read_text())
    assert sum(e["args"]["draws"] for e in told if e["ph"] == "X") == 300
    assert {"prefill", "decode"} <= {e["name"] for e in told if e["ph"] == "e"}


# -- the process, with a scripted engine ------------------------------------------------------


@pytest.mark.e2e
def test_a_third_signal_leaves_at_once(tiny: Path) -> None:
    with scripted(tiny, env={"TEST_DELAY": "0.05", "TEST_STOP": "600"}, canary=False) as running:
        stream = running.stream("/v1/completions", prompt="hi", max_tokens=200)
        next(stream)

        def gone() -> bool:
            running.signal(signal.SIGTERM)  # signals that come too close together are one
            time.sleep(0.1)
            return running.process.poll() is not None

        until(gone, "it obeys no signal")
        assert running.wait() == 130
        stream.close()  # type: ignore[attr-defined]


@pytest.mark.e2e
def test_after_a_kill_the_trace_can_be_read(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with scripted(tiny, env={"TEST_DELAY": "0.001"}, trace=path) as running:
        for _ in range(5):
            assert running.complete("hi", max_tokens=50)[0] == 200
        until(lambda: "decode" in path.read_text(), "nothing is written")
        running.signal(signal.SIGKILL)
        running.wait()
        told = json.loads(path.read_text())
    assert any(event["ph"] == "X" for event in told)


# -- logs -------------------------------------------------------------------------------------

SECRET = "Sesame-4711"


async def _use_everything(served: Any) -> None:
    """Every route that takes text, and every way for it to go wrong."""
    await served.complete(f"{SECRET} one", max_tokens=3, stop=[SECRET], user=SECRET)
    await served.chat(f"{SECRET} two", max_tokens=3)
    await served.complete(f"{SECRET} three", max_tokens=3, stream=True)
    await served.complete(f"{SECRET} " * 1000, max_tokens=3)
    await served.complete([SECRET], unheard_of=SECRET)
    await served.complete(f"{SECRET}", temperature=SECRET)
    await served.complete(f"{SECRET}", model=SECRET)
    await served.complete("x", response_format={"type": SECRET})
    await served.chat("hi", messages=[{"role": SECRET, "content": SECRET}])
    await served.post("/tokenize", prompt=SECRET)
    await served.client.post("/v1/completions", content=f'{{"prompt": "{SECRET}",')
    served.engine.failures[len(served.engine.streams)] = Failure("NaN")
    await served.complete(f"{SECRET} four", max_tokens=3)


@pytest.mark.e2e
def test_the_engine_process_logs_in_the_form_that_was_asked_for(tiny: Path) -> None:
    with ServerProcess(tiny, num_pages=64, log_format="json", log_level="debug") as running:
        running.complete([5] * 20, max_tokens=3)
        lines = [json.loads(line) for line in running.log.splitlines()]
    assert {line.get("process") for line in lines} == {None, "engine"}
    assert all(line["time"] and line["level"] and line["message"] for line in lines)


def test_prompts_are_in_no_log_line_whatever_happens(
    serve: Serve,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        async with serve(SECRET) as served:
            caplog.set_level("DEBUG")
            await _use_everything(served)

    asyncio.run(test())
    assert len([record for record in caplog.records if record.name == "turnstile.access"]) > 10
    for record in caplog.records:
        assert SECRET not in record.getMessage()
        assert SECRET not in str(record.exc_info)
        fields = getattr(record, "fields", {})
        assert SECRET not in str(fields)


def test_prompts_are_logged_where_that_is_asked_for_and_no_longer_than_asked(
    serve: Serve,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        async with serve(config={"log_prompts": len(SECRET)}) as served:
            caplog.set_level("INFO")
            await served.complete(f"{SECRET} and the rest", max_tokens=1)
            await served.complete([[70, 71], [72]], max_tokens=1)

    asyncio.run(test())
    lines = [record.fields for record in caplog.records if hasattr(record, "fields")]
    assert lines[0]["prompts"] == [SECRET]
    assert lines[1]["prompts"] == ["[70, 71]", "[72]"]
