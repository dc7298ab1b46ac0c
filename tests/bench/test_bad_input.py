"""What a measurement cannot be made of: one line that names it, before anything is sent."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from bench.fake_server import FakeServer, Stream, in_a_thread, respond
from turnstile.cli.main import EXIT_USAGE, main

NOBODY = ["--url", "http://127.0.0.1:9"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("serve --request-rate -3", "a rate must be over 0 and finite, got -3 a second"),
        ("serve --request-rate 2 --burstiness 0", "burstiness must be over 0 and finite, got 0"),
        ("serve --max-concurrency 0", "a closed loop needs at least one user, got 0"),
        (
            "serve --request-rate 2 --max-concurrency 0",
            "at least one request must be open at a time, got 0",
        ),
        ("sweep --request-rate 1 0", "a rate must be over 0 and finite, got 0 a second"),
        ("sweep --max-concurrency 1 -1", "a closed loop needs at least one user, got -1"),
        ("serve --input-len 1-2-3", "'1-2-3' is not a length; write 128, 16-64, lognormal:"),
        ("serve --input-len 0", "'0' is not a length: a length must be at least 1 token, got 0"),
        ("serve --workload W9", "no workload named 'W9'; known are W1, W2, W3, W4, W5"),
        ("serve --trace /nowhere.jsonl", "cannot read /nowhere.jsonl: No such file or directory"),
        (
            "serve --trace /nowhere.jsonl --trace-speed 0",
            "the speed of a trace must be over 0, got 0.0",
        ),
        (
            "serve --output /nowhere/result.json",
            "nothing can be written into the directory /nowhere",
        ),
        (
            "suite --output /nowhere/result.json",
            "nothing can be written into the directory /nowhere",
        ),
    ],
)
def test_what_cannot_be_measured_is_told_in_one_line_before_anybody_is_asked(
    words: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words.split(), *NOBODY]) == EXIT_USAGE
    said = capsys.readouterr().err
    assert said.startswith(f"turnstile: {told}")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("status", "answer", "told"),
    [
        (404, {"error": {"message": "No model 'other'."}}, "No model 'other'"),
        (
            404,
            {"error": {"message": "Not Found"}},
            "no /tokenize: name its tokenizer with",
        ),
        (400, {"error": {"message": "too long"}}, "answers HTTP 400: too long\n"),
        (200, {"tokens": []}, "/tokenize answers without tokens\n"),
    ],
)
def test_a_server_that_does_not_tokenize_is_quoted_or_understood(
    status: int,
    answer: dict[str, Any],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def refuse(fake: FakeServer, path: str, writer: asyncio.StreamWriter) -> bool:
        if path == "/tokenize":
            respond(writer, status, answer)
        return path == "/tokenize"

    async def never(body: dict[str, Any], stream: Stream) -> None:
        raise AssertionError("nothing was to be asked")

    monkeypatch.setattr(FakeServer, "tell", refuse)
    file = tmp_path / "result.json"
    with in_a_thread(never) as url:
        words = ["bench", "serve", "--url", url, "--model", "other", "--output", str(file)]
        assert main(words) == 1
    assert told in capsys.readouterr().err


def test_results_of_different_work_are_not_compared_and_what_differs_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, users in (("a", 4), ("b", 8)):
        work = {"name": "W1*", "summary": f"{users} users", "users": users, "rate": None}
        result = {"format": "turnstile-bench-1", "workload": work, "length_seed": users}
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    names = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert main(["bench", "compare", *names]) == EXIT_USAGE
    assert capsys.readouterr().err == (
        "turnstile: The results are of different work: users 4 and 8; length seed 4 and 8.\n"
    )
