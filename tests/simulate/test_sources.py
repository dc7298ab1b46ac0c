"""Where machines and loads come from: servers, files, data sheets, flags."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from turnstile.bench.datasets import DatasetError
from turnstile.cli.main import main
from turnstile.core.cost import Coefficients
from turnstile.simulate.calibrate import (
    Calibration,
    CalibrationError,
    ask_server,
    calibrated,
    learn,
    parse_costs,
    read_calibration,
)
from turnstile.simulate.hardware import PresetError, Roofline, choose_hardware, choose_model
from turnstile.simulate.load import LoadError, read_trace
from turnstile.simulate.options import parse_users
from turnstile.simulate.setup import Front
from turnstile.simulate.timing import StepWork

EXPOSED = """\
# HELP turnstile_turn_cost_seconds …
turnstile_turn_cost_seconds{per="step"} 0.002
turnstile_turn_cost_seconds{per="token"} 1e-4
turnstile_turn_cost_seconds{per="query_key_pair"} 3e-08
turnstile_turn_cost_seconds{per="sequence"} 5e-5
turnstile_turn_cost_seconds{per="decode_read"} 9e-8
turnstile_turn_cost_seconds{per="shared_read"} 2e-8
turnstile_turn_cost_knee_tokens 16.0
turnstile_cost_samples 321.0
"""
EXPOSED += EXPOSED.replace("turn_cost", "step_cost").replace("0.002", "0.001")


def test_costs_are_read_from_the_metrics() -> None:
    assert parse_costs(EXPOSED, "turn") == Coefficients(0.002, 1e-4, 3e-8, 5e-5, 9e-8, 16, 2e-8)
    with pytest.raises(CalibrationError, match="turn_cost"):
        parse_costs("turnstile_steps_total 3", "turn")
    told = {"engine_config": {"num_pages": 100, "page_size": 16}}
    with pytest.raises(CalibrationError, match="beta"):
        learn("http://x", EXPOSED.replace("1e-4", "-1"), told)
    known = learn("http://x", EXPOSED, told)
    assert known.samples == 321
    # Time passes by whole turns; the scheduler cuts prompts by passes, as the server's does.
    slower = calibrated(known.scaled(2.0))
    assert slower.timing.coefficients.alpha == 0.004
    assert slower.make_scheduler().cost.coefficients.alpha == 0.002


def test_a_calibration_survives_its_file(tmp_path: Path) -> None:
    known = Calibration(
        source="a test",
        coefficients=Coefficients(0.002, 1e-4, 3e-8, 5e-5, 9e-8, 16, 2e-8),
        passes=Coefficients(0.001, 1e-4, 3e-8, 5e-5),
        samples=300,
        front=Front(1e-3, 2e-3),
        engine={"num_pages": 100, "page_size": 16},
    )
    path = tmp_path / "machine.json"
    known.write(path)
    assert read_calibration(path) == known
    path.write_text(json.dumps({"format": "turnstile-bench-1"}))
    with pytest.raises(CalibrationError, match="no calibration"):
        read_calibration(path)


def test_a_server_that_is_not_there_is_said_so() -> None:
    with pytest.raises(CalibrationError, match="cannot be asked"):
        ask_server("http://127.0.0.1:9")


def test_the_roofline_knows_what_fits_and_what_is_the_limit() -> None:
    h100 = Roofline(choose_hardware("h100"), choose_model("8b"))
    assert h100.kv_token == 2 * 32 * 8 * 128 * 2
    room = (80e9 * 0.9 - 2 * 8.03e9) / h100.kv_token
    assert h100.num_pages(16) == int(room // 16)
    one, many = StepWork(decodes=1, decode_context=100), StepWork(decodes=64, decode_context=6400)
    prompt = StepWork(chunks=1, chunk_tokens=8192, chunk_pairs=8192 * 4096, chunk_context=8192)
    # Reading the weights bounds a small batch, so that a second user is nearly free…
    assert h100.seconds(many, 0) < 1.2 * h100.seconds(one, 0)
    # …and computing bounds a long prompt.
    assert h100.seconds(prompt, 0) > 8192 * 2 * 8.03e9 / 989e12
    with pytest.raises(PresetError, match="devices"):
        Roofline(choose_hardware("h100"), choose_model("70b")).num_pages(16)
    assert Roofline(choose_hardware("h100", 4), choose_model("70b")).num_pages(16) > 1000
    with pytest.raises(PresetError, match="a100"):
        choose_hardware("tpu")
    with pytest.raises(PresetError, match="8b"):
        choose_model("9b")


def test_recorded_loads_are_read_in_order_of_arrival(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,374,44\n"
        "2023-11-16 18:17:02.9799600,396,109\n"
    )
    load = read_trace(azure)
    assert list(load.prompts) == [396, 374]
    assert list(load.due) == [0.0, pytest.approx(1.0)]  # type: ignore[arg-type]
    mooncake = tmp_path / "mooncake.jsonl"
    mooncake.write_text(
        '{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [7, 8]}\n'
        '{"timestamp": 500, "input_length": 700, "output_length": 3, "hash_ids": [7, 9]}\n'
    )
    load = read_trace(mooncake)
    first, second = load.tokens(0), load.tokens(1)
    assert (len(first), len(second)) == (600, 700)
    assert first[:512] == second[:512]
    assert first[512] != second[512]
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"timestamp": 0}\n')
    with pytest.raises(DatasetError, match="line 1"):
        read_trace(broken)
    azure.write_text("TIMESTAMP,ContextTokens\nnever,3\n")
    with pytest.raises(LoadError, match="line 2"):
        read_trace(azure)


def test_ranges_of_users_rise_evenly_by_ratio() -> None:
    assert parse_users(["7", "100…3200"]) == [7, 100, 200, 400, 800, 1600, 3200]
    for wrong in ("x", "0", "9-3"):
        with pytest.raises(ValueError, match="users"):
            parse_users([wrong])


def test_the_command_prints_a_line_for_each_point_and_says_what_is_an_estimate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "points.json"
    words = "simulate --hardware h100 --model 8b --rate 5 --requests 30 --page-size 16 64"
    words += f" --goodput ttft:1000 --price 3.6 --output {path}"
    assert main(words.split()) == 0
    out = capsys.readouterr().out
    assert out.startswith("ESTIMATE")
    assert "page size 16" in out
    assert "page size 64" in out
    points = json.loads(path.read_text())["points"]
    assert len(points) == 2
    figures = points[0]["figures"]
    assert points[0]["cost_per_million_tokens"]["output"] == pytest.approx(
        1000.0 / figures["output_throughput"]
    )


@pytest.mark.parametrize(("users", "warned"), [(4, False), (9, True)])
def test_batches_beyond_what_was_measured_are_warned_of(
    users: int, warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.json"
    told = {"engine": {"num_pages": 900, "page_size": 16, "model": "m"}}
    learn("here", EXPOSED + "turnstile_cost_largest_batch 4.0\n", told).write(path)
    assert main(f"simulate --from {path} --users {users} --requests 40".split()) == 0
    said = capsys.readouterr()
    assert "fitted to 321 steps of up to 4 sequences" in said.out
    assert ("up to 9 sequences were in a step" in said.err) == warned


def test_a_server_that_guesses_tokens_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.json"
    told = {"engine": {"num_pages": 900, "page_size": 16, "model": "m"}}
    counted = "turnstile_draft_tokens_total {}.0\nturnstile_accepted_draft_tokens_total 30.0\n"
    given = "turnstile_generated_tokens_total 90.0\n"
    for guessed, warned in ((40, True), (0, False)):
        learn("here", EXPOSED + counted.format(guessed) + given, told).write(path)
        assert main(f"simulate --from {path} --users 3 --requests 20".split()) == 0
        out = capsys.readouterr().out
        assert ("warning: the server guesses tokens (30 of 40 were right)" in out) == warned
        assert ("about 1.50 times as many steps here as there" in out) == warned
    # Of a server that has not said how many tokens it gave, no more is said than is known.
    assert "more steps here than there" in learn("x", EXPOSED + counted.format(40), told).describe()


def test_the_gate_can_be_bounded_from_the_command_line(
    tmp_path: Path,
) -> None:
    path = tmp_path / "points.json"
    words = "simulate --cost 0.01,0.001,0,0 --num-pages 500 --rate 200 --requests 60"
    words += f" --max-num-seqs 2 --max-num-queued-reqs 3 --output {path}"
    assert main(words.split()) == 0
    figures = json.loads(path.read_text())["points"][0]["figures"]
    assert figures["rejected"] > 20
    assert figures["rejected"] + figures["completed"] == 60


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "--from, --hardware or --cost"),
        ("--hardware h100 --cost 1,1,1,1", "one of"),
        ("--hardware h100", "--users, --rate or --trace"),
        ("--cost 1,1 --users 3", "four numbers"),
        ("--cost 1,1,0,0 --users 3", "--num-pages"),
        ("--cost 0,0,0,0 --num-pages 9 --users 3", "are 0"),
        ("--hardware h100 --users 3 --capacity users", "--goodput"),
        ("--hardware h100 --users 3 --lengths mine", "lmsys_turn1"),
        ("--hardware h100 --users 3 --admission hopeful", "guaranteed"),
        ("--hardware h100 --users 3 --replicas 0", "--replicas"),
        ("--hardware h100 --users 3 --goodput ttft", "--goodput"),
        ("--hardware h100 --users 3 --prompt-lengths many", "is not a length"),
        ("--users 3", "Say what to simulate"),
    ],
)
def test_what_cannot_be_simulated_is_told_in_a_sentence(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *words.split()]) != 0
    said = capsys.readouterr().err
    assert says in said
    assert "Error" not in said  # no type of an exception: the sentence is enough
