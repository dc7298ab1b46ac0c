"""Every request can say why it waits, and where its time went; and only to those it concerns."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from server.fake_engine import FakeEngine, fake_info
from server.served import Raw, Serve, Served, listening, until
from turnstile.core import events
from turnstile.core.admission import ADMISSION_POLICIES
from turnstile.core.events import AnyEvent, WaitReason, encode
from turnstile.core.fairness import QUEUE_POLICIES, FirstComeQueue
from turnstile.core.pages import PagePool
from turnstile.core.request import Sequence
from turnstile.core.scheduler import Scheduler, SchedulerConfig
from turnstile.engine.client import EngineState, Generation
from turnstile.engine.fake import FakeExecutor
from turnstile.engine.loop import StepLoop
from turnstile.engine.params import SamplingParams
from turnstile.engine.protocol import (
    Snapshot,
    StepResult,
    Submit,
    decode_message,
    encode_message,
)
from turnstile.server.answer.usage import Record
from turnstile.server.config import ServerConfig
from turnstile.server.service import Service
from turnstile.server.watch.request_view import View
from turnstile.server.watch.trails import Part, RequestLog, RequestTrail, SampleTrail
from turnstile.server.watch.waiting_line import expected_order

LONG = {"prompt": "hi", "max_tokens": 200, "ignore_eos": True}


async def listed(served: Served, query: str = "", key: str = "") -> list[dict[str, Any]]:
    headers = {"x-api-key": key} if key else {}
    answer = await served.client.get(f"/v1/requests{query}", headers=headers)
    assert answer.status_code == 200, answer.text
    data: list[dict[str, Any]] = answer.json()["data"]
    return data


async def one(served: Served, name: str, key: str = "") -> dict[str, Any]:
    headers = {"x-api-key": key} if key else {}
    answer = await served.client.get(f"/v1/requests/{name}", headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def check_times(told: dict[str, Any]) -> None:
    assert sum(told["time"].values()) == pytest.approx(told["age_seconds"], abs=1e-4)


def test_the_waiting_say_why_and_who_is_before_them(serve: Serve) -> None:
    async def test() -> None:
        async with serve(max_num_seqs=1, delay=0.05) as served, listening(served) as port:
            clients = []
            for k in range(4):
                clients.append(await Raw.post(port, "/v1/completions", LONG))
                await until(lambda k=k: len(served.engine.streams) == k + 1)  # type: ignore[misc]
            await until(lambda: served.engine.snapshot.waiting == 3)
            running = await listed(served, "?state=running")
            waiting = await listed(served, "?state=waiting")
            assert [told["state"] for told in running] == ["decode"]
            assert running[0]["waits"] is None
            assert [told["waits"]["position"] for told in waiting] == [1, 2, 3]
            assert {told["waits"]["of"] for told in waiting} == {3}
            assert {told["waits"]["reason"] for told in waiting} == {"slots"}
            assert waiting[0]["waits"]["text"] == "All 1 slots are taken."
            assert "2 are ahead of it" in waiting[2]["waits"]["text"]
            assert waiting[2]["time"]["queue"] > 0
            assert waiting[2]["time"]["prefill"] == 0
            for client in clients:
                client.reset()
            await until(lambda: not served.service.requests.alive())
            ended = await listed(served, "?state=ended")
            assert [told["finish_reason"] for told in ended] == ["abort"] * 4

    asyncio.run(test())


def test_a_start_is_predicted_once_the_queue_has_moved(serve: Serve) -> None:
    async def test() -> None:
        async with serve(max_num_seqs=1, delay=0.001) as served:
            body = {"max_tokens": 20, "ignore_eos": True}
            tasks = [asyncio.create_task(served.complete(**body)) for _ in range(12)]
            engine = served.engine
            log, clock = served.service.requests, served.service.clock
            await until(lambda: len(engine.streams) == 12 and engine.snapshot.waiting < 9)
            await until(lambda: log.seconds_per_start(clock()) is not None)
            waiting = await listed(served, "?state=waiting")
            predicted = [told["waits"]["predicted_start_seconds"] for told in waiting]
            assert len(predicted) > 2
            assert predicted == sorted(predicted)
            assert predicted[0] > 0
            for task in tasks:
                await task

    asyncio.run(test())


def test_the_ended_say_where_their_time_went(serve: Serve) -> None:
    async def test() -> None:
        async with serve(delay=0.002) as served:
            answer = await served.client.post(
                "/v1/completions",
                json={"prompt": "hello", "max_tokens": 6},
                headers={"x-request-id": "mine/1"},
            )
            for name in ("mine/1", answer.json()["id"]):
                told = await one(served, name)
                assert told["state"] == "ended"
                assert told["finish_reason"] == "length"
                assert told["output_tokens"] == 6
                assert told["time"]["decode"] > 0
                check_times(told)
                words = [note["event"] for note in told["events"]]
                assert words[:3] == ["queued", "admitted", "decoding"]
            missing = await served.client.get("/v1/requests/nobody")
            assert missing.status_code == 404
            assert missing.json()["error"]["code"] == "request_not_found"

    asyncio.run(test())


def test_a_tenant_sees_its_own_and_an_admin_all(serve: Serve) -> None:
    async def test() -> None:
        config = {"api_key": ["a-key", "b-key"], "admin_api_key": ["boss"]}
        async with serve(config=config) as served:
            for key in ("a-key", "b-key"):
                headers = {"x-api-key": key, "x-request-id": f"of-{key}"}
                await served.client.post(
                    "/v1/completions", json={"prompt": "hi", "max_tokens": 1}, headers=headers
                )
            assert [told["id"] for told in await listed(served, key="a-key")] == ["of-a-key"]
            assert len(await listed(served, key="boss")) == 2
            await one(served, "of-b-key", key="boss")
            foreign = await served.client.get(
                "/v1/requests/of-b-key", headers={"x-api-key": "a-key"}
            )
            assert foreign.status_code == 404
            assert (await served.client.get("/v1/requests")).status_code == 401

    asyncio.run(test())


def test_nothing_anybody_wrote_is_told(serve: Serve) -> None:
    async def test() -> None:
        async with serve("the answer") as served:
            await served.complete("my secret words", max_tokens=5, user="secret", stop="secret")
            text = (await served.client.get("/v1/requests")).text
            told = await one(served, (await listed(served))[0]["answer_id"])
            assert "secret" not in text
            assert "answer" not in str(told).replace("answer_id", "")

    asyncio.run(test())


def test_what_is_remembered_of_the_ended_is_bounded_and_holds_no_tokens(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served:
            served.service.requests = log = RequestLog(keep=5)
            for _ in range(12):
                await served.complete(max_tokens=1)
            ended = list(log.ended())
            assert len(ended) == 5
            assert all(trail.record is None for trail in ended)
            assert not log.alive()
            assert not log._by_engine_id

    asyncio.run(test())


@pytest.mark.parametrize("query", ["?state=asleep", "?limit=0", "?limit=x", "?limit=1001"])
def test_a_wrong_query_names_its_limit(serve: Serve, query: str) -> None:
    async def test() -> None:
        async with serve() as served:
            answer = await served.client.get(f"/v1/requests{query}")
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] in ("state", "limit")

    asyncio.run(test())


def test_the_limit_is_kept_and_more_is_said(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served:
            for _ in range(3):
                await served.complete(max_tokens=1)
            answer = (await served.client.get("/v1/requests?limit=2")).json()
            assert len(answer["data"]) == 2
            assert answer["has_more"]

    asyncio.run(test())


def test_while_the_engine_is_away_the_reason_is_the_engine(serve: Serve) -> None:
    async def test() -> None:
        async with serve(delay=0.05) as served, listening(served) as port:
            client = await Raw.post(port, "/v1/completions", LONG)
            await until(lambda: served.engine.snapshot.running == 1)
            served.engine.held = True
            served.engine.state = EngineState.RECOVERING
            told = (await listed(served, "?state=alive"))[0]
            assert told["state"] == "recovering"
            assert told["waits"]["reason"] == "engine"
            assert told["crashes"] == 1
            client.reset()
            await until(lambda: not served.service.requests.alive())

    asyncio.run(test())


@pytest.mark.parametrize("stream", [True, False])
def test_a_cancelled_request_ends_with_what_there_is(serve: Serve, stream: bool) -> None:
    async def test() -> None:
        async with serve(max_num_seqs=2, delay=0.02) as served:
            headers = {"x-request-id": "runaway"}
            body = LONG | {"stream": stream, "n": 2}
            answer = asyncio.create_task(
                served.client.post("/v1/completions", json=body, headers=headers)
            )
            await until(lambda: served.engine.snapshot.running == 2)
            waiting = asyncio.create_task(served.complete(max_tokens=5, ignore_eos=True))
            cancelled = await served.client.delete("/v1/requests/runaway")
            assert cancelled.status_code == 200
            ended = await answer
            assert ended.status_code == 200
            finishes = re.findall(r'"finish_reason":"(\w+)"', ended.text)
            assert finishes == ["abort", "abort"]
            assert "hello" in ended.text or "h" in ended.text
            assert ended.text.endswith("data: [DONE]\n\n") == stream
            assert (await waiting).json()["usage"]["completion_tokens"] == 5
            told = await one(served, "runaway")
            assert told["finish_reason"] == "abort"
            assert "cancelled" in [note["event"] for note in told["events"]]
            assert served.service.metrics.outcomes["abort"] == 1
            again = await served.client.delete("/v1/requests/runaway")
            assert again.json()["state"] == "ended"

    asyncio.run(test())


def test_nobody_cancels_what_is_not_theirs(serve: Serve) -> None:
    async def test() -> None:
        config = {"api_key": ["a-key", "b-key"], "admin_api_key": ["boss"]}
        async with serve(config=config, delay=0.05) as served:
            answer = asyncio.create_task(
                served.client.post(
                    "/v1/completions", json=LONG,
                    headers={"x-api-key": "a-key", "x-request-id": "mine"},
                )
            )  # fmt: skip
            await until(lambda: served.engine.snapshot.running == 1)
            path = "/v1/requests/mine"
            foreign = await served.client.delete(path, headers={"x-api-key": "b-key"})
            assert foreign.status_code == 404
            page = {"x-api-key": "boss", "origin": "http://evil.example"}
            assert (await served.client.delete(path, headers=page)).status_code == 403
            assert not answer.done()
            await served.client.delete(path, headers={"x-api-key": "boss"})
            assert (await answer).json()["choices"][0]["finish_reason"] == "abort"

    asyncio.run(test())


# -- the log itself, on a clock of its own --------------------------------------------------


class _Place:
    def __init__(self, name: str, prompt: int, tenant: str, priority: int, arrival: float) -> None:
        self.generation = Generation(
            request_id=name, prompt=[1] * prompt, params=SamplingParams(), max_tokens=8, seed=1,
            tenant=tenant, priority=priority, arrival=arrival,
        )  # fmt: skip
        self.num_prompt, self.num_output, self.cached_tokens = prompt, 0, 0
        self.choices: list[object] = []
        self.place = None


def trail(
    name: str, *, prompt: int = 10, tenant: str = "t", priority: int = 0, arrival: float = 0.0
) -> RequestTrail:
    record = Record(arrival)
    record.jobs.append(_Place(name, prompt, tenant, priority, arrival))  # type: ignore[arg-type]
    return RequestTrail(f"x-{name}", f"cmpl-{name}", "/v1/completions", tenant, record, arrival)


def step(log: RequestLog, *happened: AnyEvent, epoch: int = 1, waiting: int = 1) -> None:
    time = happened[-1].time
    snapshot = Snapshot(time=time, waiting=waiting)
    encoded = [encode(event) for event in happened]
    log.on_step(StepResult(epoch, 1, [], [], snapshot, encoded), happened)


def test_preemption_and_recomputation_have_their_own_times() -> None:
    log = RequestLog()
    log.accepted(mine := trail("a", prompt=100))
    step(log, events.Queued(1.0, "a", 0, "t", 100))
    step(log, events.Waiting(1.0, "a", 0, WaitReason.PAGES))
    assert mine.leading().reason is WaitReason.PAGES
    step(log, events.Admitted(3.0, "a", 0, "t", 0, 7, 3.0))
    step(log, events.Decoding(4.5, "a", 0, 100))
    step(log, events.Preempted(6.0, "a", 0, 120, 1))
    assert mine.leading().waits
    step(log, events.Admitted(8.0, "a", 0, "t", 96, 7, 2.0))
    step(log, events.Decoding(8.5, "a", 0, 120))
    step(log, events.Finished(10.0, "a", 0, "t", "length", 100, 30, 0, 1))
    log.closed("cmpl-a", "length", 10.25)
    times = mine.leading().times(10.25)
    assert times == {
        Part.QUEUE: 3.0, Part.PREFILL: 1.5, Part.DECODE: 3.0, Part.PREEMPTED: 2.0,
        Part.RECOMPUTE: 0.5, Part.RECOVERY: 0.0,
    }  # fmt: skip
    assert sum(times.values()) == 10.0
    assert mine.leading().recomputed == 24
    assert mine.leading().preemptions == 1


def test_the_time_of_a_crash_lasts_from_the_last_sign_of_life_to_the_next_slot() -> None:
    log = RequestLog()
    log.accepted(running := trail("a"))
    log.accepted(queued := trail("b"))
    step(log, events.Queued(0.0, "a", 0, "t", 10), events.Queued(0.0, "b", 0, "t", 10))
    step(log, events.Admitted(1.0, "a", 0, "t", 0, 1, 1.0))
    step(log, events.Decoding(2.0, "a", 0, 10))
    log.engine_lost()
    log.engine_lost()
    assert running.leading().crashes == queued.leading().crashes == 1
    assert not running.leading().waits, "no engine knows of it"
    step(
        log, events.Queued(5.0, "a", 0, "t", 14), events.Queued(5.0, "b", 0, "t", 10), epoch=2
    )  # fmt: skip
    assert queued.leading().part is Part.QUEUE
    step(log, events.Waiting(5.5, "a", 0, WaitReason.SLOTS), epoch=2)
    assert running.leading().waits, "with the new engine, but without a slot"
    assert running.leading().reason is WaitReason.SLOTS
    step(log, events.Admitted(6.0, "a", 0, "t", 0, 1, 0.0), epoch=2)
    step(log, events.Decoding(6.5, "a", 0, 14), epoch=2)
    step(log, events.Finished(9.0, "a", 0, "t", "stop", 10, 8, 0, 0), epoch=2)
    assert running.leading().times(9.0) == {
        Part.QUEUE: 1.0, Part.PREFILL: 1.0, Part.DECODE: 2.5, Part.RECOVERY: 4.0,
        Part.RECOMPUTE: 0.5, Part.PREEMPTED: 0.0,
    }  # fmt: skip
    assert running.leading().recomputed == 14
    assert queued.leading().times(9.0)[Part.RECOVERY] == 3.0
    assert queued.leading().recomputed == 0


def test_a_crash_nobody_was_told_of_shows_with_the_next_epoch() -> None:
    log = RequestLog()
    log.accepted(mine := trail("a"))
    step(log, events.Queued(0.0, "a", 0, "t", 10))
    step(log, events.Admitted(1.0, "a", 0, "t", 0, 1, 1.0))
    step(log, events.Queued(4.0, "a", 0, "t", 10), epoch=2)
    assert mine.leading().part is Part.RECOVERY
    assert mine.leading().crashes == 1


def test_siblings_share_the_way_of_their_leader() -> None:
    log = RequestLog()
    log.accepted(mine := trail("a"))
    step(log, events.Queued(0.0, "a", 0, "t", 10))
    step(log, events.Admitted(1.0, "a", 0, "t", 0, 1, 1.0))
    step(log, events.Decoding(2.0, "a", 0, 10), events.Forked(2.0, "a", 1, 0, 1))
    step(log, events.Finished(3.0, "a", 0, "t", "stop", 10, 1, 0, 0))
    step(log, events.Finished(5.0, "a", 1, "t", "stop", 10, 3, 0, 0))
    first, second = mine.samples.values()
    assert sum(first.times(5.0).values()) == 3.0
    assert sum(second.times(5.0).values()) == 5.0
    assert mine.leading() is second


def test_notes_are_bounded() -> None:
    log = RequestLog()
    log.accepted(mine := trail("a"))
    for k in range(500):
        reason = (WaitReason.PAGES, WaitReason.SLOTS)[k % 2]
        step(log, events.Waiting(float(k), "a", 0, reason))
    assert len(mine.notes) < 100
    assert len(mine.notes) + mine.more_notes == 500


def order(policy: str, trails: list[RequestTrail], tenants: dict[str, float]) -> list[str]:
    waiting: dict[tuple[str, int], tuple[RequestTrail, SampleTrail]] = {
        key: (trail, sample) for trail in trails for key, sample in trail.samples.items()
    }
    return [key[0] for key in expected_order(QUEUE_POLICIES[policy](), waiting, tenants)]


def test_the_order_is_that_of_the_policy() -> None:
    flood = [trail(f"a{k}", prompt=100, tenant="a", arrival=float(k)) for k in range(3)]
    late = [trail(f"b{k}", prompt=10, tenant="b", arrival=9.0 + k) for k in range(2)]
    urgent = trail("u", prompt=10, tenant="a", priority=-1, arrival=9.5)
    trails = [*flood, *late, urgent]
    assert order("fcfs", trails, {}) == ["a0", "a1", "a2", "b0", "u", "b1"]
    assert order("priority", trails, {}) == ["u", "a0", "a1", "a2", "b0", "b1"]
    fair = order("fair", trails, {"a": 500.0, "b": 480.0})
    assert fair[:3] == ["b0", "b1", "u"]
    assert fair[3:] == ["a0", "a1", "a2"]
    assert order("fair", trails, {"a": 0.0, "b": 480.0})[0] == "u"


def test_a_policy_that_looks_at_lengths_finds_them_when_the_order_is_drawn() -> None:
    class ShortestFirst(FirstComeQueue):
        def place(self, sequence: Sequence) -> tuple[float, float, int]:
            return (sequence.total, sequence.request.arrival, sequence.arrival_order)

    trails = [trail(name, prompt=size) for name, size in (("l", 90), ("s", 5), ("m", 40))]
    waiting = {key: (trail, s) for trail in trails for key, s in trail.samples.items()}
    assert [key[0] for key in expected_order(ShortestFirst(), waiting, {})] == ["s", "m", "l"]


# -- with the real scheduler, over the real wire ----------------------------------------------


class Wired:
    """A service whose engine is the real step loop, without a model, heard over msgpack."""

    def __init__(self, **sizes: int) -> None:
        pages = sizes.pop("pages", 64)
        engine = FakeEngine(lambda generation, sample: [70])
        engine.info = fake_info(num_pages=pages, **sizes)
        engine.state = EngineState.READY
        self.now = 100.0
        self.service = Service(ServerConfig(), engine, clock=lambda: self.now)
        self.loop = StepLoop(
            Scheduler(
                SchedulerConfig(**{"max_num_batched_tokens": 64, "max_model_len": 512} | sizes),
                PagePool(pages, 16), ADMISSION_POLICIES["guaranteed"](), QUEUE_POLICIES["fair"](),
            ),
            FakeExecutor(1000), 1, self._hear, lambda: self.now,
        )  # fmt: skip
        self._hear_as = self.service.metrics.engine._listeners  # type: ignore[attr-defined]

    def _hear(self, result: StepResult) -> None:
        message = decode_message(encode_message(result))
        for listener in self._hear_as:
            listener(message)

    def submit(self, name: str, prompt: list[int], max_tokens: int, tenant: str = "t") -> None:
        mine = trail(name, prompt=len(prompt), tenant=tenant, arrival=self.now)
        assert mine.record is not None
        mine.record.jobs[0].generation.max_tokens = max_tokens
        self.service.requests.accepted(mine)
        self.loop.apply(
            Submit(name, prompt, SamplingParams(), max_tokens, 1, tenant=tenant, arrival=self.now)
        )

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.loop.step()
            self.now += 0.1

    def waits(self, name: str) -> dict[str, Any]:
        found = View(self.service).summary(self.service.requests.find(f"cmpl-{name}")[0])
        waits = found["waits"]
        assert isinstance(waits, dict), found
        return waits

    def state(self, name: str) -> object:
        return View(self.service).summary(self.service.requests.find(f"cmpl-{name}")[0])["state"]


def test_all_reasons_of_the_scheduler_come_through() -> None:
    wired = Wired(max_num_seqs=2)
    for k in range(4):
        wired.submit(f"r{k}", [k] * 10, 30)
    wired.step(3)
    assert [wired.state(f"r{k}") for k in range(4)] == ["decode", "decode", "queued", "queued"]
    for name, text in (("r2", "All 2 slots are taken."), ("r3", "1 is ahead of it.")):
        assert wired.waits(name)["reason"] == "slots"
        assert text in wired.waits(name)["text"]


def test_who_stands_behind_one_that_does_not_fit_says_so() -> None:
    wired = Wired(max_num_seqs=8, pages=10, max_model_len=160)
    wired.submit("running", [1] * 10, 100)
    wired.submit("large", [2] * 60, 60)
    wired.submit("small", [3] * 60, 60)
    wired.step(3)
    assert wired.state("running") == "decode"
    assert wired.waits("large")["reason"] == "pages"
    assert "of 10 pages are free" in str(wired.waits("large")["text"])
    assert wired.waits("small")["reason"] in ("pages", "behind_head")
    assert wired.waits("small")["position"] == 2


def test_who_shares_a_prompt_waits_for_it_to_be_written() -> None:
    wired = Wired(max_num_seqs=8)
    wired.submit("writer", [1] * 200, 5)
    wired.submit("reader", [1] * 200, 5)
    wired.step(2)
    assert wired.state("writer") == "prefill"
    assert wired.waits("reader")["reason"] == "prefix"


def test_a_tenant_that_runs_leaves_the_last_slot_to_others() -> None:
    wired = Wired(max_num_seqs=8)
    wired.submit("other", [9] * 10, 1, tenant="b")
    wired.step(3)
    for k in range(8):
        wired.submit(f"r{k}", [k] * 10, 50, tenant="a")
    wired.step(3)
    assert wired.waits("r7")["reason"] == "tenant_turn"
