"""The engine measured in this process, and what the picture of a result needs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.fake_server import Stream, in_a_thread
from tiny_models import make_tiny_llama
from turnstile.bench.offline import (
    IncompleteError,
    Sampling,
    latency,
    latency_lines,
    throughput,
    throughput_lines,
)
from turnstile.bench.workloads import choose
from turnstile.cli.main import main
from turnstile.llm import LLM

SETTINGS = {"backend": "reference", "num_pages": 64, "max_model_len": 256, "threads": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_llama(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with LLM(model, **SETTINGS) as made:
        yield made


def test_throughput_counts_exactly_the_work_of_the_workload(llm: LLM) -> None:
    from turnstile.bench.lengths import Fixed, Uniform

    workload = choose("W2", requests=6, prompt=Fixed(12), output=Uniform(3, 5))
    before = llm.get_metrics().generated_tokens
    result = throughput(llm, workload, Sampling(n=2), repeat=2, length_seed=1, text_seed=0)
    assert result["prompt_tokens"] == 72
    assert 36 <= result["output_tokens"] <= 60
    assert result["total_num_tokens"] == 72 + result["output_tokens"]
    assert result["num_requests"] == 6
    warm_up = 2 * 8
    computed = llm.get_metrics().generated_tokens - before
    assert computed == 2 * result["output_tokens"] + warm_up
    assert sorted(result["elapsed_times"])[0] <= result["elapsed_time"]
    seconds = result["elapsed_time"]
    assert result["output_tokens_per_second"] * seconds == pytest.approx(result["output_tokens"])
    assert throughput_lines(result).startswith("Throughput: ")


def test_latency_times_every_batch_but_those_to_warm_up(llm: LLM) -> None:
    before = llm.get_metrics().generated_tokens
    result = latency(
        llm,
        Sampling(),
        input_len=8,
        output_len=4,
        batch_size=3,
        num_iters_warmup=1,
        num_iters=2,
        text_seed=0,
    )
    assert llm.get_metrics().generated_tokens - before == 3 * 4 * 3
    assert len(result["latencies"]) == 2
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 2)
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert "50% percentile latency: " in latency_lines(result)
    with pytest.raises(ValueError, match="--batch-size"):
        latency(
            llm,
            Sampling(),
            input_len=8,
            output_len=4,
            batch_size=0,
            num_iters_warmup=0,
            num_iters=1,
            text_seed=0,
        )


def test_both_take_the_engine_s_flags_and_write_vllm_s_fields(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ["--model", model, "--backend", "reference", "--num-pages", "64", "--threads", "1"]
    file = tmp_path / "result.json"
    work = ["--num-prompts", "2", "--input-len", "8", "--output-len", "3"]
    words = ["bench", "throughput", *work, *engine, "--output-json", file.name]
    assert main([*words, "--result-dir", str(tmp_path)]) == 0
    assert "output tokens/s" in capsys.readouterr().out
    result = json.loads(file.read_text())
    assert result["workload"] == "W2*"
    assert result["total_num_tokens"] == 2 * (8 + 3)
    iterations = ["--num-iters", "1", "--num-iters-warmup", "0", "--batch-size", "2"]
    sizes = ["--input-len", "8", "--output-len", "2"]
    words = ["bench", "latency", *iterations, *sizes, *engine, "--output-json", str(file)]
    assert main(words) == 0
    assert "Avg latency" in capsys.readouterr().out
    assert len(json.loads(file.read_text())["latencies"]) == 1


def test_an_answer_cut_short_is_no_measurement(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from turnstile.engine.params import SamplingParams

    def short(self: Sampling, output_tokens: int) -> SamplingParams:
        return SamplingParams(max_tokens=output_tokens - 1, ignore_eos=True)

    monkeypatch.setattr(Sampling, "params", short)
    workload = choose("W2", requests=1)
    with pytest.raises(IncompleteError, match="ended after"):
        throughput(llm, workload, Sampling(), length_seed=1, text_seed=0)


def test_a_result_is_drawn_and_keeps_single_requests_where_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture, file = tmp_path / "run.svg", tmp_path / "run.json"
    words = ["bench", "serve", "--workload", "W4", "--output", str(file), "--plot", str(picture)]
    with in_a_thread(_answer) as url:
        assert main([*words, "--url", url, "--save-detailed"]) == 0
        sweep = ["bench", "sweep", "--max-concurrency", "1", "--workload", "W4", "--num-prompts"]
        points = tmp_path / "sweep.json"
        again = ["--output", str(points), "--plot", str(tmp_path / "sweep.png")]
        assert main([*sweep, "1", "--url", url, *again]) == 0
    assert picture.read_text().startswith("<?xml")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads(file.read_text())
    (detail,) = result["details"]
    assert detail["output_lens"] == [128] * 5
    assert [len(gaps) for gaps in detail["itls"]] == [127] * 5
    assert (result["num_prompts"], result["completed"], result["total_output_tokens"]) == (
        5,
        5,
        640,
    )
    assert result["mean_ttft_ms"] == result["median"]["ttft_ms"]["mean"]
    assert "details" not in json.loads(points.read_text())["points"][0]


def test_without_matplotlib_a_picture_is_refused_before_anything_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "serve", "--url", "http://127.0.0.1:9", "--plot"]
    assert main([*words, str(tmp_path / "run.gif")]) == 1
    assert ".svg" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*words, str(tmp_path / "run.svg")]) == 1
    assert "'.[bench]'" in capsys.readouterr().err


async def _answer(body: dict[str, object], stream: Stream) -> None:
    tokens = body["max_tokens"]
    assert isinstance(tokens, int)
    await stream.head()
    for _ in range(tokens):
        await stream.text("a ")
    await stream.end(64, tokens)
