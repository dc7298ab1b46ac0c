"""Is the simulator right? Real runs against simulated ones, calibrated on the first run only.

Starts real servers, sends six loads of at least 500 requests each, every one of them up to three
times (the difference is the run-to-run spread), simulates the same loads with what the first run
has taught, and writes a table. One command, about sixteen minutes on two cores:

    PYTHONPATH=src python scripts/validate_simulator.py --output check.md --docs docs/simulator.md

``--raw raw.json`` keeps what was measured; ``--replay raw.json`` simulates it again without a
server, after a change of the simulator say. Nothing is ever fitted to any but the first run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvloop

from turnstile.bench.arrivals import Arrivals, ClosedLoop, OpenLoop, gamma
from turnstile.bench.client import RemoteTokenizer, first_model
from turnstile.bench.corpus import Prose
from turnstile.bench.drive import Driver
from turnstile.bench.http import Server
from turnstile.bench.lengths import Fixed, LengthDistribution, Uniform
from turnstile.bench.metrics import summarize
from turnstile.bench.plan import plan
from turnstile.bench.records import Record, read
from turnstile.bench.workloads import USERS_OUTPUT, USERS_PROMPT, Workload
from turnstile.simulate.calibrate import Calibration, ask_server, calibrated
from turnstile.simulate.figures import measure
from turnstile.simulate.fit import figure_at, fit_front
from turnstile.simulate.load import Load, Tenant
from turnstile.simulate.run import Plant, play

SEED = 101
KEYS = ("flooding-tenant", "quiet-tenant")
START_S = 120.0
STAIRS = ((2, 6), (6, 24), (16, 64), (32, 96))
"""Closed loops of so many users, with so many requests, before each run. They warm up; they show
the engine's fit steps of all sizes (W1 has few that are small); and how long they take tells the
pace of the machine just then.
"""
STAIRS_S = 60.0
RAW = "turnstile-simulator-check-1"
# what is compared: label, where it is, how far off it may be
ROWS = (
    ("output tok/s", ("output_throughput",), 0.05),
    ("TTFT p50 ms", ("ttft_ms", "p50"), 0.10),
    ("TTFT p99 ms", ("ttft_ms", "p99"), 0.20),
    ("TPOT p50 ms", ("tpot_ms", "p50"), 0.10),
    ("TPOT p99 ms", ("tpot_ms", "p99"), 0.20),
    ("ITL p50 ms", ("itl_ms", "p50"), 0.10),
    ("ITL p99 ms", ("itl_ms", "p99"), 0.20),
    ("E2E p50 ms", ("e2el_ms", "p50"), 0.10),
    ("E2E p99 ms", ("e2el_ms", "p99"), 0.20),
)


@dataclass(frozen=True)
class Stream:
    """Requests of one tenant."""

    prompt: LengthDistribution
    output: LengthDistribution
    requests: int
    users: int | None = None
    rate: float | None = None
    prefix: int = 0
    key: str | None = None

    def arrivals(self) -> Arrivals:
        if self.users is not None:
            return ClosedLoop(self.users)
        if self.rate is None:
            return OpenLoop((0.0,) * self.requests)
        times = gamma(self.rate, self.requests, 1.0, np.random.default_rng([SEED, 2]))
        return OpenLoop(tuple(times.tolist()))

    def workload(self) -> Workload:
        return Workload("check", "", self.requests, self.prompt, self.output, prefix=self.prefix)


@dataclass(frozen=True)
class Case:
    """One run: who asks what, and of which server."""

    name: str
    about: str
    streams: tuple[Stream, ...]
    flags: tuple[str, ...] = ()


def cases(size: int, rate: float) -> list[Case]:
    """The six, with so many requests each; ``rate`` is 80 % of what the first run got through."""
    chat = (USERS_PROMPT, USERS_OUTPUT)
    share = size // 5
    return [
        Case("W1", "100 users, chat lengths", (Stream(*chat, size, users=100),)),
        Case(
            "long prompts",
            "32 users, prompts of 256 to 768",
            (Stream(Uniform(256, 768), Uniform(16, 64), size, users=32),),
        ),
        Case(
            "shared prefix",
            "100 users behind 512 common tokens",
            (Stream(Uniform(16, 64), Fixed(32), size, users=100, prefix=512),),
        ),
        Case("Poisson", f"chat lengths, {rate:.2f}/s", (Stream(*chat, size, rate=rate),)),
        Case(
            "tiny pool",
            "60 users, 256 pages: preemption",
            (Stream(*chat, size, users=60),),
            ("--num-pages", "256"),
        ),
        Case(
            "flood",
            f"{size - share} at once from one tenant, {share} Poisson from another",
            (
                Stream(*chat, size - share, key=KEYS[0]),
                Stream(*chat, share, rate=rate / 2, key=KEYS[1]),
            ),
            ("--api-key", KEYS[0], "--api-key", KEYS[1]),
        ),
    ]


# -- the real runs --------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(model: str | None, port: int, flags: tuple[str, ...], log: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "turnstile", "serve", *([model] if model else [])]
    command += ["--port", str(port), "--disable-access-log", "--max-num-queued-reqs", "100000"]
    command += ["--max-queue-wait", "0"]
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*command, *flags], stdout=output, stderr=output, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/readyz", timeout=2.0).status_code == 200:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"The server did not start; see {log}.")
            time.sleep(0.2)
        yield url
    finally:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15.0)


async def climb(url: str, key: str | None, prose: Prose) -> float:
    """Send the stairs, with the same lengths every time; returns how many seconds they took."""
    server = Server.parse(url, key)
    model = await first_model(server)
    tokenizer = RemoteTokenizer(server, model)
    seconds = 0.0
    for users, requests in STAIRS:
        workload = Workload("stairs", "", requests, Uniform(16, 96), Uniform(16, 64))
        planned = await plan(workload, tokenizer, prose, SEED + users)
        began = time.monotonic()
        await Driver(server, model, planned, ClosedLoop(users), STAIRS_S).run()
        seconds += time.monotonic() - began
    tokenizer.close()
    return seconds


async def send(case: Case, url: str, prose: Prose, limit: float) -> list[Record]:
    """All streams of a case at the same time, with fresh text."""
    server = Server.parse(url, case.streams[0].key)
    model = await first_model(server)
    tokenizer = RemoteTokenizer(server, model)
    drivers = []
    for stream in case.streams:
        planned = await plan(stream.workload(), tokenizer, prose, SEED)
        at = Server.parse(url, stream.key)
        drivers.append(Driver(at, model, planned, stream.arrivals(), limit))
    tokenizer.close()
    runs = await asyncio.gather(*(driver.run() for driver in drivers))
    start = min(run.start for run in runs)
    return [read(attempt, start) for run in runs for attempt in run.attempts]


def real_run(case: Case, url: str, text_seed: int, limit: float) -> dict[str, Any]:
    """The stairs, then a case; returns its figures, and how long the stairs took."""
    prose = Prose(text_seed)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        stairs = runner.run(climb(url, case.streams[0].key, prose))
        before = _preemptions(case, url)
        records = runner.run(send(case, url, prose, limit))
    window = max(r.ended for r in records) - min(r.due for r in records)
    figures = summarize(records, window)
    figures["preemptions"] = _preemptions(case, url) - before
    return figures | {"stairs_s": stairs}


def _preemptions(case: Case, url: str) -> float:
    key = case.streams[0].key
    headers = {"authorization": f"Bearer {key}"} if key else {}
    lines = httpx.get(f"{url}/metrics", headers=headers, timeout=10.0).text.splitlines()
    name = "turnstile_preemptions_total "
    return next(float(line.removeprefix(name)) for line in lines if line.startswith(name))


@dataclass(frozen=True)
class Measured:
    """All that was measured, and what the server had learned of itself after the first run."""

    when: str
    cores: int
    requests: int
    rate: float
    """Of the Poisson arrivals."""
    known: Calibration
    runs: dict[str, list[dict[str, Any]]]
    """Figures of each run, by the name of its case."""

    def write(self, path: Path, simulated: dict[str, Any] | None = None) -> None:
        content = asdict(self) | ({"simulated": simulated} if simulated else {})
        path.write_text(json.dumps({"format": RAW} | content, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Measured:
        content = json.loads(path.read_text())
        if content.pop("format", None) != RAW:
            raise SystemExit(f"{path} is no file of --raw.")
        content.pop("simulated", None)
        return cls(**content | {"known": Calibration.of(content["known"])})


# -- the simulated ones ---------------------------------------------------------------------------


def load_of(case: Case) -> Load:
    """The same requests, length by length and arrival by arrival."""
    parts = []
    for number, stream in enumerate(case.streams):
        workload = stream.workload()
        rng = np.random.default_rng(SEED)
        prompts = workload.prompt.draw(stream.requests, rng) + stream.prefix
        outputs = workload.output.draw(stream.requests, rng)
        arrivals = stream.arrivals()
        times = arrivals.times if isinstance(arrivals, OpenLoop) else [0.0] * stream.requests
        parts.append((np.asarray(times), prompts, outputs, np.full(stream.requests, number)))
    due, prompts, outputs, owner = (np.concatenate(p) for p in zip(*parts, strict=True))
    order = np.argsort(due, kind="stable")
    first = case.streams[0]
    return Load(
        case.name,
        prompts[order],
        outputs[order],
        due=None if first.users else due[order],
        users=first.users or 0,
        tenants=tuple(Tenant(s.key or "default") for s in case.streams),
        tenant_of=owner[order],
        shared=(((0, first.prefix),),) * len(due) if first.prefix else None,
    )


def simulated_run(case: Case, known: Calibration) -> dict[str, Any]:
    pages = int(case.flags[1]) if "--num-pages" in case.flags else known.engine["num_pages"]
    setup = calibrated(replace(known, engine=known.engine | {"num_pages": pages}))
    load = load_of(case)
    journal = play(Plant(setup), load)
    figures = measure(journal, load, setup.num_pages, None)
    figures["preemptions"] = figures["machine"]["preemptions"]
    return figures


# -- the table ------------------------------------------------------------------------------------


@dataclass
class Verdict:
    label: str
    real: list[float]
    simulated: float
    tolerance: float

    @property
    def mean(self) -> float:
        return sum(self.real) / len(self.real)

    @property
    def error(self) -> float:
        return self.simulated / self.mean - 1.0

    @property
    def spread(self) -> float:
        return (max(self.real) - min(self.real)) / self.mean

    @property
    def right(self) -> bool:
        return abs(self.error) <= max(self.tolerance, self.spread)


@dataclass
class Outcome:
    case: Case
    real: list[dict[str, Any]] = field(default_factory=list)
    simulated: dict[str, Any] = field(default_factory=dict)

    def verdicts(self) -> list[Verdict]:
        found = []
        for label, path, tolerance in ROWS:
            values = [figure_at(figures, path) for figures in self.real]
            ours = figure_at(self.simulated, path)
            if ours is not None and all(v for v in values):
                found.append(Verdict(label, [v for v in values if v], ours, tolerance))
        return found


def table(outcomes: list[Outcome], known: Calibration, measured: Measured, off: float) -> str:
    fit, front = known.coefficients, known.front
    decoding = fit.gamma if fit.epsilon is None else fit.epsilon
    rounds = sorted({len(outcome.real) for outcome in outcomes})
    lines = [
        f"{measured.requests} requests a run, {' or '.join(map(str, rounds))} runs of each load, "
        f"measured {measured.when} UTC, {measured.cores} cores, client on the same cores. "
        "Calibrated on the first W1 run only: "
        f"{fit.alpha * 1e3:.3f} ms a step, {fit.beta * 1e6:.1f} µs a token, "
        f"(but {fit.knee} cost as many as fewer), {fit.gamma * 1e9:.0f} ns a query-key pair of a "
        f"prompt, {decoding * 1e9:.0f} ns a token that decoding rows read, "
        f"{fit.delta * 1e6:.0f} µs a sequence, "
        f"scatter {known.spread:.0%}; {front.per_request * 1e3:.2f} ms a request at the door, "
        f"{front.delivery * 1e3:.2f} ms and {front.per_row * 1e6:.0f} µs a row to the client "
        f"(what is left of the first run: {off:.1%}).",
        "",
        "| run | figure | real | simulated | error | allowed | |",
        "|---|---|---|---|---|---|---|",
    ]
    right = total = 0
    for outcome in outcomes:
        case = outcome.case
        for number, v in enumerate(outcome.verdicts()):
            total += 1
            right += v.right
            real = " / ".join(f"{value:.4g}" for value in v.real)
            allowed = f"{max(v.tolerance, v.spread):.0%}" + (
                " (spread)" if v.spread > v.tolerance else ""
            )
            name = f"**{case.name}**: {case.about}" if number == 0 else ""
            mark = "ok" if v.right else "**off**"
            cells = (name, v.label, real, f"{v.simulated:.4g}", f"{v.error:+.1%}", allowed, mark)
            lines.append(f"| {' | '.join(cells)} |")
        real = " / ".join(f"{figures['preemptions']:.0f}" for figures in outcome.real)
        lines.append(f"| | preemptions | {real} | {outcome.simulated['preemptions']} | | | |")
        stairs = [figures["stairs_s"] for figures in outcome.real if "stairs_s" in figures]
        if stairs:
            told = " / ".join(f"{seconds:.1f}" for seconds in stairs)
            lines.append(f"| | the machine: stairs, s | {told} | | | | |")
    lines += ["", f"{right} of {total} figures within what is allowed."]
    return "\n".join(lines) + "\n"


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
    parser.add_argument("--rounds", type=int, default=3, help="times each load is sent")
    parser.add_argument(
        "--budget",
        type=float,
        default=960.0,
        help="seconds for everything; what does not fit is left out",
    )
    parser.add_argument("--output", type=Path, default=Path("simulator-check.md"))
    parser.add_argument("--docs", type=Path, help="document to put the table into as well")
    parser.add_argument("--raw", type=Path, help="JSON file for all figures")
    parser.add_argument("--replay", type=Path, help="a file of --raw: simulate, measure nothing")
    options = parser.parse_args()
    if options.replay:
        measured = Measured.read(options.replay)
    else:
        measured = measure_all(options, time.monotonic() + options.budget)
        if options.raw:
            measured.write(options.raw)
    outcomes, known, off = simulate_all(measured)
    text = table(outcomes, known, measured, off)
    options.output.write_text(text)
    print(text)
    if options.docs:
        put_into(options.docs, text)
    if options.raw:
        measured.write(options.raw, {o.case.name: o.simulated for o in outcomes})
        known.write(options.raw.with_suffix(".calibration.json"))
    return 0 if all(v.right for o in outcomes for v in o.verdicts()) else 1


FITTING_S = 90.0


def measure_all(options: argparse.Namespace, ends: float) -> Measured:
    """All real runs, as long as there is time: every load once, then every load again, so that a
    machine that is slower for a while shows in the spread.
    """
    ends -= FITTING_S
    text_seeds = iter(range(time.time_ns() % 10**9, 2 * 10**9))
    runs: dict[str, list[dict[str, Any]]] = {}
    known: Calibration | None = None
    planned = cases(options.requests, 1.0)
    with contextlib.ExitStack() as servers:
        log = options.output.with_suffix(".log")
        urls: dict[tuple[str, ...], str] = {}
        for case in planned:
            if case.flags not in urls:
                server = serving(options.model, options.port + len(urls), case.flags, log)
                urls[case.flags] = servers.enter_context(server)
        for _ in range(options.rounds):
            for number in range(len(planned)):
                if time.monotonic() > ends:
                    break
                case = planned[number]
                url = urls[case.flags]
                figures = told_run(case, url, next(text_seeds), max(10.0, ends - time.monotonic()))
                if figures is not None:
                    runs.setdefault(case.name, []).append(figures)
                if known is None:
                    if figures is None:
                        raise SystemExit("The first run did not end: there is nothing to learn.")
                    known = ask_server(url)
                    rate = 0.8 * figures["request_throughput"]
                    planned = cases(options.requests, rate)
    assert known is not None
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    return Measured(when, os.cpu_count() or 0, options.requests, rate, known, runs)


def told_run(case: Case, url: str, text_seed: int, limit: float) -> dict[str, Any] | None:
    """Figures of a run, None where it did not end as it should: said, and left out."""
    began = time.monotonic()
    figures = real_run(case, url, text_seed, limit)
    lost = figures["incomplete"] + figures["failed"]
    _tell(
        f"{case.name}: {figures['output_throughput']:.0f} tok/s, "
        f"{figures['completed']} completed, {lost} not, {time.monotonic() - began:.0f} s"
        + (f" ({figures['reasons']})" if figures["reasons"] else "")
    )
    return None if lost else figures


def simulate_all(measured: Measured) -> tuple[list[Outcome], Calibration, float]:
    """Everything once more, with what the first run has taught."""
    planned = cases(measured.requests, measured.rate)
    _tell("fitting what is around the engine to the first run")
    first = planned[0]
    fitted, off = fit_front(measured.known, load_of(first), measured.runs[first.name][0])
    outcomes = [
        Outcome(case, measured.runs[case.name]) for case in planned if case.name in measured.runs
    ]
    for outcome in outcomes:
        _tell(f"simulating {outcome.case.name}")
        outcome.simulated = simulated_run(outcome.case, fitted)
    return outcomes, fitted, off


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
