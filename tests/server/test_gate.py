"""The gate behind HTTP: what a refusal says, and that every ending gives its place back."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from server.fake_engine import fake_info
from server.served import Serve, Served, events, until
from turnstile.core.cost import Coefficients
from turnstile.core.fairness import FirstComeQueue
from turnstile.core.forecast import EngineView
from turnstile.core.request import Sequence
from turnstile.engine.protocol import FittedCost
from turnstile.server.config import ServerConfig
from turnstile.server.gate import Gate, Work, make_gate


def gate_of(served: Served) -> Gate:
    gate = served.service.gate
    assert gate is not None
    return gate


async def burst(served: Served, count: int, **body: Any) -> list[httpx.Response]:
    return list(await asyncio.gather(*(served.complete(**body) for _ in range(count))))


def test_of_a_burst_exactly_slots_and_queue_are_served_and_the_rest_know_when_to_return(
    serve: Serve,
) -> None:
    async def scenario() -> None:
        async with serve(max_num_seqs=2, config={"max_num_queued_reqs": 8}) as served:
            served.engine.held = True
            all_in = asyncio.create_task(burst(served, 50, max_tokens=3))
            await until(lambda: gate_of(served).rejections["max_num_queued_reqs"] == 40)
            served.engine.held = False
            answers = await all_in
            assert [a.status_code for a in answers].count(200) == 10
            refused = [a for a in answers if a.status_code != 200]
            for answer in refused:
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "engine_overloaded"
                assert answer.json()["error"]["type"] == "overloaded"
                assert 1 <= int(answer.headers["retry-after"]) <= 60
                assert 1000 <= int(answer.headers["retry-after-ms"]) <= 60_000
                assert answer.headers["x-should-retry"] == "true"
            # Not all at the same moment: those told later come later.
            waits = [int(a.headers["retry-after-ms"]) for a in refused]
            assert len(set(waits)) > 1
            gate = gate_of(served)
            assert gate.rejections["max_num_queued_reqs"] == 40
            assert gate.load == 0
            assert (await served.complete()).status_code == 200

    asyncio.run(scenario())


def test_a_predicted_wait_over_the_bound_is_refused_and_says_how_long_it_is(serve: Serve) -> None:
    async def scenario() -> None:
        config = {"max_queue_wait": 1.0}
        async with serve(max_num_seqs=1, delay=0.005, config=config) as served:
            served.engine.cost = FittedCost(alpha=0.1, samples=100)
            running = asyncio.create_task(served.complete(max_tokens=200, ignore_eos=True))
            await until(lambda: gate_of(served).running == 1)
            answer = await served.complete(max_tokens=200, ignore_eos=True)
            assert answer.status_code == 503
            error = answer.json()["error"]
            assert error["code"] == "engine_overloaded"
            assert "would wait about" in error["message"]
            # 200 steps of 0.1 s are to come; a second of waiting is allowed.
            assert 15 <= int(answer.headers["retry-after"]) <= 25
            assert gate_of(served).rejections["max_queue_wait"] == 1
            assert (await running).status_code == 200

    asyncio.run(scenario())


def test_nobody_tokenizes_what_is_refused_anyway(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with serve(max_num_seqs=1, config={"max_num_queued_reqs": 0}) as served:
            served.engine.held = True
            running = asyncio.create_task(served.complete())
            await until(lambda: gate_of(served).load == 1)

            def never(*_: Any, **__: Any) -> Any:
                raise AssertionError("it was tokenized")

            monkeypatch.setattr("turnstile.server.api.completions.completion_prompts", never)
            monkeypatch.setattr("turnstile.server.api.chat.render_chat", never)
            for answer in (await served.complete(), await served.chat()):
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "engine_overloaded"
            assert (await served.complete(temperature=-1)).status_code == 400
            assert gate_of(served).load == 1
            served.engine.held = False
            assert (await running).status_code == 200

    asyncio.run(scenario())


@pytest.mark.parametrize("ending", ["cancel", "error", "stop", "timeout", "unavailable"])
def test_every_ending_gives_the_place_back(serve: Serve, ending: str) -> None:
    async def scenario() -> None:
        async with serve(max_num_seqs=1, config={"max_num_queued_reqs": 1}) as served:
            if ending == "cancel":
                served.engine.held = True
                task = asyncio.create_task(served.complete())
                await until(lambda: gate_of(served).load == 1)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await until(lambda: gate_of(served).load == 0)
                served.engine.held = False
            elif ending == "error":
                from server.fake_engine import Failure

                served.engine.failures[0] = Failure("broken", after=1)
                assert (await served.complete()).status_code == 500
            elif ending == "stop":
                assert (await served.complete(stop=["lo"])).status_code == 200
            elif ending == "timeout":
                assert (await served.complete(timeout=1e-9)).status_code == 504
            else:
                from turnstile.engine.client import EngineState

                served.engine.state = EngineState.RECOVERING
                assert (await served.complete()).status_code == 503
                served.engine.state = EngineState.READY
            assert gate_of(served).load == 0
            assert (await served.complete()).status_code == 200
            assert gate_of(served).load == 0

    asyncio.run(scenario())


def test_the_calibration_is_exported(serve: Serve) -> None:
    async def scenario() -> None:
        async with serve() as served:
            served.engine.cost = FittedCost(alpha=0.001, samples=100)
            events(await served.complete(max_tokens=3, stream=True))
            events(await served.complete(max_tokens=3, stream=True))
            text = (await served.client.get("/metrics")).text
            found = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
            for quantity in ("wait", "ttft"):
                label = f'{{quantity="{quantity}"}}'
                made = float(found[f"turnstile_gate_predictions_total{label}"])
                assert made >= 1
                assert 0 <= float(found[f"turnstile_gate_covered_predictions_total{label}"]) <= made
                assert float(found[f"turnstile_gate_actual_seconds_total{label}"]) > 0
                assert f"turnstile_gate_predicted_seconds_total{label}" in found
            assert float(found["turnstile_gate_accepted_total"]) == 2
            assert float(found["turnstile_gate_waiting"]) == 0

    asyncio.run(scenario())


class ByLength(FirstComeQueue):
    """A policy from outside of Turnstile, as an operator would name it."""

    name = "by-length"

    def place(self, sequence: Sequence) -> tuple[float, float, int]:
        return (sequence.total, sequence.request.arrival, sequence.arrival_order)


@pytest.mark.parametrize(
    ("policy", "behind_the_flood"),
    [("fair", False), ("fcfs", True), ("priority", True), (f"{__name__}:ByLength", True)],
)
def test_the_gate_predicts_by_what_the_class_of_the_engines_policy_says_of_its_order(
    policy: str, behind_the_flood: bool
) -> None:
    gate = make_gate(ServerConfig(), fake_info(max_num_seqs=1, scheduling_policy=policy))
    gate.learn(EngineView(cost=Coefficients(0.01, 0.0, 0.0, 0.0), cost_samples=100))
    flood, other = (Work(tenant=name, prompt_tokens=8, max_tokens=100) for name in "fo")
    for _ in range(20):
        gate.enter([flood], 0.0)
    prediction = gate.predict(other)
    assert prediction is not None
    assert (prediction.wait > 5) is behind_the_flood
