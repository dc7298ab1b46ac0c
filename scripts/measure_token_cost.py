"""CPU time of the API process: for a streamed token, for a request, and for a token of W1.

    PYTHONPATH=src python scripts/measure_token_cost.py [ROOT …] [--engine fake] [--repeat 3]

Starts the server of each ROOT (a checkout; this one by default), in turns, and sends it two loads
of 100 users over HTTP: one long answer each, and W1. Both are so many tokens and so many requests;
two sums give the price of each. The clients are this process. The engine is a process of its own
as always; `fake` computes nothing and says a token for everybody every ``--step`` seconds, `real`
is the default model, which takes the processor and its caches away as it does in service.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvloop

from turnstile.bench.http import Server
from turnstile.bench.lengths import Fixed
from turnstile.bench.session import Settings, bench
from turnstile.bench.workloads import WORKLOADS, Workload

USERS = 100
READY_SECONDS = 120.0
FAKE = """
import sys
from dataclasses import replace
from turnstile.cli import serve
from turnstile.cli.main import main
from turnstile.engine.supervisor import ProcessEngine

step = sys.argv.pop(1)
serve.make_engine = lambda config: ProcessEngine(replace(config, model=f"fake:{step}:49152"))
sys.exit(main(sys.argv[1:]))
"""


@dataclass(frozen=True, slots=True)
class Load:
    """What a workload cost the API process: CPU seconds, for so many tokens and requests."""

    seconds: float
    tokens: int
    requests: int


@dataclass(frozen=True, slots=True)
class Price:
    """Microseconds: of a streamed token, of a request, and of W1 by its tokens."""

    token: float
    request: float
    mix: float

    @classmethod
    def of(cls, long: Load, mix: Load) -> Price:
        """Solve ``seconds = token · tokens + request · requests`` for both loads."""
        determinant = long.tokens * mix.requests - mix.tokens * long.requests
        token = (long.seconds * mix.requests - mix.seconds * long.requests) / determinant
        request = (long.tokens * mix.seconds - mix.tokens * long.seconds) / determinant
        return cls(token * 1e6, request * 1e6, mix.seconds / mix.tokens * 1e6)


def start(root: Path, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """The server of a checkout."""
    flags = ["serve", "--port", str(options.port), "--disable-access-log", "--log-level", "warning"]
    fake = options.engine == "fake"
    program = ["-c", FAKE, str(options.step)] if fake else ["-m", "turnstile"]
    return subprocess.Popen(
        [sys.executable, *program, *flags],
        env={**os.environ, "PYTHONPATH": str(root / "src"), "TURNSTILE_FAULTS": "1"},
        stdout=subprocess.DEVNULL,
    )


async def load(server: Server, pid: int, workload: Workload) -> Load:
    """Send a workload; what it cost. Raises ``SystemExit`` where a request failed."""
    settings = Settings(server_pid=pid, ready_s=READY_SECONDS)
    figures: dict[str, Any] = (await bench(server, None, workload, settings))["median"]
    if figures["failed"]:
        raise SystemExit(f"{workload.name}: requests failed: {figures['reasons']}")
    tokens, requests = figures["output_tokens"], figures["completed"]
    return Load(figures["server"]["api_cpu_s"], tokens, requests)


async def measure(root: Path, options: argparse.Namespace) -> Price:
    """Start a checkout's server, load it twice, end it."""
    process = start(root, options)
    try:
        server = Server("127.0.0.1", options.port)
        await asyncio.sleep(1.0)
        if process.poll() is not None:  # another one may hold the port and would be measured
            raise SystemExit(f"The server of {root} did not start.")
        long = replace(WORKLOADS["W1"], name="long", requests=USERS, output=Fixed(options.tokens))
        return Price.of(
            await load(server, process.pid, long), await load(server, process.pid, WORKLOADS["W1"])
        )
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("roots", nargs="*", type=Path, default=[Path(__file__).parents[1]])
    parser.add_argument("--engine", choices=("fake", "real"), default="fake")
    parser.add_argument("--step", type=float, default=0.02, help="seconds a step of the fake takes")
    parser.add_argument("--tokens", type=int, default=300, help="of each of the long answers")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--port", type=int, default=8123)
    options = parser.parse_args()
    prices: dict[Path, list[Price]] = {root: [] for root in options.roots}
    for _ in range(options.repeat):
        for root, found in prices.items():
            found.append(uvloop.run(measure(root, options)))
    print(f"{'µs of CPU, medians (all)':32}{'a token':>26}{'a request':>30}{'W1, a token':>26}")
    for root, found in prices.items():
        cells = "".join(
            f"{_cell([getattr(price, name) for price in found]):>{width}}"
            for name, width in (("token", 26), ("request", 30), ("mix", 26))
        )
        print(f"{str(root)[-31:]:32}{cells}")


def _cell(values: list[float]) -> str:
    each = " ".join(f"{value:.1f}" if value < 100 else f"{value:.0f}" for value in values)
    median = statistics.median(values)
    return f"{median:.1f} ({each})" if median < 100 else f"{median:.0f} ({each})"


if __name__ == "__main__":
    main()
