from __future__ import annotations

import asyncio
import threading

import pytest

from engine.answers import ask, collect, config, expected, generation
from turnstile.engine.client import DuplicateRequestError, EngineState, EngineUnavailableError
from turnstile.engine.local import LocalEngine


@pytest.fixture(autouse=True)
def _faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNSTILE_FAULTS", "1")


async def test_an_engine_in_a_thread_answers_as_one_in_a_process_does() -> None:
    engine = LocalEngine(config())
    info = await engine.start()
    assert info.architecture == "fake"
    requests = [generation(f"r{k}", [k + 1] * 5, 12, n=1 + k % 3) for k in range(8)]
    answers = await asyncio.gather(*(ask(engine, request) for request in requests))
    for request, answer in zip(requests, answers, strict=True):
        assert answer.tokens == expected(request)
    assert engine.healthy
    await engine.stop(0)
    assert "engine" not in [thread.name for thread in threading.enumerate()]


async def test_cancelling_frees_the_pages_and_stopping_aborts_the_rest() -> None:
    engine = LocalEngine(config(0.005))
    await engine.start()
    gone = engine.submit(generation("gone", [1], 4000))
    stays = engine.submit(generation("stays", [2], 4000))
    await anext(aiter(gone))
    gone.cancel()
    while engine.snapshot.running != 1:
        await asyncio.sleep(0.005)
    reading = asyncio.create_task(collect(stays))
    await engine.stop(0)
    assert (await reading).finish == ["abort"]
    assert engine.state is EngineState.DEAD


async def test_an_engine_that_cannot_load_says_why() -> None:
    engine = LocalEngine(config(num_pages=4, max_model_len=100_000))
    with pytest.raises(EngineUnavailableError, match="max-model-len"):
        await engine.start()
    await engine.stop(0)


async def test_an_id_used_twice_is_refused_and_nobody_else_notices() -> None:
    engine = LocalEngine(config(0.002))
    await engine.start()
    other = asyncio.create_task(ask(engine, generation("other", [3], 60)))
    stream = engine.submit(generation("twice", [1], 4000, n=2))
    await anext(aiter(stream))
    with pytest.raises(DuplicateRequestError, match="running already"):
        engine.submit(generation("twice", [2], 5))
    stream.cancel()
    # Rows of the one that was cancelled are on their way: they must not count for this one.
    with pytest.raises(DuplicateRequestError, match="was cancelled"):
        engine.submit(generation("twice", [2], 5))
    assert (await other).tokens == expected(generation("other", [3], 60))
    again = generation("other", [4], 5)
    assert (await ask(engine, again)).tokens == expected(again), "an id that ended is free again"
    assert engine.state is EngineState.READY
    await engine.stop(0)
