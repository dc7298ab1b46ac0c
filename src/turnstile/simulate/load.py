"""What is asked of the machine, and when: lengths, arrivals, tenants and shared prefixes."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from turnstile.bench.arrivals import ClosedLoop
from turnstile.bench.datasets import FileDataset
from turnstile.bench.lengths import LengthDistribution
from turnstile.bench.workloads import Workload

Segments = tuple[tuple[int, int], ...]


class LoadError(ValueError):
    """The load cannot be simulated; the message says why."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who asks, and the share that tenant has."""

    name: str = "default"
    weight: float = 1.0


@dataclass(frozen=True)
class Load:
    """Requests, in the order of their arrival.

    Attributes
    ----------
    prompts, outputs
        Tokens of each prompt and of each answer.
    due
        Seconds after the start at which each request arrives; None for a closed loop.
    users
        Of a closed loop: how many ask again as soon as they are answered.
    think
        Seconds a user of a closed loop waits before asking again; the first questions come evenly
        over as long.
    max_tokens
        The limit each request states, where that is more than its answer has (the answer then ends
        by a stop token). None: the limit is the answer's length.
    tenants, tenant_of
        Tenants, and which of them each request is of; None for the first.
    shared
        What a prompt begins with that others may begin with too: runs of (id, tokens). Equal runs
        are equal tokens. None for none.
    """

    name: str
    prompts: NDArray[np.int64]
    outputs: NDArray[np.int64]
    due: NDArray[np.float64] | None = None
    users: int = 0
    think: float = 0.0
    max_tokens: int | None = None
    tenants: tuple[Tenant, ...] = (Tenant(),)
    tenant_of: NDArray[np.int64] | None = None
    shared: tuple[Segments, ...] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not len(self.prompts) or len(self.prompts) != len(self.outputs):
            raise LoadError("A load needs at least one request, and a length of each answer.")
        if (self.due is None) == (self.users < 1):
            raise LoadError("A load needs either arrivals or at least one user.")
        if self.due is not None and len(self.due) != len(self.prompts):
            raise LoadError("A load needs an arrival for each request.")
        if self.prompts.min() < 1 or self.outputs.min() < 1:
            raise LoadError("Every prompt and every answer needs at least one token.")

    def __len__(self) -> int:
        return len(self.prompts)

    def tenant(self, index: int) -> Tenant:
        """Whose request it is."""
        return self.tenants[0 if self.tenant_of is None else int(self.tenant_of[index])]

    def tokens(self, index: int) -> tuple[int, ...]:
        """A prompt of the right length that begins as others do exactly where it should."""
        length = int(self.prompts[index])
        tokens: list[int] = []
        for key, count in self.shared[index] if self.shared is not None else ():
            tokens += [-2 - key] * count
        tokens = tokens[:length]
        return (*tokens, *([2 * index] * (length - len(tokens))))

    def first_run(self, index: int) -> int | None:
        """The id of what the prompt begins with, for routers that look at prefixes."""
        runs = self.shared[index] if self.shared is not None else ()
        return runs[0][0] if runs else None

    def with_users(self, users: int) -> Load:
        """The same requests from a closed loop of so many users."""
        return replace(self, users=users, due=None)

    def with_rate(self, rate: float, seed: int) -> Load:
        """The same requests as Poisson arrivals, ``rate`` a second."""
        if not rate > 0:
            raise LoadError(f"A rate must be over 0, not {rate}.")
        rng = np.random.default_rng([seed, 2])
        gaps = rng.exponential(1.0, len(self))
        return replace(self, users=0, due=np.cumsum(gaps) / rate)


def from_workload(workload: Workload, seed: int) -> Load:
    """The requests that ``bench serve`` sends for this workload and seed, length by length."""
    rng = np.random.default_rng(seed)
    prompts = workload.prompt.draw(workload.requests, rng)
    outputs = workload.output.draw(workload.requests, rng)
    shared = None
    if workload.prefix:
        groups = workload.prefix_groups
        shared = tuple(((i % groups, workload.prefix),) for i in range(workload.requests))
    load = Load(workload.name, prompts + workload.prefix, outputs, users=1, shared=shared)
    arrivals = workload.arrivals(seed)
    if isinstance(arrivals, ClosedLoop):
        return replace(load, users=arrivals.users)
    return replace(load, users=0, due=np.asarray(arrivals.times, dtype=np.float64))


def draw(
    name: str,
    requests: int,
    prompt: LengthDistribution,
    output: LengthDistribution,
    seed: int,
    *,
    prefixes: int = 0,
    prefix_tokens: int = 0,
    max_len: int | None = None,
) -> Load:
    """Requests with drawn lengths, as a closed loop of one user (see :meth:`Load.with_users`).

    Parameters
    ----------
    prefixes, prefix_tokens
        Every prompt begins with one of so many texts of so many tokens, drawn evenly.
    max_len
        Longest prompt and answer together; longer ones are cut, prompts first.
    """
    rng = np.random.default_rng(seed)
    prompts, outputs = prompt.draw(requests, rng), output.draw(requests, rng)
    shared = None
    if prefixes:
        groups = rng.integers(0, prefixes, requests).tolist()
        shared = tuple(((group, prefix_tokens),) for group in groups)
        prompts = prompts + prefix_tokens
    if max_len is not None:
        outputs = np.minimum(outputs, max_len - 1)
        prompts = np.minimum(prompts, max_len - outputs)
    return Load(name, prompts, outputs, users=1, shared=shared)


def read_trace(path: Path, limit: int | None = None) -> Load:
    """A recorded load: CSV as the Azure traces (``TIMESTAMP, ContextTokens, GeneratedTokens``) or
    JSON lines as the Mooncake traces (:class:`turnstile.bench.datasets.FileDataset`).

    Raises
    ------
    LoadError, DatasetError
        A line is neither; it is named.
    """
    rows = _csv_rows(path) if path.suffix == ".csv" else _json_rows(path)
    due: list[float] = []
    prompts: list[int] = []
    outputs: list[int] = []
    shared: list[Segments] = []
    for number, (time, prompt, output, runs) in enumerate(rows):
        if limit is not None and number >= limit:
            break
        due.append(time)
        prompts.append(prompt)
        outputs.append(max(1, output))
        shared.append(runs)
    if not due:
        raise LoadError(f"{path} has no requests.")
    order = np.argsort(np.asarray(due), kind="stable")
    times = np.asarray(due)[order]
    return Load(
        path.stem,
        np.asarray(prompts, dtype=np.int64)[order],
        np.asarray(outputs, dtype=np.int64)[order],
        due=times - times[0],
        shared=tuple(shared[i] for i in order.tolist()) if any(shared) else None,
    )


Row = tuple[float, int, int, Segments]


def _csv_rows(path: Path) -> Iterator[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                time = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
                yield time, int(row["ContextTokens"]), int(row["GeneratedTokens"]), ()
            except (KeyError, TypeError, ValueError) as error:
                raise LoadError(f"{path}, line {number}: {error}") from None


def _json_rows(path: Path) -> Iterator[Row]:
    dataset = FileDataset("trace", str(path))
    for item in dataset.items(0, len(dataset)):
        runs = tuple((block, dataset.block_tokens) for block in item.blocks)
        yield item.at, item.prompt_tokens or 1, item.output_tokens or 1, runs
