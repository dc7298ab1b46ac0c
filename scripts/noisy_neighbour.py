"""Measure what one user of tenant A feels while tenant B floods the server with long prompts.

Starts its own servers, one after the other, with a file of two tenants, and prints the latencies of
A's user, who asks one short question after another:

    baseline        beside 99 ordinary users of B (prompts about 96 tokens, answers about 64)
    flood           beside 99 users of B who send long prompts, tenants sharing by tokens (default)
    flood, fcfs     the same, first come first served: what a server without tenants does

    python scripts/noisy_neighbour.py                       about 8 minutes
    python scripts/noisy_neighbour.py --seconds 30 --rounds 1 -- --target-itl 0.1

What comes after -- is given to every server. On a machine with other work all that is measured is
the other work; --processor-time runs the engine alone in this process, on one thread, and counts
the seconds that the processor spends on it, as on a machine of its own.

Exits with 1 where the flood's p99 TTFT or ITL is more than 1.5 times the baseline's, or the same
holds without fairness too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import uvloop

from turnstile.bench.arrivals import ClosedLoop
from turnstile.bench.client import RemoteTokenizer, ServerError, first_model
from turnstile.bench.corpus import Prose
from turnstile.bench.drive import Driver, Run
from turnstile.bench.http import Pool, Response, Server
from turnstile.bench.lengths import Fixed, Uniform
from turnstile.bench.metrics import records_of
from turnstile.bench.plan import Planned, plan
from turnstile.bench.workloads import USERS_OUTPUT, USERS_PROMPT, Workload
from turnstile.engine.build import MODEST_POOL, make_scheduler
from turnstile.engine.config import EngineConfig
from turnstile.engine.loop import StepLoop
from turnstile.engine.params import SamplingParams
from turnstile.engine.protocol import StepResult, Submit
from turnstile.lab.model import LabModel, open_model

TENANTS = '[tenants.a]\nkeys = ["key-a"]\n[tenants.b]\nkeys = ["key-b"]\n'
START_S = 120.0
STOP_S = 20.0
LIMIT = 1.5
GATE = ("predictions", "covered_predictions", "predicted_seconds", "actual_seconds")

USER = Workload("user", "tenant A", 400, Uniform(32, 96), Fixed(16), users=1)


@dataclass(frozen=True)
class Scenario:
    name: str
    policy: str
    neighbours: Workload


def scenarios(neighbours: int, prompt: int) -> list[Scenario]:
    ordinary = Workload("ordinary", "", 1500, USERS_PROMPT, USERS_OUTPUT, users=neighbours)
    long = Uniform(prompt * 3 // 4, prompt * 5 // 4)
    flood = Workload("flood", "", 400, long, Fixed(16), users=neighbours)
    return [
        Scenario("baseline", "fair", ordinary),
        Scenario("flood", "fair", flood),
        Scenario("flood, fcfs", "fcfs", flood),
    ]


@dataclass
class Felt:
    """What A's user felt in all rounds, in seconds; `waiting` got no token before the end.

    `gate` are its predictions of waits and of TTFT, of everybody: how many, how many within their
    90th percentile, predicted and actual seconds.
    """

    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    waiting: int = 0
    refused: int = 0
    neighbour_tokens: float = 0.0
    gate: dict[str, list[float]] = field(default_factory=dict)

    def add(self, run: Run, neighbours: Run, metrics: str) -> None:
        for quantity in ("wait", "ttft"):
            sums = self.gate.setdefault(quantity, [0.0] * len(GATE))
            for place, name in enumerate(GATE):
                label = f'turnstile_gate_{name}_total{{quantity="{quantity}"}} '
                found = [line for line in metrics.splitlines() if line.startswith(label)]
                sums[place] += float(found[0].rsplit(" ", 1)[1])
        for record in records_of(run):
            if record.times:
                self.ttft.append(record.times[0] - record.due)
                self.itl += [after - before for before, after in pairwise(record.times)]
            elif record.outcome == "incomplete":
                # It would have taken longer still.
                self.ttft.append(run.end - run.start - record.due)
                self.waiting += 1
            else:
                self.refused += 1
        window = neighbours.end - neighbours.start
        served = [record for record in records_of(neighbours) if record.times]
        tokens = sum(record.prompt_tokens + record.output_tokens for record in served)
        self.neighbour_tokens = tokens / window


@contextlib.contextmanager
def serving(policy: str, options: Sequence[str], log: Path) -> Iterator[str]:
    """A server of its own; yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    tenants = log.with_name("tenants.toml")
    tenants.write_text(TENANTS)
    command = [
        *(sys.executable, "-m", "turnstile", "serve", "--port", str(port)),
        *("--tenants", str(tenants), "--scheduling-policy", policy),
        *("--max-queue-wait", "0", "--disable-access-log", *options),
    ]
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)  # the flood need not be finished
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()


async def ready(server: Server, log: Path) -> str:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        with contextlib.suppress(ServerError, OSError):
            return await first_model(server)
        await asyncio.sleep(0.25)
    raise SystemExit(f"The server was not ready within {START_S:.0f} s; see {log}")


_CUT: dict[tuple[str, int], list[Planned]] = {}


async def cut(workload: Workload, server: Server, model: str, text_seed: int) -> list[Planned]:
    """The requests of a workload: cut once a round, the same for every scenario."""
    key = (workload.name, text_seed)
    if key not in _CUT:
        tokenizer = RemoteTokenizer(server, model)
        _CUT[key] = await plan(workload, tokenizer, Prose(text_seed), seed=len(workload.name))
        tokenizer.close()
    return _CUT[key]


async def measure(
    url: str, scenario: Scenario, options: argparse.Namespace, text_seed: int, log: Path
) -> tuple[Run, Run, str]:
    """The runs of A's user and of B's, which begins `--warmup` seconds earlier; the metrics."""
    user, neighbours = Server.parse(url, "key-a"), Server.parse(url, "key-b")
    model = await ready(user, log)
    asks, floods = [await cut(w, user, model, text_seed) for w in (USER, scenario.neighbours)]
    seconds, warmup = options.seconds, options.warmup
    others = Driver(
        neighbours, model, floods, ClosedLoop(scenario.neighbours.users or 1), warmup + seconds
    )
    one = Driver(user, model, asks, ClosedLoop(1), seconds)
    crowd = asyncio.create_task(others.run())
    await asyncio.sleep(warmup)
    felt = await one.run()
    run = await crowd
    return felt, run, (await get(user, "/metrics")).decode()


async def get(server: Server, path: str) -> bytes:
    pool, answer = Pool(server), Response()
    await pool.send(server.request("GET", path), answer)
    pool.close()
    return answer.body


class Room:
    """The engine in this process, and users who ask again when they are answered."""

    def __init__(self, model: LabModel, scenario: Scenario) -> None:
        config = EngineConfig(scheduling_policy=scenario.policy)
        pages = MODEST_POOL // model.kv_bytes(config.page_size)
        runner = model.runner(
            num_pages=pages,
            page_size=config.page_size,
            max_tokens=config.max_num_batched_tokens,
            max_sequences=config.max_num_seqs,
        )
        scheduler = make_scheduler(config, pages, 4096)
        self.loop = StepLoop(scheduler, runner, 1, self.take, time.process_time)
        self.draw = np.random.default_rng(5)
        self.vocabulary = model.vocab_size
        self.asked: dict[str, float] = {}
        self.times: dict[str, list[float]] = {}
        self.workloads = {"a": USER, "b": scenario.neighbours}

    def ask(self, tenant: str) -> None:
        workload = self.workloads[tenant]
        prompt = int(workload.prompt.draw(1, self.draw)[0])
        outputs = int(workload.output.draw(1, self.draw)[0])
        name = f"{tenant}{len(self.asked)}"
        self.asked[name] = time.process_time()
        self.times[name] = []
        self.loop.apply(
            Submit(
                name,
                self.draw.integers(3, self.vocabulary, prompt).tolist(),
                SamplingParams(temperature=0.0),
                outputs,
                0,
                tenant=tenant,
                arrival=self.asked[name],
            )
        )

    def take(self, result: StepResult) -> None:
        now = time.process_time()
        for row in result.rows:
            if row.tokens:
                self.times[row.request_id].append(now)
            if row.finish is not None:
                self.ask(row.request_id[0])

    def run(self, seconds: float) -> None:
        end = time.process_time() + seconds
        while time.process_time() < end:
            self.loop.step()


def alone(model: LabModel, scenario: Scenario, options: argparse.Namespace) -> Felt:
    """What A's user feels of the engine alone, in seconds of processor time."""
    room = Room(model, scenario)
    for _ in range(scenario.neighbours.users or 1):
        room.ask("b")
    room.run(options.warmup)
    began, computed = time.process_time(), room.loop.scheduler.statistics.computed_tokens
    room.ask("a")
    room.run(options.seconds)
    now, felt = time.process_time(), Felt()
    for name, asked in room.asked.items():
        times = room.times[name]
        if name.startswith("a"):
            felt.ttft.append((times[0] if times else now) - asked)
            felt.itl += [after - before for before, after in pairwise(times)]
            felt.waiting += not times
    computed = room.loop.scheduler.statistics.computed_tokens - computed
    felt.neighbour_tokens = computed / (now - began)
    return felt


def table(results: dict[str, Felt]) -> str:
    def cell(values: list[float], percent: float) -> str:
        return f"{1000 * np.percentile(values, percent):.0f}" if values else "–"

    lines = [
        f"{'':<14}{'requests':>9}{'TTFT p50':>10}{'p99':>9}{'ITL p50':>10}{'p99':>9}"
        f"{'× TTFT':>9}{'× ITL':>8}{'B tok/s':>9}"
    ]
    base = results["baseline"]
    for name, felt in results.items():
        times = [ratio(felt.ttft, base.ttft), ratio(felt.itl, base.itl)]
        lines.append(
            f"{name:<14}{len(felt.ttft):>9}{cell(felt.ttft, 50):>10}{cell(felt.ttft, 99):>9}"
            f"{cell(felt.itl, 50):>10}{cell(felt.itl, 99):>9}"
            f"{times[0]:>9.2f}{times[1]:>8.2f}{felt.neighbour_tokens:>9.0f}"
        )
        if felt.waiting:
            lines.append(f"{'':<14}{felt.waiting} of them without a token at the end of the round")
        if felt.refused:
            lines.append(f"{'':<14}{felt.refused} more refused or failed")
        for quantity, (made, covered, predicted, actual) in felt.gate.items():
            if made:
                lines.append(
                    f"{'':<14}gate, {quantity} of everybody: {made:.0f} predictions, "
                    f"{covered / made:.2f} within p90, predicted ÷ actual {predicted / actual:.2f}"
                )
    return "\n".join(lines)


def ratio(values: list[float], base: list[float]) -> float:
    """Of the 99th percentiles; NaN where there are none."""
    if not values or not base:
        return float("nan")
    return float(np.percentile(values, 99) / np.percentile(base, 99))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of a round of a scenario")
    parser.add_argument("--warmup", type=float, default=15.0, help="seconds B begins earlier")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--neighbours", type=int, default=99)
    parser.add_argument("--prompt", type=int, default=1200, help="mean tokens of the flood's")
    parser.add_argument("--processor-time", action="store_true", help="the engine alone")
    parser.add_argument("--only", action="append", help="name of a scenario (repeatable)")
    parser.add_argument("options", nargs="*", help="flags of turnstile serve, after --")
    options = parser.parse_args()
    chosen = scenarios(options.neighbours, options.prompt)
    if options.only:
        chosen = [s for s in chosen if s.name in ("baseline", *options.only)]
    results = {scenario.name: Felt() for scenario in chosen}
    if options.processor_time:
        model = open_model(processor_time=True)
        for scenario in chosen:
            print(scenario.name, file=sys.stderr)
            results[scenario.name] = alone(model, scenario, options)
        options.rounds = 0
    with tempfile.TemporaryDirectory(prefix="noisy-") as directory:
        for number in range(options.rounds):
            for scenario in chosen:
                print(f"round {number + 1}: {scenario.name}", file=sys.stderr)
                log = Path(directory) / f"{scenario.name}.log"
                with (
                    serving(scenario.policy, options.options, log) as url,
                    asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
                ):
                    results[scenario.name].add(
                        *runner.run(measure(url, scenario, options, text_seed=number, log=log))
                    )
    print("One user of tenant A beside tenant B; milliseconds, × is p99 over the baseline's p99")
    print(table(results))
    base = results["baseline"]

    def holds(name: str) -> bool:
        felt = results.get(name, base)
        return max(ratio(felt.ttft, base.ttft), ratio(felt.itl, base.itl)) <= LIMIT

    return 0 if holds("flood") and not holds("flood, fcfs") else 1


if __name__ == "__main__":
    sys.exit(main())
