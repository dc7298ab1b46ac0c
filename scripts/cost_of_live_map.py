"""What the live map costs the engine: CPU time of a step's bookkeeping, watched and not, by turns.

    PYTHONPATH=src python scripts/cost_of_live_map.py [--users 100] [--pages 8000] [--step 0.055]

The scheduler, the loop and the messages are those that serve; the forward pass is left out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence as Seq

from turnstile.core.admission import ExpectedAdmission
from turnstile.core.fairness import FairQueue
from turnstile.core.pages import PagePool
from turnstile.core.plan import Plan
from turnstile.core.request import Sequence
from turnstile.core.scheduler import Scheduler, SchedulerConfig
from turnstile.engine.executor import ChunkResult
from turnstile.engine.loop import StepLoop
from turnstile.engine.params import SamplingParams
from turnstile.engine.protocol import StepResult, Submit, Watch, encode_message
from turnstile.server.watch.watchers import INTERVAL

TURNS, STEPS = 15, 20


class NoModel:
    """Every token is the same."""

    def add(self, sequence: Sequence, params: SamplingParams, seed: int) -> None:
        """Nothing is kept of it."""

    def remove(self, sequence: Sequence) -> None:
        """Nothing was."""

    def copy_pages(self, copies: Seq[tuple[int, int]]) -> None:
        """There is nothing in them."""

    def execute(self, plan: Plan) -> list[ChunkResult]:
        return [ChunkResult((7,) * chunk.samples) for chunk in plan.chunks]


class Bench:
    """A loop with so many sequences that decode, whose clock moves by a step at each."""

    def __init__(self, users: int, pages: int, step: float) -> None:
        self.step, self.now, self.bytes = step, 0.0, 0
        config = SchedulerConfig(max_num_seqs=users, max_num_batched_tokens=768)
        scheduler = Scheduler(config, PagePool(pages, 16), ExpectedAdmission(), FairQueue())
        self.loop = StepLoop(scheduler, NoModel(), 1, self._emit, clock=lambda: self.now)
        for user in range(users):
            prompt = [(7 * i + 13 * user) % 4000 for i in range(150)]
            params = SamplingParams(max_tokens=4000, ignore_eos=True, temperature=0.0)
            self.loop.apply(Submit(f"user-{user}", prompt, params, 4000, seed=user, number=user))
        self.run(60)
        if len(scheduler.running) < users:
            raise SystemExit(f"Only {len(scheduler.running)} sequences fit into {pages} pages.")

    def _emit(self, result: StepResult) -> None:
        self.bytes += len(encode_message(result))

    def run(self, steps: int) -> float:
        """CPU seconds of a step."""
        began = time.thread_time()
        for _ in range(steps):
            self.now += self.step
            self.loop.step()
        return (time.thread_time() - began) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--users", type=int, default=100)
    parser.add_argument("--pages", type=int, default=8000)
    parser.add_argument("--step", type=float, default=0.055, help="seconds a step would take")
    options = parser.parse_args()
    bench = Bench(options.users, options.pages, options.step)
    costs: dict[float | None, list[float]] = {None: [], INTERVAL: []}
    wholes = []
    for _ in range(TURNS):
        for interval, cost in costs.items():
            bench.loop.apply(Watch(interval))
            first = bench.run(1)
            if interval is not None:
                wholes.append(first)
            cost.append(bench.run(STEPS))
    running = len(bench.loop.scheduler.running)
    unwatched, watched = (statistics.median(cost) * 1e6 for cost in costs.values())
    print(f"{running} sequences, {options.pages} pages, a step every {options.step * 1e3:.0f} ms")
    print(f"unwatched {unwatched:.0f} µs, watched {watched:.0f} µs of bookkeeping a step")
    print(f"the step that carries the whole picture: {statistics.median(wholes) * 1e6:.0f} µs")


if __name__ == "__main__":
    main()
