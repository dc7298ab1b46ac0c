from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
import uvloop

import turnstile
from e2e.following import until
from engine.answers import Answer, ask, collect, config, expected, generation
from turnstile.core.admission import NeverFitsError
from turnstile.engine.client import EngineState, EngineUnavailableError, Generation
from turnstile.engine.config import EngineConfig
from turnstile.engine.faults import Fault, fault_prompt
from turnstile.engine.params import SamplingParams
from turnstile.engine.supervisor import ProcessEngine


@pytest.fixture(autouse=True)
def _faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNSTILE_FAULTS", "1")


class HeldEngine(ProcessEngine):
    """An engine whose epoch :attr:`hold` does not begin before a test lets it."""

    hold = 0

    async def _launch(self, pause: float) -> None:
        while self.epoch + 1 == self.hold:
            await asyncio.sleep(0.005)
        await super()._launch(pause)

    async def lose(self) -> None:
        """Kill the process; returns when that is known. There is none until :attr:`hold` is 0."""
        self.hold = self.epoch + 1
        os.kill(pid(self), signal.SIGKILL)
        await until(lambda: self.state is EngineState.RECOVERING)


@asynccontextmanager
async def running(settings: EngineConfig) -> AsyncIterator[HeldEngine]:
    engine = HeldEngine(settings)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop(0)


def pid(engine: ProcessEngine) -> int:
    assert engine.info is not None
    return engine.info.pid


def crowd(count: int, max_tokens: int = 40) -> list[Generation]:
    """Greedy and seeded, one and two samples, prompts shorter and longer than a page."""
    return [
        generation(
            f"r{k}", [k + 1] * (3 + k), max_tokens, n=1 + k % 2,
            params=SamplingParams(temperature=0.0 if k % 3 == 0 else 1.0),
        )
        for k in range(count)
    ]  # fmt: skip


async def test_streams_go_on_with_the_same_tokens_after_two_kills() -> None:
    requests = crowd(30)
    async with running(config(0.01)) as engine:
        answers = [Answer(request.n) for request in requests]
        tasks = [
            asyncio.create_task(collect(engine.submit(request), into=answer))
            for request, answer in zip(requests, answers, strict=True)
        ]
        for kill, least in enumerate((5, 20), start=1):
            await until(lambda least=least: min(len(a.tokens[0]) for a in answers[:30]) >= least)  # type: ignore[misc]
            await engine.lose()
            late = generation(f"late{kill}", [kill], 5)
            requests.append(late)
            answers.append(Answer(1))
            tasks.append(asyncio.create_task(collect(engine.submit(late), into=answers[-1])))
            engine.hold = 0
            await until(lambda: engine.state is EngineState.READY)
        await asyncio.gather(*tasks)
        assert engine.epoch == 3
    for request, answer in zip(requests, answers, strict=True):
        assert answer.tokens == expected(request)
        assert answer.finish == ["length"] * request.n
        # An output costs two; the prompt is paid once, by the first sample.
        assert answer.charged[0] >= 2 * request.max_tokens


async def test_a_request_that_kills_the_engine_each_time_fails_alone() -> None:
    requests = crowd(9)
    async with running(config(0.005)) as engine:
        others = [asyncio.create_task(ask(engine, request)) for request in requests]
        poison = generation("poison", fault_prompt(Fault.EXIT, 3), 40)
        answer = await ask(engine, poison)
        assert answer.finish == ["error"]
        assert len(answer.tokens[0]) == 3
        assert "ended the engine" in answer.errors[0]
        for request, other in zip(requests, await asyncio.gather(*others), strict=True):
            assert other.tokens == expected(request)
        assert (await ask(engine, generation("after", [5]))).finish == ["length"]


async def test_a_step_that_hangs_is_found_and_its_request_given_up() -> None:
    # A busy machine may keep a healthy engine from its CPU for a while: the time-out is long.
    async with running(config(step_timeout=1.5)) as engine:
        other = generation("other", [9, 9], 200)
        task = asyncio.create_task(ask(engine, other))
        answer = await ask(engine, generation("hangs", fault_prompt(Fault.HANG), 5))
        assert answer.finish == ["error"]
        assert (await task).tokens == expected(other)


async def test_a_failing_row_and_a_raising_step_end_nobody_else() -> None:
    requests = crowd(6)
    async with running(config(0.002)) as engine:
        others = [asyncio.create_task(ask(engine, request)) for request in requests]
        for fault in (Fault.ERROR, Fault.RAISE):
            answer = await ask(engine, generation(fault.name, fault_prompt(fault), 5))
            assert answer.finish == ["error"]
        for request, other in zip(requests, await asyncio.gather(*others), strict=True):
            assert other.tokens == expected(request)
        assert engine.epoch == 1


async def test_an_engine_that_cannot_start_says_why() -> None:
    engine = ProcessEngine(config(num_pages=4, max_model_len=100_000))
    with pytest.raises(EngineUnavailableError, match="max-model-len"):
        await engine.start()
    assert engine.state is EngineState.DEAD
    with pytest.raises(EngineUnavailableError):
        engine.submit(generation("late", [1]))
    await engine.stop(0)


async def test_a_process_that_cannot_be_started_is_reported_and_stopping_does_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    engine = ProcessEngine(config())
    with pytest.raises(EngineUnavailableError, match="cannot be started"):
        await engine.start()
    await engine.stop(0)


async def test_an_engine_can_be_stopped_while_it_starts() -> None:
    engine = ProcessEngine(config())
    starting = asyncio.create_task(engine.start())
    await until(lambda: engine.epoch == 1)
    starting.cancel()
    await engine.stop(0)
    assert engine.state is EngineState.DEAD


async def test_an_engine_that_cannot_be_restarted_is_given_up_with_an_error_to_everybody() -> None:
    async with running(config(0.01, max_restarts=3)) as engine:
        task = asyncio.create_task(ask(engine, generation("a", [1], 3000)))
        await until(lambda: engine.snapshot.running == 1)
        engine.config.model = "fake:broken"
        engine.hold = 4
        os.kill(pid(engine), signal.SIGKILL)
        await until(lambda: engine.epoch == 3)
        # Nobody knows any more how long it will take: newcomers are told to come again.
        with pytest.raises(EngineUnavailableError, match="in vain") as refusal:
            engine.submit(generation("late", [2]))
        assert refusal.value.state is EngineState.RECOVERING
        assert refusal.value.retry_after is not None
        assert refusal.value.retry_after >= 1
        engine.hold = 0
        answer = await task
        assert answer.finish == ["error"]
        # The reason is in the log: it may name paths.
        assert answer.errors == ["The engine has died and cannot be restarted."]
        assert engine.epoch == 4
        assert engine.state is EngineState.DEAD
        assert not engine.healthy


async def test_what_a_step_breaks_in_the_books_is_mended_without_a_new_engine() -> None:
    requests = crowd(6)
    async with running(config(0.005)) as engine:
        others = [asyncio.create_task(ask(engine, request)) for request in requests]
        answer = await ask(engine, generation("corrupt", fault_prompt(Fault.CORRUPT, 2), 9))
        assert answer.finish == ["error"]
        for request, other in zip(requests, await asyncio.gather(*others), strict=True):
            assert other.tokens == expected(request)
        assert engine.snapshot.repairs > 0
        assert engine.epoch == 1


async def test_while_there_is_no_engine_no_page_is_held_and_whoever_waits_may_leave() -> None:
    async with running(config(0.01)) as engine:
        streams = [engine.submit(generation(f"r{k}", [k] * 40, 500)) for k in range(5)]
        await until(lambda: engine.snapshot.running == 5)
        told = []
        engine.subscribe(lambda result: told.append(result.snapshot))
        await engine.lose()
        steps = engine.snapshot.step
        assert (engine.snapshot.running, engine.snapshot.pages_held) == (0, 0)
        assert engine.snapshot.waiting == 5
        for stream in streams:
            stream.cancel()
        assert engine.snapshot.waiting == 0
        assert all(snapshot.step >= steps for snapshot in told[-3:])
        engine.hold = 0
        await until(lambda: engine.state is EngineState.READY)
        await until(lambda: told[-1].step == 0)  # the new engine says that it is empty
        assert (told[-1].running, told[-1].pages_held, told[-1].waiting) == (0, 0, 0)


async def test_tenants_keep_their_counters_when_the_engine_is_killed() -> None:
    def of(tenant: str, count: int) -> list[Generation]:
        return [
            generation(f"{tenant}{k}", [k + 1] * 9, 120, tenant=tenant, weight=2.0)
            for k in range(count)
        ]

    requests = [*of("many", 6), *of("few", 1)]
    async with running(config(0.01)) as engine:
        # A fourth of their tokens is what others pay; who asked for it is gone when the engine is.
        gone = generation("gone", [1] * 400, 60, tenant="gone", weight=0.25)
        gone_task = asyncio.create_task(ask(engine, gone))
        tasks = [asyncio.create_task(ask(engine, request)) for request in requests]
        await gone_task
        await until(lambda: engine.snapshot.tenants.get("few", 0) > 40)
        await engine.lose()
        before = dict(engine.snapshot.tenants)
        engine.hold = 0
        assert before["many"] > 3 * before["few"]
        await until(lambda: engine.epoch == 2 and len(engine.snapshot.tenants) == 2)
        after = dict(engine.snapshot.tenants)
        departed: dict[str, float] = {}
        engine.subscribe(lambda result: departed.update(result.snapshot.departed))
        back = msgspec.structs.replace(gone, request_id="back")
        answers = await asyncio.gather(*tasks, ask(engine, back))
    assert departed["gone"] == 2 * (400 + 2 * 60) / 0.25
    for tenant in before:
        assert before[tenant] <= after[tenant] <= before[tenant] * 1.5
    # Paid once, whatever was computed twice: the prompt and two for each output.
    assert [answer.charged for answer in answers] == [[9 + 2 * 120]] * 7 + [[400 + 2 * 60]]


def test_time_in_which_nobody_could_listen_is_not_the_engines_silence() -> None:
    """The event loop stands still for longer than a step may take. (On uvloop, as the server: it
    runs timers before it reads.)"""

    async def main() -> None:
        async with running(config(0.01, step_timeout=1.0)) as engine:
            request = generation("a", [1], 300)
            task = asyncio.create_task(ask(engine, request))
            await until(lambda: engine.snapshot.running == 1)
            time.sleep(1.5)
            assert (await task).tokens == expected(request)
            assert engine.epoch == 1

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def test_cancelling_works_in_every_state() -> None:
    async with running(config(0.01, max_num_seqs=2)) as engine:
        runs = engine.submit(generation("runs", [1], 3000))
        pair = engine.submit(generation("pair", [2], 30, n=2))
        await anext(aiter(runs))
        queued = engine.submit(generation("queued", [3], 30))
        pair.cancel(0)
        queued.cancel()
        assert await collect(queued) is not None
        await engine.lose()
        recovering = engine.submit(generation("recovering", [4], 30))
        recovering.cancel()
        runs.cancel()
        runs.cancel()
        engine.hold = 0
        assert (await collect(recovering)).tokens == [[]]
        answer = await collect(pair, 2)
        assert answer.tokens[0] == []
        assert answer.tokens[1] == expected(generation("pair", [2], 30, n=2))[1]
        await until(lambda: engine.snapshot.running == 0)
        assert engine.snapshot.pages_held == 0


async def test_prompt_logprobs_come_once_whatever_happens() -> None:
    prompt = list(range(100, 200))
    params = SamplingParams(prompt_logprobs=0)
    async with running(config(0.02, max_num_batched_tokens=16, max_num_seqs=8)) as engine:
        stream = engine.submit(generation("scored", prompt, 4, params=params))
        answer = Answer(1)
        task = asyncio.create_task(collect(stream, into=answer))
        await until(lambda: len(answer.prompt_logprobs) > 20)
        os.kill(pid(engine), signal.SIGKILL)
        await task
        assert answer.prompt_logprobs == [-float(token) for token in prompt[1:]]


async def test_stopping_drains_then_aborts_then_ends_the_process() -> None:
    engine = ProcessEngine(config(0.01))
    await engine.start()
    process = psutil.Process(pid(engine))
    short = asyncio.create_task(ask(engine, generation("short", [1], 10)))
    long = asyncio.create_task(ask(engine, generation("long", [2], 4000)))
    await asyncio.sleep(0)
    stopping = asyncio.create_task(engine.stop(3.0))
    await asyncio.sleep(0)
    with pytest.raises(EngineUnavailableError):
        engine.submit(generation("late", [3]))
    await stopping
    assert (await short).finish == ["length"]
    assert (await long).finish == ["abort"]
    assert not process.is_running()


async def test_what_never_fits_is_refused_at_once() -> None:
    async with running(config(num_pages=100, max_model_len=150)) as engine:
        with pytest.raises(NeverFitsError, match="context length"):
            engine.submit(generation("big", [1] * 100, 100))
        with pytest.raises(NeverFitsError, match="n is 65"):
            engine.check_fits(1, 1, 65)


async def test_an_idle_engine_uses_no_cpu_time() -> None:
    async with running(config()) as engine:
        await ask(engine, generation("one", [1], 5))
        process = psutil.Process(pid(engine))

        async def used() -> float:
            before = process.cpu_times()
            await asyncio.sleep(0.5)
            after = process.cpu_times()
            return after.user + after.system - before.user - before.system

        # It may still have something to do at first; one that turns in vain always has.
        assert min([await used() for _ in range(3)]) <= 0.02


ROOT = Path(turnstile.__file__).parents[1]


def test_the_side_of_the_api_imports_no_torch() -> None:
    code = "import sys, turnstile.engine.supervisor; sys.exit('torch' in sys.modules)"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0


def worker(engine: ProcessEngine) -> psutil.Process:
    """The process that has been prepared for an engine."""
    assert engine._ahead is not None
    return psutil.Process(engine._ahead.process.pid)


async def test_what_was_prepared_becomes_the_engine() -> None:
    engine = ProcessEngine(config())
    engine.prepare()
    prepared = worker(engine)
    try:
        info = await engine.start()
        assert info.pid == prepared.pid
        engine.abandon()  # there is nothing left to abandon
        assert prepared.is_running()
    finally:
        await engine.stop(0)


async def test_signals_to_the_whole_group_do_not_end_an_engine_that_is_still_importing() -> None:
    engine = ProcessEngine(config())
    engine.prepare()
    prepared = worker(engine)
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(prepared.pid, number)
        info = await engine.start()
        assert info.pid == prepared.pid
        # Neither blocked nor waiting any more, and those who start another process pass on nothing.
        status = dict(
            line.split(":\t", 1)
            for line in Path(f"/proc/{info.pid}/status").read_text().splitlines()
        )
        assert int(status["SigBlk"], 16) == int(status["ShdPnd"], 16) == 0
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        await engine.stop(0)


def test_what_was_prepared_ends_where_it_is_abandoned() -> None:
    engine = ProcessEngine(config())
    engine.prepare()
    prepared = worker(engine)
    engine.abandon()
    assert not prepared.is_running()


def test_a_worker_that_is_told_nothing_leaves() -> None:
    command = [sys.executable, "-P", "-m", "turnstile.engine.worker"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, input=b"", capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_engine_dies_with_its_parent() -> None:
    code = (
        "import asyncio\n"
        "from turnstile.engine.config import EngineConfig\n"
        "from turnstile.engine.supervisor import ProcessEngine\n"
        "async def main():\n"
        "    info = await ProcessEngine(EngineConfig(model='fake:')).start()\n"
        "    print(info.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env) as parent:
        assert parent.stdout is not None
        engine = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        engine.wait(60)
