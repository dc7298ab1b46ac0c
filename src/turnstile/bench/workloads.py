"""Workloads: which requests, and when they come. W1 to W5 are the standard ones.

Every request carries exactly its drawn number of prompt tokens and must answer with exactly its
drawn number, so that all servers do the same work. The lengths are the same in every repetition;
the text never is, so that no cache carries over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from turnstile.bench.arrivals import (
    Arrivals,
    ClosedLoop,
    OpenLoop,
    Ramp,
    all_at_once,
    check_gaps,
    gamma,
)
from turnstile.bench.datasets import FileDataset
from turnstile.bench.lengths import Fixed, LengthDistribution, Lognormal, Uniform


class WorkloadError(ValueError):
    """There is no such workload, or it cannot be changed like this; the message says why."""


USERS_PROMPT = Lognormal(96, 0.8, 16, 768)
USERS_OUTPUT = Lognormal(64, 0.8, 8, 384)


@dataclass(frozen=True, slots=True)
class Workload:
    """What to ask a server, and when.

    Parameters
    ----------
    name, summary
        For reports.
    requests
        How many; how many conversations, where there are turns.
    prompt, output
        Token counts of the prompts' own part and of the answers; of every turn, where there are.
    prefix
        Tokens in front of every prompt that all requests of a group share; 0 for none.
    prefix_groups
        How many different prefixes; requests take them in turns.
    turns
        How many questions a conversation has, each with all before it as its history; None for
        single questions.
    turn_delay
        Seconds a user takes from an answer to the next question.
    dataset
        A file that names the requests, in place of drawn lengths; None for drawn ones.
    users
        Size of the closed loop, or None for an open loop.
    rate
        Mean arrivals per second of the open loop (Poisson), or None for all at once, or for the
        times of a trace.
    burstiness
        Shape of the gamma-distributed gaps of the open loop: 1 is Poisson, less comes in bursts.
    ramp
        Lets the rate of the open loop move; None for a constant one.
    max_concurrency
        The most requests of an open loop at a time; None for no bound.
    """

    name: str
    summary: str
    requests: int
    prompt: LengthDistribution = USERS_PROMPT
    output: LengthDistribution = USERS_OUTPUT
    prefix: int = 0
    prefix_groups: int = 1
    turns: LengthDistribution | None = None
    turn_delay: float = 0.0
    dataset: FileDataset | None = None
    users: int | None = None
    rate: float | None = None
    burstiness: float = 1.0
    ramp: Ramp | None = None
    max_concurrency: int | None = None

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise WorkloadError(f"a workload needs at least one request, got {self.requests}")
        if self.prefix < 0 or self.prefix_groups < 1:
            raise WorkloadError("a prefix needs at least 0 tokens, and at least one group")
        if self.turn_delay < 0:
            raise WorkloadError("the delay between turns must not be negative")
        # Now, and not when the prompts have been cut.
        if self.users is not None:
            ClosedLoop(self.users)
        check_gaps(1.0 if self.rate is None else self.rate, self.burstiness)
        OpenLoop((), self.max_concurrency)

    def arrivals(self, seed: int) -> Arrivals:
        """When the requests come; the seed decides the gaps of an open loop."""
        if self.users is not None:
            return ClosedLoop(self.users)
        rng = np.random.default_rng([seed, 2])
        if self.ramp is not None:
            times = self.ramp.bend(gamma(1.0, self.requests, self.burstiness, rng))
        elif self.rate is not None:
            times = gamma(self.rate, self.requests, self.burstiness, rng)
        elif self.dataset is not None and self.dataset.timed:
            return OpenLoop(self.dataset.times()[: self.requests], self.max_concurrency)
        else:
            times = all_at_once(self.requests)
        return OpenLoop(tuple(float(t) for t in times), self.max_concurrency)


WORKLOADS = {
    w.name: w
    for w in (
        Workload("W1", "100 users, closed loop", 400, USERS_PROMPT, USERS_OUTPUT, users=100),
        Workload("W2", "256 requests all at once", 256, USERS_PROMPT, USERS_OUTPUT),
        Workload(
            "W3",
            "100 users behind one common prefix of 512 tokens",
            200,
            Uniform(16, 64),
            Fixed(32),
            prefix=512,
            users=100,
        ),
        Workload("W4", "one user, one request after another", 5, Fixed(64), Fixed(128), users=1),
        Workload("W5", "Poisson arrivals", 200, USERS_PROMPT, USERS_OUTPUT, rate=2.0),
    )
}


def choose(
    name: str,
    *,
    requests: int | None = None,
    users: int | None = None,
    rate: float | None = None,
    burstiness: float | None = None,
    prompt: LengthDistribution | None = None,
    output: LengthDistribution | None = None,
    **others: Any,
) -> Workload:
    """Return the workload of that name, with the given parts replaced.

    ``others`` are further fields of :class:`Workload`; None leaves a field as it is.

    Raises
    ------
    WorkloadError
        If there is no such workload, or the parts contradict each other.
    """
    if name not in WORKLOADS:
        raise WorkloadError(f"no workload named {name!r}; known are {', '.join(WORKLOADS)}")
    parts = {"requests": requests, "prompt": prompt, "output": output, **others}
    changed = replace(WORKLOADS[name], **{k: v for k, v in parts.items() if v is not None})
    return load(changed, users=users, rate=rate, burstiness=burstiness)


def load(
    workload: Workload,
    *,
    users: int | None = None,
    rate: float | None = None,
    burstiness: float | None = None,
    ramp: Ramp | None = None,
) -> Workload:
    """Return the workload with other arrivals; what is None stays.

    Parameters
    ----------
    users
        Of a closed loop; together with a rate or a ramp the most requests at a time.

    Raises
    ------
    WorkloadError
        If a constant rate and a ramp are asked for at once, or a shape of gaps for a closed loop.
    """
    if rate is not None and ramp is not None:
        raise WorkloadError("--request-rate is constant and a ramp is not: give one")
    if rate is not None or ramp is not None:
        # an infinite rate, as vLLM writes it, is everything at once
        rate = None if rate == math.inf else rate
        workload = replace(workload, users=None, rate=rate, ramp=ramp, max_concurrency=users)
    elif users is not None:
        workload = replace(workload, users=users, rate=None, ramp=None)
    if burstiness is not None:
        if workload.rate is None and workload.ramp is None:
            raise WorkloadError("--burstiness needs an open loop: give --request-rate, or take W5")
        workload = replace(workload, burstiness=burstiness)
    return _named(workload)


def _named(workload: Workload) -> Workload:
    """Mark a changed workload, lest it be taken for the standard one in a table, and say what it
    is now. The rate of W5 is its parameter, and printed.
    """
    plain = workload.name.rstrip("*")
    standard = WORKLOADS.get(plain)
    if standard is None:
        return workload
    if standard.rate is not None and workload.rate is not None:
        standard = replace(standard, rate=workload.rate)
    if replace(workload, name=plain, summary=standard.summary) == standard:
        return replace(workload, name=plain, summary=standard.summary)
    return replace(workload, name=f"{plain}*", summary=_described(workload))


def _described(workload: Workload) -> str:
    """One line on who asks, and how."""
    users, most = workload.users, workload.max_concurrency
    if users is not None:
        text = "1 user, closed loop" if users == 1 else f"{users} users, closed loop"
    elif workload.ramp is not None:
        text = f"arrivals from {workload.ramp.start:g}/s to {workload.ramp.end:g}/s"
    elif workload.rate is not None:
        text = "Poisson arrivals" if workload.burstiness == 1 else "arrivals in gamma gaps"
    else:
        text = f"{workload.requests} requests all at once"
    if most is not None:
        text += f", at most {most} at a time"
    if workload.turns is not None:
        text += ", conversations"
    if workload.prefix:
        groups = workload.prefix_groups
        prefixes = "one common prefix" if groups == 1 else f"{groups} prefixes"
        text += f", behind {prefixes} of {workload.prefix} tokens"
    return text
