"""B91, metrics that lie, as a kind: each series against what was sent and what clients heard."""

from __future__ import annotations

import asyncio
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cases.servers import teach_short_outputs
from e2e import raw
from e2e.harness import ServerProcess
from e2e.harness import until as eventually
from e2e.pool import Srv
from server.conftest import serve, tokenizer  # noqa: F401 - fixtures
from server.fake_engine import FakeEngine, fake_info
from server.served import Raw, Serve, listening, until
from turnstile.core.admission import ADMISSION_POLICIES
from turnstile.core.events import WaitReason
from turnstile.core.fairness import QUEUE_POLICIES
from turnstile.core.pages import PagePool
from turnstile.core.scheduler import Scheduler, SchedulerConfig
from turnstile.engine.fake import FakeExecutor
from turnstile.engine.loop import StepLoop
from turnstile.engine.params import SamplingParams
from turnstile.engine.protocol import Snapshot, StepResult, Submit
from turnstile.server.watch.ended import MAX_TENANTS
from turnstile.server.watch.metrics import BUSY_WINDOW, Metrics
from turnstile.server.watch.series import SERIES, Series

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: str) -> Samples:
    """Every sample by name and labels, read by Prometheus' own parser."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(samples: Samples, name: str, **labels: str) -> float:
    found = [
        v for (n, ls), v in samples.items() if n == name and labels.items() <= dict(ls).items()
    ]
    assert found, (name, labels)
    return sum(found)


# -- with the real engine: a pool so small that requests preempt each other -------------------


@pytest.fixture
def crowded(srv: Srv) -> ServerProcess:
    """Far too few pages for those whom admission lets in."""
    server = srv(pages=12, chunk=64, env=raw.FAULTS)
    teach_short_outputs(server)
    return server


def scrape(server: ServerProcess) -> Samples:
    server.idle()
    return parsed(server.http.get("/metrics").text)


def growth(before: Samples, after: Samples, name: str, **labels: str) -> float:
    return total(after, name, **labels) - total(before, name, **labels)


@pytest.mark.e2e
def test_b91_tokens_count_once_though_they_are_computed_twice(crowded: ServerProcess) -> None:
    before = scrape(crowded)
    prompts = [crowded.tokens(60, seed=k) for k in range(8)]
    body = {"max_tokens": 60, "ignore_eos": True, "temperature": 1}
    answers = crowded.together(
        [lambda k=k: crowded.complete(prompts[k], **body, seed=k) for k in range(8)]
    )
    answers.append(crowded.complete(prompts[0], n=3, max_tokens=5, ignore_eos=True))
    assert {status for status, _ in answers} == {200}
    told = [answer["usage"] for _, answer in answers]
    after = scrape(crowded)
    assert growth(before, after, "turnstile_preemptions_total") > 0, "nothing was preempted"
    assert growth(before, after, "turnstile_recomputed_tokens_total") > 0
    outputs = sum(usage["completion_tokens"] for usage in told)
    for name in ("turnstile_generated_tokens_total", "vllm:generation_tokens_total"):
        assert growth(before, after, name) == outputs
    assert growth(before, after, "turnstile_tenant_generated_tokens_total") == outputs
    inputs = sum(usage["prompt_tokens"] for usage in told)
    assert growth(before, after, "turnstile_prompt_tokens_total") == inputs
    assert growth(before, after, "turnstile_tenant_prompt_tokens_total") == inputs
    assert growth(before, after, "turnstile_requests_total") == 9, "one request is one, n or not"
    assert growth(before, after, "turnstile_tenant_requests_total") == 9
    queued = growth(before, after, "turnstile_request_part_seconds_total", part="queue")
    assert growth(before, after, "turnstile_tenant_queue_seconds_total") == pytest.approx(queued)
    assert growth(before, after, "turnstile_itl_seconds_count") == outputs - 8 - 3
    assert growth(before, after, "turnstile_request_output_tokens_sum") == outputs
    assert growth(before, after, "turnstile_request_preemptions_sum") == growth(
        before, after, "turnstile_preemptions_total"
    )
    steps = growth(before, after, "turnstile_steps_total")
    assert growth(before, after, "turnstile_step_tokens_count") == steps
    waited = growth(before, after, "turnstile_request_part_seconds_total", part="preempted")
    assert waited > 0


@pytest.mark.e2e
def test_b91_who_waits_for_pages_says_so_and_who_is_behind_says_that(
    crowded: ServerProcess,
) -> None:
    body = {"ignore_eos": True, "max_tokens": 120, "prompt": [5] * 60}
    streams = [crowded.stream("/v1/completions", **body) for _ in range(12)]
    seen: dict[str, str] = {}

    def look() -> bool:
        for told in crowded.http.get("/v1/requests?state=waiting").json()["data"]:
            if told["waits"] is not None:
                seen[told["waits"]["reason"]] = told["waits"]["text"]
        return bool(seen.keys() & {"pages", "preempted"})

    with ThreadPoolExecutor(12) as clients:
        with raw.slowed(crowded):
            answers = [clients.submit(list, stream) for stream in streams]
            eventually(look, "nobody waits for pages")
        assert all(answer.result() for answer in answers)
    assert "does not fit beside those that run" in seen.get("pages", "") or "preempted" in seen
    assert seen.keys() <= {str(reason) for reason in WaitReason}
    for told in crowded.http.get("/v1/requests?state=ended&limit=12").json()["data"]:
        assert sum(told["time"].values()) == pytest.approx(told["age_seconds"], abs=1e-3)
        assert told["output_tokens"] == 120


@pytest.mark.e2e
@pytest.mark.parametrize("n", [1, 2])
def test_a_cancelled_request_leaves_nothing_behind(crowded: ServerProcess, n: int) -> None:
    before = scrape(crowded)
    body: dict[str, Any] = {"prompt": [5] * 20, "max_tokens": 140 // n, "ignore_eos": True, "n": n}
    with ThreadPoolExecutor(12) as clients, raw.slowed(crowded):
        streams = [crowded.stream("/v1/completions", **body) for _ in range(12)]
        answers = [clients.submit(list, stream) for stream in streams]
        eventually(lambda: crowded.metric("turnstile_requests_in_flight") == 1 + 12)
        eventually(lambda: crowded.metric("turnstile_requests_running") > 1)
        alive = crowded.http.get("/v1/requests?state=alive").json()["data"]
        assert len(alive) == 1 + 12
        for told in alive[1:]:  # the first one sees to it that nobody ends meanwhile
            answer = crowded.http.delete(f"/v1/requests/{told['answer_id']}")
            assert answer.status_code == 200
        ended = [answer.result() for answer in answers]
    for events in ended:
        finishes = [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]]
        assert finishes == ["abort"] * n
    after = scrape(crowded)
    assert growth(before, after, "turnstile_requests_total", outcome="abort") >= 12
    assert total(after, "turnstile_pages", state="held") == 0


@pytest.mark.e2e
def test_b91_outcomes_add_up_to_what_was_sent(crowded: ServerProcess) -> None:
    before = scrape(crowded)
    crowded.complete([5] * 20, max_tokens=3)
    crowded.complete([5] * 20, max_tokens=-1)
    crowded.complete([5] * 5000, max_tokens=1)
    for _ in range(30):
        crowded.post("/v1/completions", prompt="x", model="no-such-model")
    with crowded.frozen():  # so that it does not end before anybody notices that it was left
        leaver = raw.Raw(crowded, "/v1/completions", prompt=[5] * 20, max_tokens=150, stream=True)
        leaver.until(b"\r\n\r\n")
        leaver.reset()
        eventually(lambda: crowded.metric("turnstile_requests_in_flight") == 0)
    after = scrape(crowded)
    by_outcome = {
        outcome: growth(before, after, "turnstile_requests_total", outcome=outcome)
        for outcome in ("stop", "length", "abort", "refused", "error", "timeout")
    }
    assert by_outcome["refused"] == 32
    assert by_outcome["abort"] == 1
    assert sum(by_outcome.values()) == 34


@pytest.mark.e2e
def test_b91_a_scrape_never_sees_a_counter_fall_or_a_page_too_many(crowded: ServerProcess) -> None:
    scrapes: list[Samples] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            scrapes.append(parsed(crowded.http.get("/metrics").text))
            done.wait(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    body = {"max_tokens": 40, "ignore_eos": True}
    while len(scrapes) < 4:
        crowded.gather(
            [lambda k=k: crowded.complete(crowded.tokens(50, seed=k), **body) for k in range(10)]
        )
    done.set()
    watcher.join()
    for samples in scrapes:
        assert total(samples, "turnstile_pages") == 12
        check_histograms(samples)
    for one, two in pairwise(scrapes):
        for key, value in one.items():
            if key[0].endswith(("_total", "_count", "_bucket")):
                assert two[key] >= value, key
    assert set(scrapes[0]) == set(scrapes[-1]), "series came or went"


def check_histograms(samples: Samples) -> None:
    """Buckets rise, and the last one is the count."""
    buckets: dict[str, list[tuple[float, float]]] = {}
    for (name, labels), value in samples.items():
        if name.endswith("_bucket"):
            buckets.setdefault(name, []).append((float(dict(labels)["le"]), value))
    assert buckets
    for name, counts in buckets.items():
        values = [count for _, count in sorted(counts)]
        assert values == sorted(values), name
        assert values[-1] == total(samples, name.removesuffix("_bucket") + "_count")


# -- the table and the exposition -------------------------------------------------------------


def test_b91_every_series_is_there_from_the_start_and_none_comes_later(
    serve: Serve,  # noqa: F811
) -> None:
    async def test() -> None:
        async with serve() as served:
            before = parsed((await served.client.get("/metrics")).text)
            for series in SERIES:
                check_series(series, before)
            for k in range(200):
                await served.complete(model=f"model-{k}", max_tokens=1)
            await served.complete(max_tokens=3, n=2)
            served.engine.failures[len(served.engine.streams)] = served_failure()
            await served.complete(max_tokens=3)
            after = parsed((await served.client.get("/metrics")).text)
            new = {(name, labels) for name, labels in set(after) - set(before)}
            assert {labels for _, labels in new} <= {(("tenant", "default"),)}

    asyncio.run(test())


def served_failure() -> Any:
    from server.fake_engine import Failure

    return Failure("NaN")


def check_series(series: Series, samples: Samples) -> None:
    """It is exposed, under a name that says its kind, with the labels the table names."""
    assert series.help.endswith("."), series.name
    assert not series.name.endswith("_total")
    assert re.fullmatch(r"[a-z0-9_]+", series.name)
    names = [series.family]
    if series.vllm:
        names.append(f"vllm:{series.vllm}" + ("_total" if series.kind == "counter" else ""))
    for name in names:
        exposed = name if series.kind != "histogram" else f"{name}_count"
        found = {dict(labels).get(series.label or "") for n, labels in samples if n == exposed}
        if name == names[0] and series.values:
            assert found == set(series.values), name
        assert total(samples, exposed) >= 0
        if series.kind == "counter" and series.name != "engine_starts":
            assert total(samples, exposed) == 0, f"{name} begins at 0"


def test_b91_the_waiting_are_counted_by_reason(serve: Serve) -> None:  # noqa: F811
    async def test() -> None:
        async with serve(max_num_seqs=1, delay=0.05) as served, listening(served) as port:
            body = {"prompt": "hi", "max_tokens": 200, "ignore_eos": True}
            clients = [await Raw.post(port, "/v1/completions", body) for _ in range(10)]
            await until(lambda: served.engine.snapshot.waiting == 9)
            samples = parsed((await served.client.get("/metrics")).text)
            assert total(samples, "turnstile_requests_running") == 1
            assert total(samples, "turnstile_waiting_by_reason") == 9
            assert total(samples, "turnstile_waiting_by_reason", reason="slots") == 9
            name = "vllm:num_requests_waiting_by_reason"
            assert total(samples, name, reason="capacity") == 9
            assert total(samples, name, reason="deferred") == 0
            for client in clients:
                client.reset()
            await until(lambda: served.service.metrics.in_flight == 0)

    asyncio.run(test())


def metrics(clock: float = 0.0) -> Metrics:
    return Metrics(FakeEngine(lambda generation, sample: [70]), clock=lambda: clock)


def test_b91_what_waits_by_a_rule_is_deferred_in_the_words_of_others() -> None:
    counted = metrics()
    counted.snapshot = Snapshot(
        waiting_by_reason={
            WaitReason.PAGES: 3, WaitReason.QUEUED: 2, WaitReason.PREFIX: 1,
            WaitReason.TENANT_TURN: 4,
        }
    )  # fmt: skip
    assert counted.waiting_by_kind() == {"capacity": 5, "deferred": 5}


def test_b91_who_was_not_looked_at_waits_for_what_stopped_the_look() -> None:
    counted = metrics()
    for told, expected in (
        ({"queued": 4}, {"queued": 4}),
        ({"queued": 4, "slots": 1}, {"slots": 5}),
        ({"queued": 4, "pages": 2}, {"pages": 2, "behind_head": 4}),
        ({"queued": 4, "prefix": 2}, {"queued": 4, "prefix": 2}),
    ):
        counted.snapshot = Snapshot(waiting_by_reason=told)
        found = counted.waiting_by_reason()
        assert {reason: count for reason, count in found.items() if count} == expected
        assert set(found) == set(map(str, WaitReason))


def test_b91_tenants_without_end_make_no_labels_without_end(serve: Serve) -> None:  # noqa: F811
    async def test() -> None:
        keys = [f"key-{k}" for k in range(MAX_TENANTS + 20)]
        async with serve(config={"api_key": keys}) as served:
            for key in keys:
                answer = await served.client.post(
                    "/v1/completions",
                    json={"prompt": "hi", "max_tokens": 2, "ignore_eos": True},
                    headers={"x-api-key": key},
                )
                assert answer.status_code == 200
            found = served.service.metrics.by_tenant("output_tokens")
            assert len(found) == MAX_TENANTS + 1
            assert found["_other"] == 40
            assert sum(found.values()) == 2 * len(keys)

    asyncio.run(test())


def test_b91_a_tenants_tokens_are_counted_while_they_come(serve: Serve) -> None:  # noqa: F811
    async def test() -> None:
        async with serve(delay=0.002) as served, listening(served) as port:
            body = {"prompt": "hi", "max_tokens": 200, "ignore_eos": True, "stream": True}
            client = await Raw.post(port, "/v1/completions", body)
            seen = [0.0]
            while seen[-1] < 20:
                await asyncio.sleep(0.005)
                seen.append(served.service.metrics.by_tenant("output_tokens").get("default", 0.0))
                assert seen[-1] <= served.service.metrics.generated_tokens
            client.reset()
            await until(lambda: not served.service.requests.alive())
            assert served.service.metrics.by_tenant("output_tokens")["default"] >= seen[-1]
            assert seen == sorted(seen)

    asyncio.run(test())


# -- figures that are computed ----------------------------------------------------------------


def busy(points: list[tuple[float, float]], now: float) -> float:
    counted = metrics(now)
    for time, seconds in points:
        counted.on_step(StepResult(1, 1, [], [], Snapshot(time=time, busy_seconds=seconds)))
    return counted.busy_ratio()


def test_the_busy_share_is_that_of_the_last_minute() -> None:
    assert busy([], 100.0) == 0.0
    steady = [(1000.0 + t, 0.5 * t) for t in range(200)]
    assert busy(steady, 1199.0) == pytest.approx(0.5, abs=0.02)
    assert busy(steady, 1199.0 + BUSY_WINDOW / 2) == pytest.approx(0.25, abs=0.02)
    assert busy(steady, 1199.0 + 2 * BUSY_WINDOW) == 0.0
    assert busy([(0.0, 0.0), (1.9, 1.9)], 100.0) == 0.0
    assert busy([*steady, (5000.0, 110.0)], 5000.0) == pytest.approx(10 / BUSY_WINDOW, abs=0.02)


def test_an_engine_that_never_spoke_is_a_restart_all_the_same() -> None:
    counted = metrics()
    by_name = {series.name: series for series in SERIES}
    counted.engine.epoch = 1
    assert by_name["engine_restarts"].read(counted) == 0
    counted.engine.epoch = 3
    assert by_name["engine_restarts"].read(counted) == 2
    assert by_name["engine_epoch"].read(counted) == 3
    assert by_name["engine_starts"].read(counted) == 0


def test_headroom_is_what_the_running_can_still_take() -> None:
    counted = metrics()
    assert counted.headroom_steps() == 0
    counted.info = fake_info(page_size=16)
    counted.snapshot = Snapshot(pages_free=2, pages_cached=3, unused_tokens=20, running=4)
    assert counted.headroom_steps() == (5 * 16 + 20) / 4


def test_waste_is_the_room_in_held_pages_that_nothing_was_written_to() -> None:
    results: list[StepResult] = []
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=200),
        PagePool(32, 16), ADMISSION_POLICIES["expected"](), QUEUE_POLICIES["fair"](),
    )  # fmt: skip
    loop = StepLoop(scheduler, FakeExecutor(1000), 1, results.append)
    loop.apply(Submit("a", list(range(10)), SamplingParams(), max_tokens=30, seed=1))
    while loop.has_work:
        loop.step()
        held = scheduler.pool.num_held * 16
        computed = sum(sequence.computed for sequence in scheduler.running)
        assert loop.snapshot().unused_tokens == held - computed
    assert max(result.snapshot.unused_tokens for result in results) > 0
    assert results[-1].snapshot.unused_tokens == 0


def test_the_memory_of_the_engine_process_is_told() -> None:
    from turnstile.server.watch.series import _engine_memory

    counted = metrics()
    assert _engine_memory(counted) == 0
    counted.info = fake_info(pid=Path("/proc/self").resolve().name and 1)
    assert _engine_memory(counted) > 0
    counted.info = fake_info(pid=2**22 + 1)
    assert _engine_memory(counted) == 0
