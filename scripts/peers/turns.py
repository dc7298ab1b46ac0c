"""One peer's turn: start it, send it the workloads, stop it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import uvloop
from peers.catalog import Peer

from turnstile.bench.arrivals import ClosedLoop
from turnstile.bench.client import LocalTokenizer, wait_until_ready
from turnstile.bench.corpus import Prose
from turnstile.bench.http import Server
from turnstile.bench.metrics import Figures, summarize
from turnstile.bench.plan import plan
from turnstile.bench.processes import ProcessTree
from turnstile.bench.records import Record
from turnstile.bench.session import LENGTH_SEED, ServerError, Settings, bench
from turnstile.bench.workloads import Workload

START_S = 900.0
STOP_S = 20.0
TURN_S = 1800.0
SAMPLE_S = 1.0


class PeerError(RuntimeError):
    """The peer did not start, or ended in its turn; the message names its log."""


def take_turn(
    peer: Peer,
    workloads: Sequence[Workload],
    *,
    port: int,
    model: str,
    text_seed: int,
    log: Path,
) -> dict[str, Figures]:
    """The figures of each workload, by its name.

    Raises
    ------
    PeerError
        If the peer does not come up, or ends before it is told to.
    """
    measure = _in_process if peer.in_process else _over_http
    began = time.monotonic()
    with _process(peer, log) as process:
        return measure(peer, process, workloads, began, port, model, text_seed, log)


@contextlib.contextmanager
def _process(peer: Peer, log: Path) -> Iterator[subprocess.Popen[str]]:
    with log.open("a") as output:
        # A session of its own, so that workers it leaves behind can be ended with it.
        process = subprocess.Popen(
            peer.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if peer.in_process else output,
            stderr=output,
            text=True,
            env={**os.environ, **peer.environment},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[str]) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _over_http(
    peer: Peer,
    process: subprocess.Popen[str],
    workloads: Sequence[Workload],
    began: float,
    port: int,
    model: str,
    text_seed: int,
    log: Path,
) -> dict[str, Figures]:
    server = Server("127.0.0.1", port)
    name = _wait_until_ready(peer, process, server, log)
    started = time.monotonic() - began
    found = {}
    for number, workload in enumerate(workloads):
        _say(peer, workload)
        settings = Settings(
            text_seed=text_seed + number,
            server_pid=process.pid,
            tokenizer=model,
            time_limit=TURN_S,
        )
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                result = runner.run(bench(server, name, workload, settings))
        except ServerError as error:
            raise PeerError(f"{peer.name} in {workload.name}: {error}") from None
        found[workload.name] = {**result["median"], "start_s": started}
        if process.poll() is not None:
            raise PeerError(f"{peer.name} ended with {process.returncode} in {workload.name}")
    return found


def _wait_until_ready(peer: Peer, process: subprocess.Popen[str], server: Server, log: Path) -> str:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(ServerError):
            return asyncio.run(wait_until_ready(server, 1.0))
    if process.poll() is not None:
        raise PeerError(f"{peer.name} ended with {process.returncode}; see {log}")
    raise PeerError(f"{peer.name} was not ready within {START_S:.0f} s; see {log}")


def _in_process(
    peer: Peer,
    process: subprocess.Popen[str],
    workloads: Sequence[Workload],
    began: float,
    port: int,
    model: str,
    text_seed: int,
    log: Path,
) -> dict[str, Figures]:
    assert process.stdout is not None
    _expect(peer, process.stdout, "ready", log)
    started = time.monotonic() - began
    tokenizer = LocalTokenizer(model)
    found = {}
    for number, workload in enumerate(workloads):
        _say(peer, workload)
        planned = asyncio.run(plan(workload, tokenizer, Prose(text_seed + number), LENGTH_SEED))
        arrivals = workload.arrivals(LENGTH_SEED)
        job = {
            "requests": [(p.prompt, p.output_tokens) for p in planned],
            "users": arrivals.users if isinstance(arrivals, ClosedLoop) else None,
            "times": None if isinstance(arrivals, ClosedLoop) else arrivals.times,
        }
        figures = _run_job(peer, process, job, log)
        found[workload.name] = {**figures, "start_s": started}
    return found


def _run_job(peer: Peer, process: subprocess.Popen[str], job: dict[str, Any], log: Path) -> Figures:
    assert process.stdin is not None
    assert process.stdout is not None
    with tempfile.TemporaryDirectory() as directory:
        files = {"plan": f"{directory}/plan.json", "result": f"{directory}/result.json"}
        Path(files["plan"]).write_text(json.dumps(job))
        tree = ProcessTree(process.pid)
        tree.start()
        process.stdin.write(json.dumps(files) + "\n")
        process.stdin.flush()
        asyncio.run(_watch(tree, peer, process.stdout, log))
        result = json.loads(Path(files["result"]).read_text())
    records = [_record(*row) for row in result["rows"]]
    figures = summarize(records, result["window"])
    return figures | {"server": tree.figures(figures["output_tokens"])}


async def _watch(tree: ProcessTree, peer: Peer, output: IO[str], log: Path) -> None:
    watching = asyncio.create_task(tree.watch())
    try:
        await asyncio.to_thread(_expect, peer, output, "done", log)
    finally:
        watching.cancel()


def _record(due: float, sent: float, ended: float, times: list[float], wanted: int) -> Record:
    """One row of a driver. Prompt tokens are not told by it, and are the same for all peers."""
    whole = len(times) == wanted
    return Record(
        "completed" if whole else "failed",
        due,
        sent,
        ended,
        times,
        0,
        len(times),
        wanted,
        "usage",
        reason=None if whole else "another number of tokens than asked for",
        status=200,
    )


def _expect(peer: Peer, output: IO[str], word: str, log: Path) -> None:
    for line in output:
        if line.strip() == word:
            return
    raise PeerError(f"{peer.name} ended before it said {word}; see {log}")


def _say(peer: Peer, workload: Workload) -> None:
    print(f"  {peer.name}: {workload.name}", file=sys.stderr, flush=True)
