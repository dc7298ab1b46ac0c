"""Is the simulator right? Real runs against simulated ones, calibrated on the first run only.

Starts real servers, sends six loads of at least 500 requests each, each three times, in turns (how
far the runs differ is the run-to-run spread), simulates the same loads with what the first run has
taught, and writes a table. One command, at most sixteen minutes on two cores:

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
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvloop

from turnstile.bench.client import RemoteTokenizer, first_model
from turnstile.bench.corpus import Prose
from turnstile.bench.drive import Driver
from turnstile.bench.http import Server
from turnstile.bench.lengths import Fixed, Uniform
from turnstile.bench.metrics import summarize
from turnstile.bench.plan import plan
from turnstile.bench.records import Record, read
from turnstile.bench.workloads import Workload
from turnstile.simulate.calibrate import Calibration, ask_server, calibrated
from turnstile.simulate.figures import measure
from turnstile.simulate.fit import fit_front
from turnstile.simulate.load import Load, Tenant, from_workload
from turnstile.simulate.run import Plant, play
from turnstile.simulate.verdict import find_pace, pace_of, values, verdicts

SEED = 101
KEYS = ("flooding-tenant", "quiet-tenant")
START_S, STAIRS_S, FITTING_S = 120.0, 60.0, 45.0


def stair(users: int, requests: int, prompt: Uniform, output: Uniform) -> Workload:
    return Workload("stairs", "", requests, prompt, output, users=users)


STAIRS = (
    *(stair(users, 3 * users, Uniform(16, 96), Uniform(16, 64)) for users in (2, 8, 16, 32)),
    stair(16, 24, Uniform(256, 1024), Uniform(32, 64)),
)
"""What a new server gets first, always the same lengths. They warm it up, and they show the
engine's fit what W1 has little of: small steps, long prompts, few rows with long contexts.
"""
RAW = "turnstile-simulator-check-2"


@dataclass(frozen=True)
class Stream:
    """Requests of one tenant."""

    workload: Workload
    key: str | None = None


@dataclass(frozen=True)
class Case:
    """One run: who asks what, and of which server."""

    name: str
    about: str
    streams: tuple[Stream, ...]
    flags: tuple[str, ...] = ()


def cases(size: int, rate: float) -> list[Case]:
    """The six, with so many requests each; ``rate`` is 80 % of what the first run got through."""

    def chat(requests: int, **arrivals: Any) -> Workload:
        return Workload("check", "", requests, **arrivals)

    share = size // 5
    long, question = Uniform(256, 512), Uniform(16, 64)
    behind = Workload("check", "", size, question, Fixed(32), users=100, prefix=512)
    return [
        Case("W1", "100 users, chat lengths", (Stream(chat(size, users=100)),)),
        Case(
            "long prompts",
            "32 users, prompts of 256 to 512",
            (Stream(Workload("check", "", size, long, question, users=32)),),
        ),
        Case("shared prefix", "100 users behind 512 common tokens", (Stream(behind),)),
        Case("Poisson", f"chat lengths, {rate:.2f}/s", (Stream(chat(size, rate=rate)),)),
        Case(
            "tiny pool",
            "60 users, 256 pages: preemption",
            (Stream(chat(size, users=60)),),
            ("--num-pages", "256"),
        ),
        Case(
            "flood",
            f"{size - share} at once from one tenant, {share} Poisson from another",
            (
                Stream(chat(size - share), KEYS[0]),
                Stream(chat(share, rate=rate / 2), KEYS[1]),
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


async def climb(url: str, key: str | None, prose: Prose) -> None:
    """Send the stairs."""
    server = Server.parse(url, key)
    model = await first_model(server)
    tokenizer = RemoteTokenizer(server, model)
    for number, step in enumerate(STAIRS):
        planned = await plan(step, tokenizer, prose, SEED + number)
        await Driver(server, model, planned, step.arrivals(SEED), STAIRS_S).run()
    tokenizer.close()


async def send(case: Case, url: str, prose: Prose, limit: float) -> list[Record]:
    """All streams of a case at the same time, with fresh text."""
    server = Server.parse(url, case.streams[0].key)
    tokenizer = RemoteTokenizer(server, model := await first_model(server))
    drivers = []
    for stream in case.streams:
        planned = await plan(stream.workload, tokenizer, prose, SEED)
        at = Server.parse(url, stream.key)
        drivers.append(Driver(at, model, planned, stream.workload.arrivals(SEED), limit))
    tokenizer.close()
    runs = await asyncio.gather(*(driver.run() for driver in drivers))
    start = min(run.start for run in runs)
    return [read(attempt, start) for run in runs for attempt in run.attempts]


COUNTED = {
    "steps": "turnstile_steps_total",
    "busy_s": "turnstile_step_busy_seconds_total",
    "preemptions": "turnstile_preemptions_total",
}
"""Counters of the engine whose growth in a run is kept with its figures."""


def counters(case: Case, url: str) -> dict[str, float]:
    key = case.streams[0].key
    headers = {"authorization": f"Bearer {key}"} if key else {}
    text = httpx.get(f"{url}/metrics", headers=headers, timeout=10.0).text
    found = {}
    for name, metric in COUNTED.items():
        line = re.search(rf"^{metric} (\S+)$", text, re.MULTILINE)
        if line is None:
            raise SystemExit(f"{url}/metrics has no {metric}.")
        found[name] = float(line.group(1))
    return found


def real_run(case: Case, url: str, text_seed: int, limit: float) -> dict[str, Any]:
    """Send a case; returns its figures, and what the engine counted meanwhile."""
    before = counters(case, url)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        records = runner.run(send(case, url, Prose(text_seed), limit))
    window = max(r.ended for r in records) - min(r.due for r in records)
    after = counters(case, url)
    return summarize(records, window) | {k: after[k] - before[k] for k in COUNTED}


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
    """Figures of each run, by the name of its case; ``before``: the cases its server had had."""

    def write(self, path: Path, **more: Any) -> None:
        content = asdict(self) | more
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
    loads = [from_workload(stream.workload, SEED) for stream in case.streams]
    if len(loads) == 1:
        return loads[0]
    due = np.concatenate([load.due for load in loads if load.due is not None])
    order = np.argsort(due, kind="stable")
    return Load(
        case.name,
        np.concatenate([load.prompts for load in loads])[order],
        np.concatenate([load.outputs for load in loads])[order],
        due=due[order],
        tenants=tuple(Tenant(stream.key or "default") for stream in case.streams),
        tenant_of=np.repeat(np.arange(len(loads)), [len(load) for load in loads])[order],
    )


def answers_before(case: Case, before: list[Case]) -> dict[str, list[int]]:
    """Lengths of the answers that a server has given by then, by tenant: admission goes by them."""
    given = {stream.key or "default": list[int]() for stream in case.streams}
    first = next(iter(given.values()))
    for number, step in enumerate(STAIRS):
        first += from_workload(step, SEED + number).outputs.tolist()
    for earlier in before:
        for stream in earlier.streams:
            outputs = from_workload(stream.workload, SEED).outputs
            given[stream.key or "default"] += outputs.tolist()
    return given


def simulated_run(
    case: Case, known: Calibration, before: list[Case], pace: float
) -> dict[str, Any]:
    pages = int(case.flags[1]) if "--num-pages" in case.flags else known.engine["num_pages"]
    known = replace(known.scaled(pace), engine=known.engine | {"num_pages": pages})
    setup = replace(calibrated(known), past_outputs=answers_before(case, before))
    load = load_of(case)
    journal = play(Plant(setup), load)
    figures = measure(journal, load, setup.num_pages, None)
    return figures | {
        "steps": journal.steps,
        "busy_s": journal.busy,
        "preemptions": journal.preemptions,
    }


# -- the table ------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """The real runs of a case, and a simulated one for each, after the same history.

    ``paces`` is how much longer the steps of each real run took than simulated ones, and ``paced``
    what is simulated where that is given: a diagnosis of what is left besides.
    """

    case: Case
    real: list[dict[str, Any]]
    simulated: list[dict[str, Any]] = field(default_factory=list)
    paces: list[float] = field(default_factory=list)
    paced: list[Mapping[str, Any]] = field(default_factory=list)


def told(numbers: Iterable[float]) -> str:
    """What was measured or simulated, once where it is always the same."""
    texts = [f"{number:.4g}" for number in numbers]
    return " / ".join(texts if len(set(texts)) > 1 else texts[:1])


def table(outcomes: list[Outcome], known: Calibration, measured: Measured, off: float) -> str:
    lines = [
        describe(known, measured, off, sorted({len(outcome.real) for outcome in outcomes})),
        "",
        "| run | figure | real | simulated | error | allowed | |",
        "|---|---|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        case = outcome.case
        for number, v in enumerate(verdicts(outcome.real, outcome.simulated)):
            why = " (spread)" if v.allowed > v.tolerance else ""
            name = f"**{case.name}**: {case.about}" if number == 0 else ""
            mark = "ok" if v.right else "**off**"
            cells = (
                name, v.label, told(v.real), told(v.simulated), f"{v.error:+.1%}",
                f"{v.allowed:.0%}{why}", mark,
            )  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
        for label, counted in (("preemptions", "preemptions"), ("steps", "steps")):
            real, ours = (values(runs, (counted,)) for runs in (outcome.real, outcome.simulated))
            lines.append(f"| | {label} | {told(real)} | {told(ours)} | | | |")
        lines.append(f"| | pace of the steps | {told(outcome.paces)} | 1 | | | |")
    judged = [v for outcome in outcomes for v in verdicts(outcome.real, outcome.simulated)]
    paced = [v for outcome in outcomes for v in verdicts(outcome.real, outcome.paced)]
    lines += [
        "",
        f"{sum(v.right for v in judged)} of {len(judged)} figures within what is allowed; "
        f"{sum(v.right for v in paced)} where the simulator is told the pace of each run, and "
        f"{sum(abs(v.error) <= v.tolerance for v in paced)} of those within the tolerance itself.",
    ]
    return "\n".join(lines) + "\n"


def describe(known: Calibration, measured: Measured, off: float, rounds: list[int]) -> str:
    """What was measured, and what the first run has taught, in a paragraph."""
    fit, front = known.coefficients, known.front
    decoding = fit.gamma if fit.epsilon is None else fit.epsilon
    return (
        f"{measured.requests} requests a run, {' or '.join(map(str, rounds))} runs of each load, "
        f"measured {measured.when} UTC, {measured.cores} cores, client on the same cores. "
        "Calibrated on the first W1 run only: "
        f"{fit.alpha * 1e3:.3f} ms a step, {fit.beta * 1e6:.1f} µs a token "
        f"(but {fit.knee} cost as many as fewer), {fit.gamma * 1e9:.0f} ns a query-key pair of a "
        f"prompt, {decoding * 1e9:.0f} ns a token that decoding rows read, "
        f"{fit.delta * 1e6:.0f} µs a sequence; "
        f"{front.per_request * 1e3:.2f} ms a request at the door, "
        f"{front.delivery * 1e3:.2f} ms to the client (what is left of the first run: {off:.1%})."
    )


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
        measured.write(options.raw, simulated={o.case.name: o.simulated for o in outcomes})
        known.write(options.raw.with_suffix(".calibration.json"))
    return 0 if all(v.right for o in outcomes for v in verdicts(o.real, o.simulated)) else 1


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
        sent: dict[str, list[str]] = {}
        for number in [*range(len(planned))] * options.rounds:
            case = planned[number]
            if time.monotonic() + longest(runs.get(case.name, [])) > ends:
                _tell(f"{case.name}: no time for another run")
                continue
            if case.flags not in urls:
                server = serving(options.model, options.port + len(urls), case.flags, log)
                url = urls[case.flags] = servers.enter_context(server)
                asyncio.run(climb(url, case.streams[0].key, Prose(next(text_seeds))))
            url = urls[case.flags]
            figures = told_run(case, url, next(text_seeds), max(10.0, ends - time.monotonic()))
            before = sent.setdefault(url, [])
            if figures is not None:
                runs.setdefault(case.name, []).append(figures | {"before": list(before)})
            before.append(case.name)
            if known is None:
                if figures is None:
                    raise SystemExit("The first run did not end: there is nothing to learn.")
                known = ask_server(url)
                rate = 0.8 * figures["request_throughput"]
                planned = cases(options.requests, rate)
    assert known is not None
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    return Measured(when, os.cpu_count() or 0, options.requests, rate, known, runs)


def longest(runs: list[dict[str, Any]]) -> float:
    """Seconds that another run of a case may take, by those there were."""
    return 1.1 * max((run["duration_s"] for run in runs), default=0.0)


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
    planned = {case.name: case for case in cases(measured.requests, measured.rate)}
    _tell("simulating")
    first = next(iter(planned.values()))
    fitted, off = fit_front(measured.known, load_of(first), measured.runs[first.name][0])
    outcomes = [
        Outcome(case, measured.runs[case.name])
        for case in planned.values()
        if case.name in measured.runs
    ]
    # Of a pass the engine counts the seconds, and what is foretold is the turn around it.
    around = 1.0
    for outcome in outcomes:
        for real in outcome.real:
            before = [planned[name] for name in real["before"]]
            at = partial(simulated_run, outcome.case, fitted, before)
            outcome.simulated.append(at(1.0))
            if real is measured.runs[first.name][0]:
                around = pace_of(real, outcome.simulated[0])
            pace, paced = find_pace(at, real, around)
            outcome.paces.append(pace)
            outcome.paced.append(paced)
    return outcomes, fitted, off


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
