"""More than the server can hold: who is let in, and that everybody else gets in later."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from e2e.conftest import Launch
from e2e.harness import FAKED, PATIENCE, ServerProcess, until

pytestmark = pytest.mark.e2e

SLOTS, QUEUE, BURST = 2, 8, 50


async def burst(server: ServerProcess, engine: int) -> list[httpx.Response]:
    """All at once onto an engine that stands still until everybody has been answered or let in."""
    os.kill(engine, signal.SIGSTOP)
    try:
        async with httpx.AsyncClient(
            base_url=server.url, timeout=PATIENCE, limits=httpx.Limits(max_connections=None)
        ) as client:

            async def ask(seed: int) -> httpx.Response:
                prompt = server.tokens(10, seed=seed)
                body = {"prompt": prompt, "max_tokens": 5, "stream": seed % 2 == 0}
                return await client.post("/v1/completions", json=body)

            asked = [asyncio.create_task(ask(seed)) for seed in range(BURST)]
            end = time.monotonic() + PATIENCE
            while sum(task.done() for task in asked) < BURST - SLOTS - QUEUE:
                assert time.monotonic() < end, "nobody is refused"
                await asyncio.sleep(0.01)
            os.kill(engine, signal.SIGCONT)
            return list(await asyncio.gather(*asked))
    finally:
        os.kill(engine, signal.SIGCONT)


async def insist(server: ServerProcess) -> list[str | None]:
    """The same burst by OpenAI's client, which comes back when it is told to."""
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=20, timeout=PATIENCE
    ) as client:

        async def ask(seed: int) -> str | None:
            answer = await client.completions.create(
                model="tiny0", prompt=server.tokens(10, seed=seed), max_tokens=16,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            return answer.choices[0].finish_reason

        return await asyncio.gather(*(ask(seed) for seed in range(BURST)))


def test_a_burst_of_fifty_onto_a_queue_of_eight(launch: Launch) -> None:
    server = launch(
        command=FAKED, env={"TEST_STEP": "0.005"}, served_model_name="tiny0",
        num_pages=256, max_num_seqs=SLOTS, max_num_queued_reqs=QUEUE,
    )  # fmt: skip
    engine = server.engine_pid
    answers = asyncio.run(burst(server, engine))
    statuses = [answer.status_code for answer in answers]
    assert statuses.count(200) == SLOTS + QUEUE
    assert statuses.count(503) == BURST - SLOTS - QUEUE
    for answer in answers:
        if answer.status_code == 503:
            assert answer.json()["error"]["code"] == "engine_overloaded"
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            assert 1000 <= int(answer.headers["retry-after-ms"]) <= 60_000
            assert answer.headers["x-should-retry"] == "true"
    refused = server.metric("turnstile_rejections_total", reason="max_num_queued_reqs")
    assert refused == BURST - SLOTS - QUEUE

    # Both slots busy: a deadline passes in the queue; then those of them that run pass. Without a
    # deadline they would run for nine seconds.
    long = {"max_tokens": 1900, "ignore_eos": True}
    with ThreadPoolExecutor(SLOTS) as pool:
        busy = [
            pool.submit(server.complete, server.tokens(10, seed=k), **long, timeout=2.0)
            for k in range(SLOTS)
        ]
        running = "turnstile_requests_running"
        until(lambda: server.metric(running) == SLOTS, "they do not run")
        status, answer = server.complete(server.tokens(10, seed=9), timeout=0.05)
        assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
        for status, answer in (future.result() for future in busy):
            assert (status, answer["choices"][0]["finish_reason"]) == (200, "timeout")
            assert 0 < answer["usage"]["completion_tokens"] < 1900
    server.idle()

    assert asyncio.run(insist(server)) == ["length"] * BURST
    assert server.metric("turnstile_rejections_total", reason="max_num_queued_reqs") > refused
    assert server.metric("turnstile_gate_waiting") == 0
    server.check()
