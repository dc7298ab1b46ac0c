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
from dataclasses import dataclass
from pathlib import Path

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


class PeerError(RuntimeError):
    """The peer did not start, or ended in its turn; the message names its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What every peer of a round gets alike.

    ``model`` is where the tokenizer is found, ``text_seed`` where in the prose the prompts begin,
    ``time_limit`` the seconds that a workload may take.
    """

    workloads: Sequence[Workload]
    port: int
    model: str
    text_seed: int
    time_limit: float = 600.0


def take_turn(peer: Peer, round_: Round, log: Path) -> Iterator[tuple[str, Figures]]:
    """Each workload's name and figures, as soon as it has been measured.

    Raises
    ------
    PeerError
        If the peer does not come up, or ends before it is told to.
    """
    began = time.monotonic()
    with _process(peer, log) as process:
        turn = (_InProcess if peer.in_process else _OverHttp)(peer, process, round_, log)
        turn.wait_until_ready()
        started = time.monotonic() - began
        for number, workload in enumerate(round_.workloads):
            print(f"  {peer.name}: {workload.name}", file=sys.stderr, flush=True)
            figures = turn.measure(workload, round_.text_seed + number)
            yield workload.name, {**figures, "start_s": started}


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


class _OverHttp:
    """A peer that is a server."""

    def __init__(
        self, peer: Peer, process: subprocess.Popen[str], round_: Round, log: Path
    ) -> None:
        self._peer, self._process, self._round, self._log = peer, process, round_, log
        self._server = Server("127.0.0.1", round_.port)
        self._name = ""

    def wait_until_ready(self) -> None:
        peer, process = self._peer, self._process
        deadline = time.monotonic() + START_S
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(ServerError):
                self._name = asyncio.run(wait_until_ready(self._server, 1.0))
                return
        if process.poll() is not None:
            raise PeerError(f"{peer.name} ended with {process.returncode}; see {self._log}")
        raise PeerError(f"{peer.name} was not ready within {START_S:.0f} s; see {self._log}")

    def measure(self, workload: Workload, text_seed: int) -> Figures:
        peer, process = self._peer, self._process
        settings = Settings(
            text_seed=text_seed,
            server_pid=process.pid,
            tokenizer=self._round.model,
            time_limit=self._round.time_limit,
        )
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                result = runner.run(bench(self._server, self._name, workload, settings))
        except ServerError as error:
            raise PeerError(f"{peer.name} in {workload.name}: {error}") from None
        if process.poll() is not None:
            raise PeerError(f"{peer.name} ended with {process.returncode} in {workload.name}")
        return result["median"]


class _InProcess:
    """A peer without a server, behind a driver that takes plans from its standard input."""

    def __init__(
        self, peer: Peer, process: subprocess.Popen[str], round_: Round, log: Path
    ) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._input, self._output = process.stdin, process.stdout
        self._peer, self._process, self._log = peer, process, log
        self._time_limit = round_.time_limit
        self._tokenizer = LocalTokenizer(round_.model)

    def wait_until_ready(self) -> None:
        self._expect("ready")

    def measure(self, workload: Workload, text_seed: int) -> Figures:
        planned = asyncio.run(plan(workload, self._tokenizer, Prose(text_seed), LENGTH_SEED))
        arrivals = workload.arrivals(LENGTH_SEED)
        job = {
            "requests": [(p.prompt, p.output_tokens) for p in planned],
            "users": arrivals.users if isinstance(arrivals, ClosedLoop) else None,
            "times": None if isinstance(arrivals, ClosedLoop) else arrivals.times,
        }
        with tempfile.TemporaryDirectory() as directory:
            files = {"plan": f"{directory}/plan.json", "result": f"{directory}/result.json"}
            Path(files["plan"]).write_text(json.dumps(job))
            tree = ProcessTree(self._process.pid)
            tree.start()
            self._input.write(json.dumps(files) + "\n")
            self._input.flush()
            asyncio.run(self._watch(tree, workload.name))
            result = json.loads(Path(files["result"]).read_text())
        records = [_record(*row) for row in result["rows"]]
        figures = summarize(records, result["window"])
        return figures | {"server": tree.figures(figures["output_tokens"])}

    async def _watch(self, tree: ProcessTree, workload: str) -> None:
        """Wait for the end of the workload, and end a driver that takes too long over it."""
        watching = asyncio.create_task(tree.watch())
        done = asyncio.create_task(asyncio.to_thread(self._expect, "done"))
        try:
            if not (await asyncio.wait([done], timeout=self._time_limit))[0]:
                self._process.kill()  # which ends the thread that reads what it says
                with contextlib.suppress(PeerError):
                    await done
                raise PeerError(
                    f"{self._peer.name} took longer than {self._time_limit:g} s in {workload}"
                )
            await done
        finally:
            watching.cancel()

    def _expect(self, word: str) -> None:
        for line in self._output:
            if line.strip() == word:
                return
        raise PeerError(f"{self._peer.name} ended before it said {word}; see {self._log}")


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
