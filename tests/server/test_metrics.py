"""Metrics tell the truth: one request counts once, tokens once, and series are there at zero."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.fake_engine import Failure, FakeEngine, fake_info
from server.served import Raw, Serve, Served, listening, until
from turnstile.core.cost import Coefficients
from turnstile.engine.client import EngineState
from turnstile.engine.protocol import Snapshot, StepResult
from turnstile.server.watch.exposition import Collector
from turnstile.server.watch.histogram import ITL_BOUNDS, Histogram, token_bounds
from turnstile.server.watch.metrics import Metrics
from turnstile.server.watch.stats import ThroughputLine
from turnstile.simulate.calibrate import CalibrationError, calibrated, learn


async def scrape(served: Served) -> dict[tuple[str, str], float]:
    """Samples by name and label values (without the model's name and the engine's number)."""
    text = (await served.client.get("/metrics")).text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[sample.name, ",".join(labels.values())] = sample.value
    return found


VLLM_NAMES = [
    "vllm:request_inference_time_seconds_count",
    "vllm:request_params_n_count",
    "vllm:request_params_max_tokens_count",
    "vllm:request_max_num_generation_tokens_count",
    "vllm:request_prefill_kv_computed_tokens_count",
    "vllm:request_num_preemptions_count",
    "vllm:request_prefill_time_seconds_count",
    "vllm:request_decode_time_seconds_count",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:time_to_first_token_seconds_count",
    "vllm:inter_token_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:request_time_per_output_token_seconds_count",
    "vllm:request_queue_time_seconds_count",
    "vllm:request_prompt_tokens_count",
    "vllm:request_generation_tokens_count",
    "vllm:iteration_tokens_total_count",
]


def test_all_series_are_there_at_zero_before_the_first_request(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served:
            found = await scrape(served)
            for name in VLLM_NAMES:
                assert found[name, ""] == 0, name
            for outcome in ("stop", "length", "abort", "error", "timeout", "refused"):
                assert found["turnstile_requests_total", outcome] == 0
            for state in ("free", "held", "cached"):
                assert ("turnstile_pages", state) in found
            assert found["turnstile_pages", "free"] == 64
            assert found["vllm:request_success_total", "length"] == 0
            assert found["vllm:admission_rejections_total", "max_num_queued_reqs"] == 0
            assert found["vllm:cache_config_info", "16,64"] == 1

    asyncio.run(test())


def test_a_simulator_learns_the_machine_from_what_the_server_tells(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served:
            metrics = (await served.client.get("/metrics")).text
            told = (await served.client.get("/server_info")).json()
            with pytest.raises(CalibrationError, match="measured 0 steps"):
                learn("here", metrics, told)
            metrics = re.sub(r'((?:turn|step)_cost_seconds{per="step"}) .*', r"\1 0.002", metrics)
            metrics = re.sub(r"\n(turnstile_cost_samples) .*", r"\n\1 500.0", metrics)
            known = learn("here", metrics, told)
            assert known.coefficients == Coefficients(0.002, 0.0, 0.0, 0.0, 0.0, zeta=0.0)
            setup, info = calibrated(known), served.engine.info
            assert info is not None
            assert (setup.num_pages, setup.page_size) == (info.num_pages, info.page_size)
            assert setup.scheduler.max_num_seqs == info.max_num_seqs
            assert setup.scheduler.max_model_len == info.max_model_len
            assert setup.max_num_queued_reqs == served.service.config.max_num_queued_reqs
            assert setup.max_queue_wait == served.service.config.max_queue_wait

    asyncio.run(test())


def test_vllm_names_can_be_left_out(serve: Serve) -> None:
    async def test() -> None:
        async with serve(config={"metrics_compat": "none"}) as served:
            text = (await served.client.get("/metrics")).text
            assert "vllm:" not in text
            assert "turnstile_ttft_seconds_bucket" in text

    asyncio.run(test())


# B91: one request is one, whatever n; tokens equal the usage; outcomes add up to what was sent.
def test_counts_agree_with_what_clients_were_told(serve: Serve) -> None:
    async def test() -> None:
        async with serve("hello world") as served:
            told = 0
            for body in (
                {"max_tokens": 5},
                {"n": 3, "max_tokens": 4},
                {"prompt": [[70], [71]], "n": 2, "max_tokens": 2},
                {"stop": "lo", "max_tokens": 20},
                {"stream": False, "max_tokens": 1},
            ):
                answer = await served.complete(**body)
                told += answer.json()["usage"]["completion_tokens"]
            await served.complete(max_tokens=-1)
            await served.complete(model="unknown-model")
            served.engine.failures[len(served.engine.streams)] = Failure("NaN")
            await served.complete(max_tokens=3)
            found = await scrape(served)
            assert found["turnstile_generated_tokens_total", ""] == told
            assert found["vllm:generation_tokens_total", ""] == told
            outcomes = {
                key[1]: value for key, value in found.items()
                if key[0] == "turnstile_requests_total"
            }  # fmt: skip
            assert outcomes == {
                "stop": 1, "length": 4, "refused": 2, "error": 1, "abort": 0, "timeout": 0,
            }  # fmt: skip
            assert found["turnstile_ttft_seconds_count", ""] == 5
            assert found["turnstile_e2e_seconds_count", ""] == 5
            assert found["turnstile_queue_seconds_count", ""] == 6
            assert found["turnstile_requests_in_flight", ""] == 0

    asyncio.run(test())


# B91: who was told 503 was refused, and did not leave by itself.
def test_what_the_engine_does_not_take_is_refused_and_not_aborted(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served:
            served.engine.state = EngineState.RECOVERING
            assert (await served.complete()).status_code == 503
            assert (await served.complete(prompt=["a", "b"])).status_code == 503
            outcomes = served.service.metrics.outcomes
            assert (outcomes["refused"], outcomes["abort"]) == (2, 0)
            assert served.service.metrics.in_flight == 0
            assert not served.service.requests.alive()

    asyncio.run(test())


# B95: k tokens make k - 1 gaps.
def test_the_first_token_is_no_gap(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served:
            await served.complete(max_tokens=7, n=2)
            found = await scrape(served)
            assert found["turnstile_itl_seconds_count", ""] == 2 * 6
            assert found["turnstile_tpot_seconds_count", ""] == 1

    asyncio.run(test())


def test_names_from_requests_make_no_labels(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served:
            before = set(await scrape(served))
            for number in range(50):
                await served.complete(model=f"model-{number}")
                await served.client.get(f"/route-{number}")
            after = set(await scrape(served))
            assert after == before

    asyncio.run(test())


def test_waiting_and_running_are_told_apart(serve: Serve) -> None:
    async def test() -> None:
        async with serve(max_num_seqs=1, delay=0.05) as served, listening(served) as port:
            body = {"prompt": "hi", "max_tokens": 200, "ignore_eos": True}
            clients = [await Raw.post(port, "/v1/completions", body) for _ in range(10)]
            await until(lambda: served.engine.snapshot.running == 1)
            await until(lambda: served.engine.snapshot.waiting == 9)
            found = await scrape(served)
            assert found["turnstile_requests_running", ""] == 1
            assert found["turnstile_requests_waiting", ""] == 9
            assert found["turnstile_requests_in_flight", ""] == 10
            for client in clients:
                client.reset()
            await until(lambda: served.service.metrics.in_flight == 0)

    asyncio.run(test())


def test_openmetrics_is_spoken_where_it_is_asked_for(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served:
            headers = {"accept": "application/openmetrics-text; version=1.0.0"}
            answer = await served.client.get("/metrics", headers=headers)
            assert answer.headers["content-type"].startswith("application/openmetrics-text")
            assert answer.text.endswith("# EOF\n")

    asyncio.run(test())


def metrics() -> Metrics:
    return Metrics(FakeEngine(lambda generation, sample: [70]))


def test_engine_counters_go_on_when_the_engine_is_restarted() -> None:
    counted = metrics()
    counted.on_step(StepResult(1, 5, [], [], Snapshot(step=5, preemptions=3)))
    assert counted.engine_total("preemptions") == 3
    counted.on_step(StepResult(2, 1, [], [], Snapshot(step=1, preemptions=0)))
    assert counted.engine_total("preemptions") == 3
    counted.on_step(StepResult(2, 2, [], [], Snapshot(step=2, preemptions=2)))
    assert counted.engine_total("preemptions") == 5
    assert counted.engine_total("step") == 7
    assert counted.engine_starts == 2


def test_accepted_guesses_are_told_by_place_and_go_on_when_the_engine_is_restarted() -> None:
    counted = metrics()
    assert counted.accepted_by_place() == {"0": 0}
    counted.info = fake_info(draft_tokens=3)
    assert counted.accepted_by_place() == {"0": 0, "1": 0, "2": 0}
    counted.info = fake_info(draft_tokens=2)
    counted.on_step(StepResult(1, 5, [], [], Snapshot(step=5, accepted_by_place=[7, 2])))
    counted.on_step(StepResult(2, 1, [], [], Snapshot(step=1, accepted_by_place=[0, 0])))
    assert counted.accepted_by_place() == {"0": 7, "1": 2}
    counted.on_step(StepResult(2, 2, [], [], Snapshot(step=2, accepted_by_place=[3, 1])))
    assert counted.accepted_by_place() == {"0": 10, "1": 3}
    (family,) = (
        found
        for found in Collector(counted, vllm=True).collect()
        if found.name == "vllm:spec_decode_num_accepted_tokens_per_pos"
    )
    assert [(s.labels["position"], s.value) for s in family.samples] == [("0", 10), ("1", 3)]


def test_a_histogram_counts_each_value_under_its_bound() -> None:
    histogram = Histogram([1, 2.5])
    for value, times in ((0.5, 1), (1.0, 2), (1.1, 1), (99, 3)):
        histogram.observe(value, times)
    assert histogram.buckets() == [("1.0", 3), ("2.5", 4), ("+Inf", 7)]
    assert histogram.count == 7
    assert histogram.total == pytest.approx(0.5 + 2 + 1.1 + 297)


def test_the_bounds_of_histogram_buckets_ascend() -> None:
    assert token_bounds(20) == (1, 2, 5, 10, 20)
    assert list(ITL_BOUNDS) == sorted(set(ITL_BOUNDS))


def test_the_throughput_line_is_silent_while_idle() -> None:
    counted = metrics()
    line = ThroughputLine(counted, 0.0)
    assert line.write(10.0) is None
    counted.prompt_tokens, counted.generated_tokens = 100, 50
    counted.snapshot = Snapshot(running=2, waiting=1, pages_total=10, pages_held=5,
                                prefix_queries=100, prefix_hits=25)  # fmt: skip
    said = line.write(20.0)
    assert said is not None
    assert re.search(
        r"Avg prompt throughput: 10.0 tokens/s, Avg generation throughput: 5.0 tokens/s, "
        r"Running: 2 reqs, Waiting: 1 reqs, CPU KV cache usage: 50.0%, "
        r"Prefix cache hit rate: 25.0%",
        said,
    )
    counted.generated_tokens += 1
    counted.snapshot = Snapshot()
    assert line.write(30.0) is not None, "the end of a burst has its tokens in a line"
    assert line.write(40.0) is None, "a line of zeros says nothing"
    assert line.write(50.0) is None


def test_queue_time_and_metrics_are_in_the_answer(serve: Serve) -> None:
    async def test() -> None:
        async with serve(delay=0.002) as served:
            answer: dict[str, Any] = (await served.complete(max_tokens=5)).json()
            told = answer["metrics"]
            assert told["time_to_first_token_ms"] > 0
            assert 0 <= told["queue_time_ms"] <= told["time_to_first_token_ms"]
            assert told["mean_itl_ms"] > 0
            assert answer["timings"]["predicted_n"] == 5
            many = (await served.complete(max_tokens=5, n=2)).json()
            assert many["metrics"] is None

    asyncio.run(test())
