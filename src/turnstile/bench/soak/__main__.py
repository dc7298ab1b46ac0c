"""``python -m turnstile.bench.soak``: the run, the verdict, the table."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from turnstile.bench.soak.load import Crowd
from turnstile.bench.soak.target import FLAGS, Reading, Target
from turnstile.models.default_model import NAME

KILLS = (0.12, 0.25, 0.38)
"""When the engine is killed, as shares of the run."""
EARLY, LATE = (0.5, 0.65), (0.9, 1.0)
"""The spans whose memory is compared: the first begins when everything has been seen once."""
FLAT = 1.05
JUDGED_FROM = 300.0
"""Seconds a run must last for its memory to be judged: a short one is all warm-up. (And for
preemptions to be sure to come.)"""
SETTLE = 60.0


@dataclass(frozen=True, slots=True)
class Check:
    """A line of the verdict."""

    what: str
    found: str
    wanted: str
    holds: bool


async def soak(target: Target, seconds: float, seed: int, users: int) -> tuple[Crowd, list[Check]]:
    """One run against a server that has just started."""
    crowd = Crowd(target.server, seed)
    await crowd.rehearse()
    before = await target.settle(SETTLE)
    fds_before = await _descriptors(target)
    began = time.monotonic()
    watching = asyncio.create_task(target.watch(began, min(1.0, seconds / 100)))
    killing = asyncio.create_task(_kill(target, began, seconds))
    await crowd.run(users, seconds)
    await killing
    watching.cancel()
    checks = [_answers(crowd), _sample(crowd), _survived(target)]
    if target.alive:
        after = await target.settle(SETTLE)
        checks += _left_over(before, after, seconds)
        checks.append(_within("file descriptors", await _descriptors(target), fds_before + 2))
    checks += _memory(target.readings, seconds)
    return crowd, checks


async def _kill(target: Target, began: float, seconds: float) -> None:
    recovered = began
    for share in KILLS:
        # Late where recovery took long: each engine is to have served before it is killed.
        at = max(began + share * seconds, recovered + seconds / 20)
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        await target.kill_engine(began)
        recovered = time.monotonic()


async def _descriptors(target: Target) -> int:
    """Open descriptors of the API process, once connections had time to close."""
    import psutil

    await asyncio.sleep(1.0)
    return int(psutil.Process(target.process.pid).num_fds())


# -- the verdict ----------------------------------------------------------------------------------


def _answers(crowd: Crowd) -> Check:
    wrong = crowd.seen["all", "wrong"]
    total = sum(crowd.seen.values())
    found = f"{total - wrong} of {total}"
    return Check("requests answered exactly once, as they must be", found, "all", not wrong)


def _sample(crowd: Crowd) -> Check:
    found = f"{crowd.compared} compared"
    differ = [line for line in crowd.violations if line.startswith("compare")]
    what = "answers equal to those given alone"
    return Check(what, found, "all", bool(crowd.compared) and not differ)


def _survived(target: Target) -> Check:
    down = ", ".join(f"{kill.seconds_down:.1f} s" for kill in target.kills)
    alive = target.alive and len(target.kills) == len(KILLS)
    return Check("kill -9 of the engine survived; down for", down, str(len(KILLS)), alive)


def _left_over(before: dict[str, float], after: dict[str, float], seconds: float) -> list[Check]:
    def of(name: str) -> float:
        return after[f"turnstile_{name}"]

    pages = {state: of(f'pages{{state="{state}"}}') for state in ("free", "held", "cached")}
    total = FLAGS["num-pages"]
    balance = pages["free"] + pages["cached"]
    inside = of("requests_running") + of("requests_waiting") + of("requests_in_flight")
    tasks = "turnstile_api_tasks"
    preemptions = of("preemptions_total")
    enough = preemptions > 0 or seconds < JUDGED_FROM
    return [
        _within("requests still inside", int(inside), 0),
        _within("pages held", int(pages["held"]), 0),
        Check("pages free or cached", f"{balance:.0f}", str(total), balance == total),
        _within("tasks of the event loop", int(after[tasks]), int(before[tasks]) + 1),
        Check("preemptions", f"{preemptions:.0f}", "some", enough),
    ]


def _within(what: str, found: int, most: int) -> Check:
    return Check(what, str(found), f"at most {most}", found <= most)


def _memory(readings: list[Reading], seconds: float) -> list[Check]:
    """Whether the processes are as large at the end as they were in the middle."""
    checks = []
    columns: tuple[tuple[str, Callable[[Reading], int]], ...] = (
        ("API process", lambda reading: reading.api_bytes),
        ("engine process", lambda reading: reading.engine_bytes),
    )
    for name, read in columns:
        early, late = (
            statistics.median(
                [read(r) for r in readings if span[0] <= r.time / seconds < span[1]] or [0]
            )
            for span in (EARLY, LATE)
        )
        growth = late / early if early else 0.0
        found = f"{early / 1e6:.1f} → {late / 1e6:.1f} MB ({100 * (growth - 1):+.1f} %)"
        judged = seconds >= JUDGED_FROM
        wanted = "+5 % at most" if judged else "not judged: too short"
        holds = not judged or 0 < growth <= FLAT
        checks.append(Check(f"resident memory of the {name}", found, wanted, holds))
    return checks


# -- the report -----------------------------------------------------------------------------------


def report(crowd: Crowd, checks: list[Check], seconds: float) -> str:
    """Both tables, in Markdown."""
    lines = ["| what users did | how it came out | times |", "|---|---|---|"]
    lines += [f"| {a} | {b} | {count} |" for (a, b), count in sorted(crowd.seen.items())]
    lines += ["", f"| after {seconds:.0f} s | found | wanted | |", "|---|---|---|---|"]
    lines += [
        f"| {check.what} | {check.found} | {check.wanted} | {'ok' if check.holds else 'NO'} |"
        for check in checks
    ]
    lines += [f"violation: {each[:1500]}" for each in crowd.violations]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run, report; 1 if anything is wrong."""
    parser = argparse.ArgumentParser("turnstile.bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the users' choices")
    parser.add_argument("--users", type=int, default=20, help="at once (default: 20)")
    parser.add_argument("--model", default=NAME, help=f"default: {NAME}")
    chosen = parser.parse_args(arguments)
    seconds = chosen.minutes * 60
    with Target(chosen.model) as target:
        crowd, checks = asyncio.run(soak(target, seconds, chosen.seed, chosen.users))
        print(report(crowd, checks, seconds), flush=True)
        passed = all(check.holds for check in checks)
        if not passed:
            print(target.log[-5000:], file=sys.stderr)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
