"""Measure Turnstile and other servers in turns with the same work; medians, ratios, a JSON file.

    python scripts/bench_peers.py --directory peers --install     # once: builds, about an hour
    python scripts/bench_peers.py --directory peers --repeat 3 --workloads W1 W3 W4

Absolute figures drift from minute to minute on a shared machine, so the servers take turns: every
round starts each of them once, sends it the workloads, and stops it. All get the same lengths and
the same text, fresh in every round; one runs at a time. A peer that is not installed, or fails, is
left out of the tables, with the reason; what was measured is written after every workload.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from pathlib import Path
from typing import Any

from peers.catalog import Peer, catalog
from peers.install import install
from peers.tables import losses, medians, ratios, table
from peers.turns import PeerError, Round, take_turn

from turnstile.bench.workloads import WORKLOADS, Workload, choose
from turnstile.models.default_model import NAME
from turnstile.models.source import resolve


class Comparison:
    """The rounds so far."""

    def __init__(self, peers: list[Peer], workloads: list[Workload], output: Path) -> None:
        self.peers, self.workloads, self.output = peers, workloads, output
        self.rounds: dict[str, dict[str, list[Any]]] = {w.name: {} for w in workloads}
        self.failures: list[str] = []
        self.began = time.time()

    def take(self, peer: Peer, round_: Round) -> None:
        """One peer's turn. A failure is noted, and the comparison goes on."""
        try:
            for name, figures in take_turn(peer, round_, self.output / f"{peer.name}.log"):
                self.rounds[name].setdefault(peer.name, []).append(figures)
                self.write()
        except PeerError as error:
            print(f"  {error}", file=sys.stderr)
            self.failures.append(str(error))
            self.write()

    def write(self) -> None:
        """Write what there is."""
        result = {
            "command": " ".join(sys.argv),
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.began)),
            "machine": {"cpu": _cpu(), "cores": len(os.sched_getaffinity(0))},
            "failures": self.failures,
            "workloads": {
                name: {
                    "medians": (figures := {p: medians(r) for p, r in rounds.items()}),
                    "ratios": ratios(figures, self.peers),
                    "rounds": rounds,
                }
                for name, rounds in self.rounds.items()
            },
        }
        (self.output / "comparison.json").write_text(json.dumps(result, indent=1))

    def print(self) -> None:
        """Print the tables."""
        for workload in self.workloads:
            rounds = self.rounds[workload.name]
            figures = {p.name: medians(rounds[p.name]) for p in self.peers if p.name in rounds}
            count = max((len(r) for r in rounds.values()), default=0)
            print(f"\n{workload.name}: {workload.summary}; medians of {count} rounds in turns")
            if figures:
                print("\n".join(table(figures, self.peers)))
            for name, own in rounds.items():
                for reason, number in losses(own).items():
                    print(f"{name} lost {number}: {reason}")
        for failure in self.failures:
            print(f"failed: {failure}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True, help="where the peers live")
    parser.add_argument("--install", action="store_true", help="install what is missing, and end")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), metavar="W")
    parser.add_argument("--peers", nargs="+", metavar="NAME", help="default: all installed")
    parser.add_argument("--repeat", type=int, default=3, help="rounds")
    parser.add_argument("--num-prompts", type=int, help="of every workload; marks it as changed")
    parser.add_argument("--request-rate", type=float, help="of W5, in requests per second")
    parser.add_argument(
        "--time-limit", type=float, default=600.0, help="seconds a workload may take a peer"
    )
    parser.add_argument("--model", default=NAME, help="GGUF file or name")
    parser.add_argument("--port", type=int, default=8180)
    parser.add_argument("--output", type=Path, default=Path("bench-peers"), help="a directory")
    return parser.parse_args()


def workloads_of(options: argparse.Namespace) -> list[Workload]:
    return [
        choose(
            name,
            requests=options.num_prompts,
            rate=options.request_rate if name == "W5" else None,
        )
        for name in options.workloads
    ]


def chosen_peers(options: argparse.Namespace, model: Path) -> list[Peer]:
    known = catalog(options.directory.resolve(), model, options.port)
    unknown = [name for name in options.peers or () if name not in known]
    if unknown:
        raise SystemExit(f"unknown: {', '.join(unknown)}; known are {', '.join(known)}")
    chosen = []
    for peer in (known[name] for name in options.peers or known):
        if peer.missing:
            print(f"left out: {peer.name}, for want of {peer.missing[0]}", file=sys.stderr)
        else:
            chosen.append(peer)
    return chosen


def main() -> int:
    options = parse()
    # Ended from outside, it still ends the server whose turn it is.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    model = resolve(options.model).tokenizer_path
    if options.install:
        return 1 if install(options.directory.resolve(), model) else 0
    peers = chosen_peers(options, model)
    options.output.mkdir(parents=True, exist_ok=True)
    comparison = Comparison(peers, workloads_of(options), options.output)
    for number in range(options.repeat):
        began = time.monotonic()
        round_ = Round(
            workloads=comparison.workloads,
            port=options.port,
            model=str(model),
            text_seed=time.time_ns(),
            time_limit=options.time_limit,
        )
        print(f"round {number + 1} of {options.repeat}", file=sys.stderr)
        # Who goes first changes, so that no server always meets the machine warm.
        place = number % max(len(peers), 1)
        for peer in peers[place:] + peers[:place]:
            comparison.take(peer, round_)
        print(f"  round took {time.monotonic() - began:.0f} s", file=sys.stderr)
    comparison.print()
    return 1 if comparison.failures or not peers else 0


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


if __name__ == "__main__":
    sys.exit(main())
