"""The standard workloads W1 to W5: which requests, and when they come.

Every request carries exactly its drawn number of prompt tokens and must answer with exactly its
drawn number, so that all servers do the same work. The lengths are the same in every repetition;
the text never is, so that no cache carries over.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import numpy as np

from turnstile.bench.arrivals import Arrivals, ClosedLoop, OpenLoop, all_at_once, gamma
from turnstile.bench.corpus import Prose
from turnstile.bench.lengths import Fixed, LengthDistribution, Lognormal, Uniform


class WorkloadError(ValueError):
    """There is no such workload; the message says what there is."""


Tokenize = Callable[[str], Awaitable[list[int]]]

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
        How many.
    prompt, output
        Token counts of the prompts' own part and of the answers.
    prefix
        Tokens in front of every prompt that all requests share; 0 for none.
    users
        Size of the closed loop, or None for an open loop.
    rate
        Mean arrivals per second of the open loop (Poisson), or None for all at once.
    burstiness
        Shape of the gamma-distributed gaps of the open loop: 1 is Poisson, less comes in bursts.
    """

    name: str
    summary: str
    requests: int
    prompt: LengthDistribution
    output: LengthDistribution
    prefix: int = 0
    users: int | None = None
    rate: float | None = None
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise ValueError(f"a workload needs at least one request, got {self.requests}")

    def arrivals(self, seed: int) -> Arrivals:
        """When the requests come; the seed decides the gaps of an open loop."""
        if self.users is not None:
            return ClosedLoop(self.users)
        if self.rate is None:
            return OpenLoop(tuple(all_at_once(self.requests)))
        rng = np.random.default_rng([seed, 2])
        times = gamma(self.rate, self.requests, self.burstiness, rng)
        return OpenLoop(tuple(float(t) for t in times))


@dataclass(frozen=True, slots=True)
class Planned:
    """One request to send: the prompt as token ids and the number of tokens to answer with."""

    prompt: list[int]
    output_tokens: int


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
) -> Workload:
    """Return the workload of that name, with the given parts replaced.

    Raises
    ------
    WorkloadError
        If there is no such workload, or both users and rate are given.
    """
    if name not in WORKLOADS:
        raise WorkloadError(f"no workload named {name!r}; known are {', '.join(WORKLOADS)}")
    if users is not None and rate is not None:
        raise WorkloadError(
            "--max-concurrency makes a closed loop and --request-rate an open one: give one"
        )
    chosen = WORKLOADS[name]
    changed = chosen
    if requests is not None:
        changed = replace(changed, requests=requests)
    if users is not None:
        changed = replace(changed, users=users, rate=None)
    if rate is not None:
        changed = replace(changed, users=None, rate=rate)
    if burstiness is not None:
        if changed.rate is None:
            raise ValueError("--burstiness needs an open loop: give --request-rate, or take W5")
        changed = replace(changed, burstiness=burstiness)
    if prompt is not None:
        changed = replace(changed, prompt=prompt)
    if output is not None:
        changed = replace(changed, output=output)
    # A changed workload must not be taken for the standard one in a table. The rate of W5 is
    # its parameter, and printed.
    same = changed == replace(chosen, rate=changed.rate) and (chosen.rate or rate is None)
    return changed if same else replace(changed, name=f"{name}*")


async def plan(workload: Workload, tokenize: Tokenize, prose: Prose, seed: int) -> list[Planned]:
    """Draw the lengths (from `seed`) and cut the prompts (going on in `prose`).

    The ids are those of running text, cut to the exact length. The prompt and the output lengths
    come from one generator, in this order, so that a seed names the same lengths everywhere.
    """
    rng = np.random.default_rng(seed)
    prompts = workload.prompt.draw(workload.requests, rng)
    outputs = workload.output.draw(workload.requests, rng)
    prefix = await passage(tokenize, prose, workload.prefix) if workload.prefix else []
    planned = []
    for own, output in zip(prompts.tolist(), outputs.tolist(), strict=True):
        planned.append(Planned(prefix + await passage(tokenize, prose, own), output))
    return planned


async def passage(tokenize: Tokenize, prose: Prose, count: int) -> list[int]:
    """Return the first `count` token ids of a passage that begins where none has begun before."""
    start, words = prose.next_start(), count + 8
    while True:
        ids = await tokenize(" ".join(prose.words(start, words)))
        if len(ids) >= count:
            return ids[:count]
        words *= 2  # a tokenizer with tokens longer than words, which none known has
