"""A sweep over loads, and the capacity it names."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bench.fake_server import Stream, serving
from turnstile.bench.session import Settings
from turnstile.bench.sweep import capacity, sweep, sweep_table
from turnstile.bench.workloads import choose
from turnstile.cli.main import main


def point(label: str, attainment: float | None) -> dict[str, Any]:
    return {"label": label, "median": {"goodput": {"attainment": attainment}}}


def test_the_capacity_is_the_last_load_before_the_first_that_fails() -> None:
    assert capacity([point("1/s", 1.0), point("2/s", 0.99), point("4/s", 0.5)]) == "2/s"
    assert capacity([point("1/s", 1.0), point("2/s", 0.5), point("4/s", 1.0)]) == "1/s"
    assert capacity([point("1/s", 0.9)]) is None
    assert capacity([point("1/s", None)]) is None


def test_every_load_is_measured_with_fresh_text_and_gets_a_line() -> None:
    async def script(body: dict[str, Any], stream: Stream) -> None:
        await stream.head()
        for _ in range(body["max_tokens"]):
            await stream.text("a")
        await stream.end(len(body["prompt"]), body["max_tokens"])

    async def go() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        async with serving(script) as (fake, server):
            points = [(f"{n} users", choose("W4", requests=3, users=n)) for n in (1, 3)]
            settings = Settings(warmup=0, limits={"e2el": 60_000.0})
            return await sweep(server, "fake", points, settings), fake.requests

    result, requests = asyncio.run(go())
    prompts = [tuple(r["prompt"]) for r in requests]
    assert len(set(prompts)) == len(prompts) == 6
    assert result["capacity"] == "3 users"
    lines = sweep_table(result).splitlines()
    assert lines[0].startswith("times in ms  ")
    assert [(line.split()[0], line.split()[-1]) for line in lines[1:3]] == [
        ("1", "100.0%"),
        ("3", "100.0%"),
    ]
    assert "up to: 3 users" in lines[3]


def test_a_sweep_needs_loads_of_one_kind(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--request-rate", "1", "--max-concurrency", "2"]):
        assert main(["bench", "sweep", *words])
        assert "--max-concurrency" in capsys.readouterr().err
