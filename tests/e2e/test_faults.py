"""What an engine can suffer, over HTTP: who is told, what, and how everybody else goes on.

The faults are asked for by prompts, which only an operator can allow (TURNSTILE_FAULTS=1).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.following import Followed, Order, follow, until
from e2e.harness import FAKED, ServerProcess, text_of
from e2e.harness import until as wait_until
from turnstile.engine.faults import Fault, fault_prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

FAULTS = {"TURNSTILE_FAULTS": "1"}
SMALL: dict[str, Any] = {
    "num_pages": 256, "max_num_seqs": 16, "max_num_batched_tokens": 64, "log_stats_interval": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tiny, command=FAKED, env=FAULTS, step_timeout=1, **SMALL) as running:
        yield running


def prompt(number: int, count: int = 20) -> list[int]:
    return [20 + number % 200] * 3 + list(range(100, 97 + count))


def crowd(count: int = 8, tokens: int = 60) -> list[Order]:
    """Greedy and seeded, streams and bodies, one sample and two."""
    common = {"max_tokens": tokens, "ignore_eos": True}
    return [
        Order(
            f"other {k}",
            "/v1/completions",
            {"prompt": prompt(k), "temperature": k % 2, "seed": k, "n": 1 + k % 3 // 2, **common},
            stream=k % 4 != 3,
        )
        for k in range(count)
    ]


def faulty(fault: Fault, *, stream: bool, at: int = 3) -> Order:
    body = {"prompt": fault_prompt(fault, at, 50, 51), "max_tokens": 20, "ignore_eos": True}
    return Order(fault.name, "/v1/completions", body, stream=stream)


def assert_failed_alone(followed: list[Followed], expected: list[Followed], words: str) -> None:
    """The last one failed with an error that says why; the others have their undisturbed answer."""
    *others, failed = followed
    for other, alone in zip(others, expected, strict=True):
        assert other.answer == alone.answer, other.order.name
    assert [words in error["message"] for error in failed.errors] == [True], failed.errors
    assert failed.errors[0]["type"] == "server_error"
    assert failed.errors[0]["code"] == "internal_error"
    assert failed.finish == [None]
    assert (failed.status, failed.done) == ((200, 1) if failed.order.stream else (500, 0))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault.EXIT, "ended the engine each time"),
        (Fault.CORRUPT, "left the books of the engine wrong"),
        (Fault.ERROR, "row fails"),
        (Fault.RAISE, "failed in the model"),
    ],
)
def test_a_request_that_fails_its_step_fails_alone(
    server: ServerProcess, fault: Fault, words: str, stream: bool
) -> None:
    expected = asyncio.run(follow(server.url, crowd()))
    followed = asyncio.run(follow(server.url, [*crowd(), faulty(fault, stream=stream)]))
    assert_failed_alone(followed, expected, words)
    server.idle()
    assert server.metric("turnstile_pages", state="held") == 0


def test_a_hung_step_is_ended_by_the_watchdog_and_only_its_request_fails(
    server: ServerProcess,
) -> None:
    expected = asyncio.run(follow(server.url, crowd(4)))
    followed = asyncio.run(follow(server.url, [*crowd(4), faulty(Fault.HANG, stream=True)]))
    assert_failed_alone(followed, expected, "ended the engine each time")
    assert "No step has ended" in server.log


def test_two_that_kill_are_both_found(server: ServerProcess) -> None:
    expected = asyncio.run(follow(server.url, crowd(6)))
    killers = [faulty(Fault.EXIT, stream=True, at=0), faulty(Fault.EXIT, stream=True, at=7)]
    followed = asyncio.run(follow(server.url, [*crowd(6), *killers]))
    for killer in followed[6:]:
        assert "ended the engine each time" in killer.errors[0]["message"]
    assert [f.answer for f in followed[:6]] == [f.answer for f in expected]


def test_no_client_can_ask_for_a_fault_where_the_operator_did_not_allow_it(tiny: Path) -> None:
    with ServerProcess(tiny, env={"TURNSTILE_FAULTS": ""}, **SMALL) as server:
        headers = {"turnstile-faults": "1", "x-turnstile-faults": "1"}
        for fault in Fault:
            body = {**faulty(fault, stream=False).body, "faults": True, "TURNSTILE_FAULTS": "1"}
            answer = server.http.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200
            assert answer.json()["usage"]["completion_tokens"] == 20
        server.check()
        assert server.metric("turnstile_engine_restarts_total") == 0


# B85: an engine that cannot come back ends what runs with errors, and then the process.
def test_an_engine_that_cannot_be_restarted_tells_everybody_and_leaves(
    tiny: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny, tmp_path / "model")
    with ServerProcess(model, env=FAULTS, max_restarts=5, **SMALL) as server:
        slow = {"prompt": fault_prompt(Fault.SLOW), "max_tokens": 1000, "ignore_eos": True}
        orders = [
            Order("stream", "/v1/completions", slow),
            Order("pair", "/v1/completions", {**slow, "n": 2}),
            Order("body", "/v1/completions", slow, stream=False),
        ]
        refusals: list[httpx.Response] = []

        async def meanwhile(followed: list[Followed]) -> None:
            await until(lambda: min(followed[0].chunks + followed[1].chunks) > 2, "it does not run")
            (model / "model.safetensors").unlink()
            os.kill(server.engine_pid, signal.SIGKILL)

            def refused() -> bool:
                answer = server.post("/v1/completions", prompt="x", max_tokens=1, timeout=5)
                if answer.status_code == 503:
                    refusals.append(answer)
                return bool(refusals)

            await until(lambda: server.http.get("/readyz").status_code == 503, "it is ready")
            await asyncio.to_thread(lambda: wait_until(refused, "nobody is refused"))

        followed = asyncio.run(follow(server.url, orders, meanwhile))
        for each in followed:
            assert "cannot be restarted" in each.errors[0]["message"]
            assert each.finish == [None] * each.order.n  # never "stop"
            assert each.done == each.order.stream
            assert each.status == (200 if each.order.stream else 500)
        assert refusals[0].json()["error"]["code"] in ("engine_recovering", "engine_dead")
        assert int(refusals[0].headers["retry-after"]) >= 1
        assert server.wait() == 1
        assert "Traceback" not in server.log


@pytest.mark.parametrize(("signals", "code", "reason"), [(1, 0, "length"), (2, 130, "abort")])
def test_signals_are_obeyed_while_the_engine_is_down(
    tiny: Path, tmp_path: Path, signals: int, code: int, reason: str
) -> None:
    hold = tmp_path / "no engine is started while this file is there"
    env = FAULTS | {"TEST_HOLD": str(hold)}
    with ServerProcess(tiny, command=FAKED, env=env, canary=False, **SMALL) as server:
        body = {"prompt": fault_prompt(Fault.SLOW), "max_tokens": 60, "ignore_eos": True}
        stream = server.stream("/v1/completions", **body)
        events = [next(stream)]
        hold.touch()
        os.kill(server.engine_pid, signal.SIGKILL)
        wait_until(lambda: server.http.get("/readyz").json()["status"] == "recovering")
        server.signal(signal.SIGTERM)
        wait_until(lambda: server.http.get("/readyz").json()["status"] == "draining")
        if signals == 2:
            server.signal(signal.SIGTERM)
        else:
            hold.unlink()
        events += list(stream)
        assert events[-1]["choices"][0]["finish_reason"] == reason
        assert not any("error" in event for event in events)
        assert (len(text_of(events)) > 0) or reason == "abort"
        assert server.wait() == code
        assert "Traceback" not in server.log
