"""Take the step apart: where its microseconds go at 1, 10 and 100 users who all decode.

Runs the step loop of the engine in this process, without HTTP, and times its parts:

    PYTHONPATH=src python scripts/profile_step.py [--users 1 10 100] [--steps 60]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgspec

from turnstile.engine.build import build_engine
from turnstile.engine.config import EngineConfig
from turnstile.engine.loop import StepLoop
from turnstile.engine.params import SamplingParams
from turnstile.engine.protocol import StepResult, Submit
from turnstile.models.default_model import NAME

PROMPT, WARMUP = 150, 8
MODEL = ("forward", "argmax")
"""Parts that the kernels do; everything else is bookkeeping."""


class Laps:
    """Seconds of each named part, summed within a step. Inner parts are taken from outer ones."""

    def __init__(self) -> None:
        self.now: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - start
                self.now[name] += seconds - self._inner.pop()
                self._inner[-1] += seconds

        return call


def instrument(loop: StepLoop, laps: Laps) -> None:
    """Put a stopwatch around each part of a step."""
    runner: Any = loop.executor
    parts: list[tuple[Any, str, str]] = [
        (loop.scheduler, "plan", "plan"),
        (loop.scheduler, "commit", "commit"),
        (loop, "_announce", "announce"),
        (runner, "execute", "runner"),
        (runner._builder, "build", "build batch"),
        (runner._decoder, "forward", "forward"),
        (runner._sampler, "draw", "sampler"),
        (runner._decoder.backend, "argmax", "argmax"),
        (loop, "step", "rest of the loop"),
    ]
    for owner, method, name in parts:
        setattr(owner, method, laps.timed(name, getattr(owner, method)))


def measure(loop: StepLoop, laps: Laps, users: int, steps: int) -> dict[str, float]:
    """Median seconds of each part over ``steps`` steps in which ``users`` sequences decode."""
    for user in range(users):
        prompt = [(7 * i + 13 * user) % 40_000 + 100 for i in range(PROMPT)]
        params = SamplingParams(max_tokens=4096, ignore_eos=True, temperature=0.0)
        loop.apply(Submit(f"user-{user}", prompt, params, steps + 40, seed=user))
    while loop.scheduler.num_waiting or any(not s.decoding for s in loop.scheduler.running):
        loop.step()
    taken: dict[str, list[float]] = defaultdict(list)
    for number in range(WARMUP + steps):
        laps.now.clear()
        loop.step()
        if number >= WARMUP:
            for name, seconds in laps.now.items():
                taken[name].append(seconds)
    for user in range(users):
        loop.scheduler.cancel(f"user-{user}", now=time.monotonic())
    while loop.has_work:
        loop.step()
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=NAME)
    parser.add_argument("--users", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    config = EngineConfig(model=options.model, max_num_seqs=max(options.users))
    make, info = build_engine(config, 1, lambda stage, fraction: None)
    encoder = msgspec.msgpack.Encoder()
    laps = Laps()

    def emit(result: StepResult) -> None:
        encoder.encode(result)

    loop = make(laps.timed("encode the message", emit))
    instrument(loop, laps)
    print(f"{info.model}, {info.weight_format}, {info.threads} threads; microseconds a step")
    columns = {users: measure(loop, laps, users, options.steps) for users in options.users}
    print(f"{'users':22}" + "".join(f"{users:>10}" for users in columns))
    for name in sorted(columns[options.users[-1]], key=lambda n: -columns[options.users[-1]][n]):
        row = "".join(f"{columns[users].get(name, 0.0) * 1e6:>10.0f}" for users in columns)
        print(f"{name:22}{row}")
    totals = {users: sum(parts.values()) for users, parts in columns.items()}
    print(f"{'all':22}" + "".join(f"{total * 1e6:>10.0f}" for total in totals.values()))
    shares = [
        1 - sum(parts.get(name, 0.0) for name in MODEL) / totals[users]
        for users, parts in columns.items()
    ]
    print(f"{'bookkeeping':22}" + "".join(f"{share:>10.1%}" for share in shares))


if __name__ == "__main__":
    main()
