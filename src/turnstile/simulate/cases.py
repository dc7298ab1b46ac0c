"""The loads that the simulator is checked with against real servers (``validate_simulator.py``)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from turnstile.bench.arrivals import Arrivals, ClosedLoop
from turnstile.bench.lengths import Fixed, Uniform
from turnstile.bench.workloads import Workload
from turnstile.simulate.load import Load, Tenant, from_workload

SEED = 101
"""Of lengths and arrivals, real and simulated."""
FIRST = "W1"
"""The load that teaches what the others are simulated with."""
KEYS = ("flooding-tenant", "quiet-tenant")
"""The tenants of the flood, by their keys."""


def stair(users: int, requests: int, prompt: Uniform, output: Uniform, prefix: int = 0) -> Workload:
    """So many users with such requests, for a while; ``prefix``: tokens that all begin with."""
    return Workload("stairs", "", requests, prompt, output, users=users, prefix=prefix)


_BEHIND = stair(100, 150, Uniform(16, 64), Uniform(16, 32), prefix=512)
_LONG = stair(16, 24, Uniform(256, 1024), Uniform(32, 64))
STAIRS = (
    _BEHIND,
    _LONG,
    *(stair(users, 3 * users, Uniform(16, 96), Uniform(16, 64)) for users in (2, 8, 16, 32)),
    _BEHIND,
    _LONG,
)
"""What a new server gets first, always the same lengths. They warm it up, and they show the
engine's fit what W1 has little of (small steps, long prompts, few rows with long contexts) and what
it has nothing of: pages that many share. That twice and apart, as the machine's pace in the seconds
of a stair counts as what its steps cost.
"""


@dataclass(frozen=True)
class Stream:
    """Requests of one tenant."""

    workload: Workload
    key: str | None = None
    begins: float = 0.0
    """Seconds after the start of the run; of an open loop."""

    def arrivals(self) -> Arrivals:
        """When the requests come."""
        arrivals = self.workload.arrivals(SEED)
        if isinstance(arrivals, ClosedLoop):
            return arrivals
        return replace(arrivals, times=tuple(self.begins + t for t in arrivals.times))

    def load(self) -> Load:
        """The same requests for the simulator."""
        load = from_workload(self.workload, SEED)
        return load if load.due is None else replace(load, due=load.due + self.begins)

    @property
    def tenant(self) -> str:
        """Whose requests they are."""
        return self.key or "default"


@dataclass(frozen=True)
class Case:
    """One run: who asks what, and of which server (one for each set of flags)."""

    name: str
    about: str
    streams: tuple[Stream, ...]
    flags: tuple[str, ...] = ()

    @property
    def key(self) -> str | None:
        """A key that its server knows."""
        return self.streams[0].key

    @property
    def num_pages(self) -> int | None:
        """Of its server, where that is told."""
        return int(self.flags[1]) if "--num-pages" in self.flags else None

    def load(self) -> Load:
        """The same requests for the simulator, length by length and arrival by arrival."""
        loads = [stream.load() for stream in self.streams]
        if len(loads) == 1:
            return loads[0]
        due = np.concatenate([load.due for load in loads if load.due is not None])
        order = np.argsort(due, kind="stable")
        return Load(
            self.name,
            np.concatenate([load.prompts for load in loads])[order],
            np.concatenate([load.outputs for load in loads])[order],
            due=due[order],
            tenants=tuple(Tenant(stream.tenant) for stream in self.streams),
            tenant_of=np.repeat(np.arange(len(loads)), [len(load) for load in loads])[order],
        )

    def answers_before(self, before: Seq[Case]) -> dict[str, list[int]]:
        """Lengths of the answers that its server has given after the stairs and these cases, by
        tenant: ``expected`` admission goes by them.
        """
        given = {stream.tenant: list[int]() for stream in self.streams}
        first = next(iter(given.values()))
        for number, step in enumerate(STAIRS):
            first += from_workload(step, SEED + number).outputs.tolist()
        for earlier in before:
            for stream in earlier.streams:
                given[stream.tenant] += stream.load().outputs.tolist()
        return given


def cases(size: int, rate: float) -> list[Case]:
    """The six in the order of a round, W1 first, with so many requests each. ``rate`` is 80 % of
    what W1 got through.

    Loads that feel the machine's pace most come soonest after W1, which has told it.
    """

    def chat(requests: int, **arrivals: Any) -> Workload:
        return Workload("check", "", requests, **arrivals)

    share = size // 5
    long, question = Uniform(256, 512), Uniform(16, 64)
    behind = Workload("check", "", size, question, Fixed(32), users=100, prefix=512)
    return [
        Case(FIRST, "100 users, chat lengths", (Stream(chat(size, users=100)),)),
        Case(
            "Poisson",
            "chat lengths, at 80 % of what W1 got through",
            (Stream(chat(size, rate=rate)),),
        ),
        Case(
            "flood",
            f"{size - share} at once from one tenant, {share} Poisson from another 2 s later",
            # Who came in the same hundredth of a second as a flood would find a slot or not by a
            # race of milliseconds, with a second between the two.
            (
                Stream(chat(size - share), KEYS[0]),
                Stream(chat(share, rate=rate / 2), KEYS[1], begins=2.0),
            ),
            ("--api-key", KEYS[0], "--api-key", KEYS[1]),
        ),
        Case("shared prefix", "100 users behind 512 common tokens", (Stream(behind),)),
        Case(
            "long prompts",
            "32 users, prompts of 256 to 512",
            (Stream(Workload("check", "", size, long, question, users=32)),),
        ),
        Case(
            "tiny pool",
            "60 users, 256 pages: preemption",
            (Stream(chat(size, users=60)),),
            ("--num-pages", "256"),
        ),
    ]
