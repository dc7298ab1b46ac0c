"""``turnstile run-batch``: every line gets an answer, whatever is in it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from e2e.harness import PATIENCE
from turnstile.cli.batch_file import Batch, LineError, answered, read_line
from turnstile.cli.main import main

CHAT = "/v1/chat/completions"
Handler = Callable[[httpx.Request], httpx.Response]


def line(custom_id: Any, **fields: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {}} | fields)


def echo(request: httpx.Request) -> httpx.Response:
    body = {"path": request.url.path, "asked": json.loads(request.content)}
    return httpx.Response(200, json=body, headers={"x-request-id": "r"})


def run(
    lines: Iterable[str],
    handler: Handler = echo,
    done: frozenset[str] = frozenset(),
    in_flight: int = 4,
) -> tuple[Batch, list[dict[str, Any]]]:
    output = io.StringIO()
    batch = Batch(lines, output, done, in_flight=in_flight)

    async def go() -> None:
        transport = httpx.MockTransport(handler)
        async with httpx.AsyncClient(transport=transport, base_url="http://batch") as client:
            await batch.run(client)

    asyncio.run(go())
    return batch, [json.loads(text) for text in output.getvalue().splitlines()]


def test_every_line_is_answered_once() -> None:
    lines = [line(f"r{i}", body={"n": i}) for i in range(50)]
    batch, answers = run(lines)
    assert sorted(a["custom_id"] for a in answers) == sorted(f"r{i}" for i in range(50))
    for answer in answers:
        assert answer["error"] is None
        assert answer["response"]["status_code"] == 200
        assert answer["response"]["request_id"] == "r"
        asked = answer["response"]["body"]["asked"]
        assert answer["custom_id"] == f"r{asked['n']}"
    assert (batch.answered, batch.failed) == (50, 0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nonsense", "JSON"),
        ("[" * 100_000, "JSON"),
        ("[]", "object"),
        (line(None), "custom_id"),
        (line(""), "custom_id"),
        (line("a", method="GET"), "method"),
        (line("a", url="/v1/embeddings"), "url"),
        (line("a", body=[]), "body"),
        (line("a", body={"stream": True}), "stream"),
    ],
)
def test_what_is_wrong_with_a_line_is_said_and_the_others_go_on(text: str, says: str) -> None:
    with pytest.raises(LineError, match=says):
        read_line(text)
    batch, answers = run([text, "", line("good")])
    (error,) = [a["error"] for a in answers if a["error"] is not None]
    assert error["code"] == "invalid_line"
    assert error["message"].startswith("Line 1: ")
    assert (batch.answered, batch.failed) == (1, 1)


def test_an_id_must_not_come_twice() -> None:
    batch, answers = run([line("a"), line("a")])
    assert (batch.answered, batch.failed) == (1, 1)
    assert {a["custom_id"] for a in answers} == {"a"}


def test_refused_for_now_is_asked_again_and_refused_for_good_is_not() -> None:
    seen: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        name = json.loads(request.content)["name"]
        seen.append(name)
        if name == "later" and seen.count("later") < 3:
            return httpx.Response(503, json={}, headers={"retry-after-ms": "1"})
        if name == "never":
            return httpx.Response(503, json={}, headers={"x-should-retry": "false"})
        return httpx.Response(400 if name == "wrong" else 200, json={})

    names = ["later", "never", "wrong"]
    batch, answers = run([line(name, body={"name": name}) for name in names], handler)
    codes = {a["custom_id"]: a["response"]["status_code"] for a in answers}
    assert codes == {"later": 200, "never": 503, "wrong": 400}
    assert [seen.count(name) for name in names] == [3, 1, 1]
    assert (batch.answered, batch.failed) == (1, 2)


def test_a_broken_connection_fails_its_line_alone() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if json.loads(request.content).get("bad"):
            raise httpx.ReadError("gone")
        return echo(request)

    batch, answers = run([line("a", body={"bad": 1}), line("b")], handler)
    (error,) = [a["error"] for a in answers if a["error"] is not None]
    assert error["code"] == "connection_error"
    assert (batch.answered, batch.failed) == (1, 1)


def test_as_many_are_under_way_as_asked_for_and_no_more() -> None:
    now, most = 0, 0
    full = asyncio.Event()

    async def handler(request: httpx.Request) -> httpx.Response:
        nonlocal now, most
        now += 1
        most = max(most, now)
        if now == 3:
            full.set()
        await asyncio.wait_for(full.wait(), PATIENCE)
        await asyncio.sleep(0)
        now -= 1
        return httpx.Response(200, json={})

    run([line(f"{i}") for i in range(20)], handler, in_flight=3)  # type: ignore[arg-type]
    assert most == 3


def test_who_keeps_the_input_waiting_holds_up_nobody_under_way() -> None:
    answered_first = threading.Event()

    def lines() -> Iterator[str]:
        yield line("a")
        assert answered_first.wait(PATIENCE), "the first waited for the second"
        yield line("b")

    def handler(request: httpx.Request) -> httpx.Response:
        answered_first.set()
        return echo(request)

    batch, _ = run(lines(), handler, in_flight=2)
    assert (batch.answered, batch.failed) == (2, 0)


def test_a_file_is_gone_on_with() -> None:
    _, answers = run([line("a"), line("b")])
    written = [json.dumps(answer) for answer in answers]
    assert answered(written) == {"a", "b"}
    assert answered([*written[:1], written[1][:-5]]) == {answers[0]["custom_id"]}
    assert answered([json.dumps({**answers[0], "response": None})]) == frozenset()
    batch, again = run([line("a"), line("c")], done=frozenset(["a"]))
    assert [a["custom_id"] for a in again] == ["c"]
    assert batch.summary() == "1 answered, 0 failed, 1 answered before"


def test_an_output_that_exists_is_not_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text(line("a"))
    target.write_text("mine")
    assert main(["run-batch", "-i", str(source), "-o", str(target)]) == 2
    assert "--resume" in capsys.readouterr().err
    assert target.read_text() == "mine"
    assert main(["run-batch", "-i", str(tmp_path / "none"), "-o", "-"]) == 2


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's requests are answered without an engine; one whose body is no JSON is a 400."""

    def answer(request: httpx.Request) -> httpx.Response:
        try:
            msgspec.json.decode(request.content)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return httpx.Response(400, json={"error": {"code": "invalid_json"}})
        return echo(request)

    @contextlib.asynccontextmanager
    async def client(*_: object) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.MockTransport(answer)
        async with httpx.AsyncClient(transport=transport, base_url="http://batch") as client:
            yield client

    monkeypatch.setattr("turnstile.cli.run_batch._engine_here", client)


@pytest.mark.usefixtures("no_engine")
def test_bytes_and_numbers_that_are_none_fail_their_lines_alone(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    good = [line(f"good{i}").encode() for i in range(3)]
    source.write_bytes(
        b"\n".join(
            [
                b"\xef\xbb\xbf" + good[0],
                b"\xff\xfe{}",
                line("not a number", body={"temperature": float("nan")}).encode(),
                line("half a pair", body={"prompt": "\ud800"}).encode(),
                line("bytes", body={"prompt": "?"}).encode().replace(b"?", b"\xc3"),
                line("half an id \ud800").encode(),
                *good[1:],
            ]
        )
    )
    assert main(["run-batch", "-i", str(source), "-o", str(target), "--in-flight", "2"]) == 1
    answers = [json.loads(text) for text in target.read_text("utf-8").splitlines()]
    came = {a["custom_id"]: a["response"] and a["response"]["status_code"] for a in answers}
    assert came == {
        "good0": 200, "good1": 200, "good2": 200, "half an id \ud800": 200,
        "not a number": 400, "half a pair": 400, "bytes": 400, None: None,
    }  # fmt: skip
    assert main(["run-batch", "-i", str(source), "-o", str(target), "--resume"]) == 1
    again = [json.loads(text) for text in target.read_text("utf-8").splitlines()[len(answers) :]]
    assert {a["custom_id"] for a in again} == {"not a number", "half a pair", "bytes", None}


@pytest.mark.usefixtures("no_engine")
def test_an_output_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in"
    source.write_text("\n".join(line(f"r{i}") for i in range(9)))
    assert main(["run-batch", "-i", str(source), "-o", "/dev/full"]) == 1
    said = capsys.readouterr().err
    assert "No space left on device" in said
    assert "TaskGroup" not in said


def run_in_process(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """The command itself, going on with an output that is there."""
    command = [sys.executable, "-m", "turnstile", "run-batch", "--resume"]
    return subprocess.run(
        [*command, "-i", str(source), "-o", str(target)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.e2e
@pytest.mark.model
def test_the_model_answers_a_file(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    fields = {"temperature": 0, "max_tokens": 8}
    question = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    lines = [
        line("chat", body=question | fields),
        line("text", url="/v1/completions", body={"prompt": "1, 2, 3,"} | fields),
    ]
    source.write_text("\n".join([*lines, line("wrong", body={"messages": []})]))
    target.write_text('{"custom_id": "cut o')
    ended = run_in_process(source, target)
    assert ended.returncode == 1, ended.stderr
    assert "2 answered, 1 failed" in ended.stderr
    _, *texts = target.read_text().splitlines()
    answers = {a["custom_id"]: a["response"] for a in map(json.loads, texts)}
    assert answers["chat"]["body"]["choices"][0]["message"]["content"].startswith("The capital")
    assert answers["text"]["body"]["usage"]["completion_tokens"] == 8
    assert answers["wrong"]["status_code"] == 400
    lines = source.read_text().splitlines()[:2]
    source.write_text("\n".join(lines))
    again = run_in_process(source, target)
    assert again.returncode == 0, again.stderr
    assert "0 answered, 0 failed, 2 answered before" in again.stderr
