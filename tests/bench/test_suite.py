"""The standard workloads together, and the arithmetic of the roofline."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from bench.fake_server import FakeServer, Stream, in_a_thread, respond, serving
from tiny_models import make_tiny_llama
from turnstile.bench import suite as suite_module
from turnstile.bench.client import ServerError
from turnstile.bench.lengths import Fixed
from turnstile.bench.roofline import Demand, ModelCost, Peaks, roofline_line
from turnstile.bench.serving import started
from turnstile.bench.session import Settings
from turnstile.bench.suite import suite, suite_table
from turnstile.bench.workloads import choose
from turnstile.cli.main import main
from turnstile.models.source import resolve

COST = ModelCost(token_operations=10.0, logit_operations=3.0, step_bytes=100.0, kv_token_bytes=2.0)
PEAKS = Peaks("avx512", "int8", 2, operations=1000.0, bandwidth=2000.0)


def test_the_least_work_of_a_request_is_counted_token_by_token() -> None:
    demand = Demand.of(COST, [(4, 3)], cached=0, steps=3)
    # Computed: the prompt and the first two outputs. The second output sees 4 + 1 tokens, the
    # third 4 + 2; six tokens are written.
    assert demand.operations == 6 * 10 + 3 * 3
    assert demand.num_bytes == 3 * 100 + (5 + 6 + 6) * 2
    cached = Demand.of(COST, [(4, 3)], cached=3, steps=3)
    assert demand.operations - cached.operations == 3 * 10


def test_shares_are_of_the_machine_s_best_over_the_time_taken() -> None:
    shares = Demand(500.0, 500.0).shares(PEAKS, 2.0)
    assert (shares["operations_share"], shares["bandwidth_share"]) == (0.25, 0.125)
    assert "25% of the best" in roofline_line("W1", shares)
    assert PEAKS.better(Peaks("avx512", "int8", 2, 900.0, 2500.0)).bandwidth == 2500.0


def test_a_model_s_cost_is_that_of_its_products(tmp_path: Path) -> None:
    config = resolve(str(make_tiny_llama(tmp_path))).config
    cost = ModelCost.of(config, "bfloat16", 8.0)
    heads = config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    matrices = 2 * heads + 2 * kv_heads + 3 * config.intermediate_size
    weights = config.num_layers * config.hidden_size * matrices
    head = config.hidden_size * config.vocab_size
    assert cost.token_operations == 2 * weights
    assert cost.step_bytes == 2 * (weights + head)


async def answer(body: dict[str, Any], stream: Stream) -> None:
    await stream.head()
    for _ in range(body["max_tokens"]):
        await stream.text("a ")
    await stream.end(len(body["prompt"]), body["max_tokens"])


def test_shares_come_from_the_server_s_steps_and_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_llama(tmp_path)
    engine = {"backend": "native", "weight_format": "int8", "threads": 2}
    pool = {"kv_bytes": 1600, "num_pages": 10, "page_size": 16}
    steps = iter((100, 107))

    async def tell(fake: FakeServer, path: str, writer: asyncio.StreamWriter) -> bool:
        if path == "/server_info":
            told = {"engine": engine | pool, "engine_config": {"model": str(model)}}
            respond(writer, 200, told)
        elif path == "/metrics":
            text = f"turnstile_steps_total {next(steps)}\nturnstile_step_busy_seconds_total 1.0\n"
            respond(writer, 200, text)
        return path in ("/server_info", "/metrics")

    first, then = (Peaks("avx512", "int8", 2, 1e15, b) for b in (1e15, 4e15))
    measured = iter((first, then))
    monkeypatch.setattr(suite_module, "measure_peaks", lambda form, threads: next(measured))
    monkeypatch.setattr(FakeServer, "tell", tell)
    workload = choose("W4", requests=2, prompt=Fixed(4), output=Fixed(3))

    async def go() -> dict[str, Any]:
        async with serving(answer) as (_, server):
            return await suite(server, None, [workload], Settings(warmup=0))

    result = asyncio.run(go())
    cost = ModelCost.of(resolve(str(model)).config, "int8", 10.0)
    wanted = Demand.of(cost, [(4, 3)] * 2, 0, 7)
    seconds = result["workloads"][0]["median"]["duration_s"]
    roofline = result["workloads"][0]["roofline"]
    assert roofline["operations_per_s"] == pytest.approx(wanted.operations / seconds)
    assert roofline["bandwidth_share"] == pytest.approx(wanted.num_bytes / seconds / 4e15)
    printed = suite_table(result)
    assert "Roofline (int8, avx512, 2 threads)" in printed
    assert "over 100 %" not in printed
    roofline["bandwidth_share"] = 1.5
    assert "over 100 %" in suite_table(result)


def test_another_server_is_measured_without_a_roofline_and_its_arrivals_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "suite.json"
    words = ["bench", "suite", "--workload", "W4", "W5", "--num-prompts", "2"]
    with in_a_thread(answer) as url:
        assert main([*words, "--url", url, "--request-rate", "100", "--output", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "No roofline" in printed
    assert "Medians of 3 runs (W5* 1); times in ms." in printed
    result = json.loads(file.read_text())
    assert [w["median"]["completed"] for w in result["workloads"]] == [2, 2]
    assert "details" not in result["workloads"][0]


def test_a_server_that_does_not_come_up_is_told_with_its_last_words() -> None:
    with (
        pytest.raises(ServerError, match=r"does not come up.*no-such-flag"),
        started(["--no-such-flag"]),
    ):
        pass
