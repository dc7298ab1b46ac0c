"""Is the simulator right? Real runs against simulated ones, calibrated on W1 only.

Four rounds: new servers, six loads of at least 500 requests one after another, W1 first, and W1
once more. All is simulated with what W1 has taught, at the pace it had in the round, and medians
over the rounds are compared. One command, at most twenty minutes on two cores that do nothing else:

    PYTHONPATH=src python scripts/validate_simulator.py --output check.md --docs docs/simulator.md

``--raw raw.json`` keeps what was measured, after every round; ``--replay raw.json`` simulates it
again without a server, after a change of the simulator say. Nothing is ever fitted to any run but
W1. A run that fails is said and left out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import uvloop

from turnstile.bench.client import RemoteTokenizer, first_model
from turnstile.bench.corpus import Prose
from turnstile.bench.drive import Driver
from turnstile.bench.http import Server
from turnstile.bench.metrics import summarize
from turnstile.bench.plan import plan
from turnstile.bench.records import Record, read
from turnstile.simulate.calibrate import Calibration, CalibrationError, ask_server
from turnstile.simulate.cases import SEED, STAIRS, Case, cases
from turnstile.simulate.check import Measured, Round, at_pace, right, simulate_all, table
from turnstile.simulate.delivery import DeliveryError, fit_front
from turnstile.simulate.traced import TraceError, read_steps

START_S, STAIRS_S, SIMULATING_S = 120.0, 60.0, 60.0
TRACED_S = 1.0
"""Seconds after which a trace is on the disk."""
COUNTED = {
    "steps": "turnstile_steps_total",
    "preemptions": "turnstile_preemptions_total",
}
"""Counters of the engine whose growth in a run is kept with its figures."""


class RunError(Exception):
    """A run did not end as it should; the message says how."""


FAILURES = (RunError, CalibrationError, DeliveryError, TraceError, httpx.HTTPError, OSError)
"""What may go wrong with one run without a word about the others."""


@dataclass
class Served:
    """A server, and which cases it has had."""

    url: str
    trace: Path
    had: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """One load that went through.

    Attributes
    ----------
    figures
        Those of the bench, and what the engine counted meanwhile.
    answers
        When each token of each answer came, in seconds of the monotonic clock.
    before
        The cases that its server had had.
    began, ended
        On the same clock.
    """

    figures: dict[str, Any]
    answers: list[list[float]]
    before: list[str]
    began: float
    ended: float


@contextlib.contextmanager
def serving(model: str | None, port: int, flags: tuple[str, ...], files: Path) -> Iterator[Served]:
    """A server that refuses nobody, until the end of the context."""
    trace, log = files / f"{port}.trace.json", files / f"{port}.log"
    command = [sys.executable, "-m", "turnstile", "serve", *([model] if model else [])]
    command += ["--port", str(port), "--disable-access-log", "--max-num-queued-reqs", "100000"]
    command += ["--max-queue-wait", "0", "--trace", str(trace), *flags]
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while not _ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RunError(f"The server did not start: {log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield Served(url, trace)
    finally:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15.0)


def _ready(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/readyz", timeout=2.0).status_code == 200
    return False


async def climb(url: str, key: str | None, prose: Prose) -> None:
    """Send the stairs."""
    server = Server.parse(url, key)
    model = await first_model(server)
    tokenizer = RemoteTokenizer(server, model)
    for number, step in enumerate(STAIRS):
        planned = await plan(step, tokenizer, prose, SEED + number)
        await Driver(server, model, planned, step.arrivals(SEED), STAIRS_S).run()
    tokenizer.close()


async def send(case: Case, url: str, prose: Prose, limit: float) -> tuple[list[Record], float]:
    """All streams of a case at the same time, with fresh text; the records, and when they began."""
    server = Server.parse(url, case.key)
    tokenizer = RemoteTokenizer(server, model := await first_model(server))
    drivers = []
    for stream in case.streams:
        planned = await plan(stream.workload, tokenizer, prose, SEED)
        at = Server.parse(url, stream.key)
        drivers.append(Driver(at, model, planned, stream.arrivals(), limit))
    tokenizer.close()
    runs = await asyncio.gather(*(driver.run() for driver in drivers))
    start = min(run.start for run in runs)
    return [read(attempt, start) for run in runs for attempt in run.attempts], start


def counters(case: Case, url: str) -> dict[str, float]:
    """What the engine has counted so far."""
    headers = {"authorization": f"Bearer {case.key}"} if case.key else {}
    text = httpx.get(f"{url}/metrics", headers=headers, timeout=10.0).text
    found = {}
    for name, metric in COUNTED.items():
        line = re.search(rf"^{metric} (\S+)$", text, re.MULTILINE)
        if line is None:
            raise RunError(f"{url}/metrics has no {metric}.")
        found[name] = float(line.group(1))
    return found


@dataclass
class Rounds:
    """Makes the real runs.

    Attributes
    ----------
    ends
        When all must be over, on ``time.monotonic``'s clock.
    """

    model: str | None
    port: int
    requests: int
    ends: float

    def __post_init__(self) -> None:
        self._text_seeds = iter(range(time.time_ns() % 10**9, 2 * 10**9))

    def one(self) -> Round:
        """Start new servers, send them the stairs, and then every load without a pause.

        Raises
        ------
        RunError
            W1 did not end as it should: there is nothing to simulate the others with.
        """
        first, *_ = planned = cases(self.requests, 1.0)
        runs: dict[str, Run] = {}
        with contextlib.ExitStack() as stack:
            files = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            servers: dict[tuple[str, ...], Served] = {}
            for flags in dict.fromkeys(case.flags for case in planned):
                port = self.port + len(servers)
                servers[flags] = stack.enter_context(serving(self.model, port, flags, files))
            # The server of W1 last: what it has learned of itself shall be of now.
            for case in reversed({case.flags: case for case in planned}.values()):
                asyncio.run(climb(servers[case.flags].url, case.key, self._prose()))
            served = servers[first.flags]
            runs[first.name] = self._run(first, served)
            known = ask_server(served.url, first.key)
            rate = 0.8 * runs[first.name].figures["request_throughput"]
            planned = cases(self.requests, rate)
            for case in planned[1:]:
                try:
                    runs[case.name] = self._run(case, servers[case.flags])
                except FAILURES as error:
                    _tell(f"{case.name} is left out: {error}")
            again = self._run(first, served)
            time.sleep(TRACED_S)
            steps = {flags: read_steps(server.trace) for flags, server in servers.items()}
        front = fit_front(steps[first.flags], runs[first.name].answers)
        timed = [(case.flags, runs[case.name]) for case in planned if case.name in runs]
        for flags, run in [*timed, (first.flags, again)]:
            turns = steps[flags].between(run.began, run.ended).turns
            middle = (run.began + run.ended) / 2 - runs[first.name].began
            run.figures.update(
                turns_s=turns.round(6).tolist(), busy_s=float(turns.sum()), middle_s=middle
            )
        return Round(
            at_pace(replace(known, front=front), first, runs[first.name].figures),
            rate,
            {name: run.figures for name, run in runs.items()},
            {name: run.before for name, run in runs.items()},
            again.figures,
        )

    def _run(self, case: Case, served: Served) -> Run:
        limit = self.ends - time.monotonic()
        if limit < 10.0:
            raise RunError("there is no time")
        counted, before = counters(case, served.url), list(served.had)
        served.had.append(case.name)
        began = time.monotonic()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            records, start = runner.run(send(case, served.url, self._prose(), limit))
        ended = time.monotonic()
        after = counters(case, served.url)
        window = max(r.ended for r in records) - min(r.due for r in records)
        figures = summarize(records, window) | {k: after[k] - counted[k] for k in COUNTED}
        _tell(
            f"{case.name}: {figures['output_throughput']:.0f} tok/s, "
            f"{figures['completed']} completed, {ended - began:.0f} s"
        )
        if lost := figures["incomplete"] + figures["failed"]:
            raise RunError(f"{lost} requests did not end ({figures['reasons']})")
        answers = [[start + t for t in r.times] for r in records if len(r.times) == r.output_tokens]
        return Run(figures, answers, before, began, ended)

    def _prose(self) -> Prose:
        return Prose(next(self._text_seeds))


def measure_all(options: argparse.Namespace) -> Measured:
    """All rounds, as long as there is time for another."""
    began = time.monotonic()
    rounds = Rounds(
        options.model, options.port, options.requests, began + options.budget - SIMULATING_S
    )
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    measured = Measured(when, os.cpu_count() or 0, options.requests, [])
    longest = 0.0
    for number in range(1, options.rounds + 1):
        start = time.monotonic()
        if start + 1.05 * longest > rounds.ends:
            _tell(f"no time for round {number}: {rounds.ends - start:.0f} s are left")
            break
        _tell(f"round {number} of {options.rounds}, {start - began:.0f} s after the start")
        try:
            measured.rounds.append(rounds.one())
        except FAILURES as error:
            _tell(f"round {number} is left out: {error}")
        longest = max(longest, time.monotonic() - start)
        if options.raw:
            measured.write(options.raw)
    return measured


BEGIN, END = "<!-- validate_simulator: begin -->", "<!-- validate_simulator: end -->"


def put_into(document: Path, text: str) -> None:
    """Replace what is between the two marks."""
    content = document.read_text()
    before, _, rest = content.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        _tell(f"{document} has no {BEGIN} … {END}; it stays as it is")
        return
    document.write_text(f"{before}{BEGIN}\n{text}{END}{after}")


def main() -> int:
    # Servers are ended on the way out: of a plain kill too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="instead of the default model")
    parser.add_argument("--port", type=int, default=8170)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=4, help="times each load is sent")
    parser.add_argument(
        "--budget", type=float, default=1200.0, help="seconds for everything; fewer rounds fit less"
    )
    parser.add_argument("--output", type=Path, default=Path("simulator-check.md"))
    parser.add_argument("--docs", type=Path, help="document to put the table into as well")
    parser.add_argument("--raw", type=Path, help="JSON file for all figures")
    parser.add_argument("--replay", type=Path, help="a file of --raw: simulate, measure nothing")
    options = parser.parse_args()
    measured = Measured.read(options.replay) if options.replay else measure_all(options)
    if not measured.rounds:
        _tell("No round was measured: there is nothing to compare.")
        return 2
    outcomes = simulate_all(measured, _tell)
    text = table(outcomes, measured)
    options.output.write_text(text)
    print(text)
    if options.docs:
        put_into(options.docs, text)
    if options.raw:
        measured.write(options.raw, simulated={o.case.name: o.simulated for o in outcomes})
        known: Calibration = measured.rounds[0].known
        known.write(options.raw.with_suffix(".calibration.json"))
    return 0 if right(outcomes) else 1


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
