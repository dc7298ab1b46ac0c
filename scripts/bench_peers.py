"""Measure several servers in turns with the same work, and print medians and ratios.

Absolute figures drift from minute to minute on a shared machine, so the servers take turns: every
round measures each of them once, with the same lengths and the same fresh text.

    python scripts/bench_peers.py --workload W1 --rounds 3 \
        "turnstile=http://127.0.0.1:8000 python -m turnstile serve" \
        "llama=http://127.0.0.1:8080 venv-llama/bin/llama-server -m model.gguf -np 32" \
        "vllm=http://127.0.0.1:8100"

With a command after the address, the server is started for its turn and stopped after it, so that
only one is running at a time, and CPU time and peak memory of its processes are reported. Without
a command the server must run already. The first server is the one that the ratios are of.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from turnstile.bench.http import Server
from turnstile.bench.session import ServerError, Settings, bench, first_model
from turnstile.bench.workloads import Workload, choose

START_S = 300.0
STOP_S = 20.0

# label, where it lies in the figures, whether more is better
ROWS: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    ("output tok/s", ("output_throughput",), True),
    ("TTFT p50 ms", ("ttft_ms", "p50"), False),
    ("TTFT p99 ms", ("ttft_ms", "p99"), False),
    ("TPOT p50 ms", ("tpot_ms", "p50"), False),
    ("TPOT p99 ms", ("tpot_ms", "p99"), False),
    ("ITL p99 ms", ("itl_ms", "p99"), False),
    ("E2E p50 ms", ("e2el_ms", "p50"), False),
    ("peak PSS MB", ("server", "pss_peak_mb"), False),
    ("CPU s", ("server", "cpu_s"), False),
)


@dataclass(frozen=True)
class Peer:
    name: str
    url: str
    command: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Peer":
        name, _, rest = text.partition("=")
        words = shlex.split(rest)
        if not name or not words:
            raise SystemExit(f'{text!r}: write "NAME=http://HOST:PORT [command …]"')
        return cls(name, words[0], tuple(words[1:]))


@contextlib.contextmanager
def running(peer: Peer, log: Path) -> Iterator[int | None]:
    """The peer's server, started and stopped again where it has a command; its process id."""
    if not peer.command:
        yield None
        return
    with log.open("ab") as output:
        # a session of its own, so that workers it leaves behind can be ended with it
        process = subprocess.Popen(
            peer.command, stdout=output, stderr=output, start_new_session=True
        )
    try:
        wait_until_ready(peer, process, log)
        yield process.pid
    finally:
        stop(process)


def wait_until_ready(peer: Peer, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"{peer.name} ended with {process.returncode}; see {log}")
        with contextlib.suppress(ServerError):
            asyncio.run(asyncio.wait_for(first_model(Server.parse(peer.url)), 10.0))
            return
        time.sleep(0.25)
    raise SystemExit(f"{peer.name} was not ready within {START_S:.0f} s; see {log}")


def stop(process: subprocess.Popen[bytes]) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)


def measure(peer: Peer, workload: Workload, text_seed: int, directory: Path) -> dict[str, Any]:
    with running(peer, directory / f"{peer.name}.log") as pid:
        settings = Settings(text_seed=text_seed, server_pid=pid)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(bench(Server.parse(peer.url), None, workload, settings))


def value_at(figures: dict[str, Any], path: tuple[str, ...]) -> float | None:
    value: Any = figures
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def medians(rounds: list[dict[str, Any]]) -> dict[str, float]:
    found = {}
    for label, path, _ in ROWS:
        values = [v for v in (value_at(r["median"], path) for r in rounds) if v is not None]
        if values:
            found[label] = statistics.median(values)
    return found


def print_table(peers: list[Peer], results: dict[str, list[dict[str, Any]]]) -> None:
    figures = {peer.name: medians(results[peer.name]) for peer in peers}
    ours, others = peers[0].name, [peer.name for peer in peers[1:]]
    print(f"{'':<14}" + "".join(f"{n:>14}" for n in [ours, *others]) + "   against the best other")
    for label, _, more in ROWS:
        values = [figures[n].get(label) for n in [ours, *others]]
        cells = "".join(f"{'–' if v is None else format(v, '.1f'):>14}" for v in values)
        rest = [v for v in values[1:] if v is not None]
        best = (max(rest) if more else min(rest)) if rest else None
        ratio = f"{values[0] / best:>10.2f} ×" if values[0] is not None and best else ""
        print(f"{label:<14}{cells}{ratio}")
    for name, rounds in results.items():
        for number, result in enumerate(rounds, 1):
            lost = result["median"]["failed"] + result["median"]["incomplete"]
            if lost:
                reasons = ", ".join(result["median"]["reasons"])
                print(f"{name}, round {number}: {lost:.0f} requests lost ({reasons})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peers", nargs="+", metavar="NAME=URL [COMMAND]")
    parser.add_argument("--workload", default="W1")
    parser.add_argument("--request-rate", type=float, help="for W5")
    parser.add_argument("--num-prompts", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("bench-peers"), help="a directory")
    options = parser.parse_args()
    peers = [Peer.parse(text) for text in options.peers]
    if len({peer.name for peer in peers}) < len(peers):
        parser.error("two servers have the same name")
    workload = choose(options.workload, requests=options.num_prompts, rate=options.request_rate)
    options.output.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[dict[str, Any]]] = {peer.name: [] for peer in peers}
    for number in range(options.rounds):
        text_seed = time.time_ns()  # the same text for all of a round, fresh in every round
        # who goes first changes, so that no server always meets the machine warm
        for peer in peers[number % len(peers) :] + peers[: number % len(peers)]:
            print(f"round {number + 1} of {options.rounds}: {peer.name}", file=sys.stderr)
            results[peer.name].append(measure(peer, workload, text_seed, options.output))
        path = options.output / f"{workload.name.rstrip('*')}.json"
        path.write_text(json.dumps(results, indent=1))
    print(f"{workload.name}: {workload.summary}; medians of {options.rounds} rounds in turns")
    print_table(peers, results)
    lost = any(not r["median"]["completed"] for rounds in results.values() for r in rounds)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
