"""The flags that verbs share. Names are those of ``vllm bench``; docstrings are the help."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from turnstile.cli.client import DEFAULT_URL

if TYPE_CHECKING:
    from turnstile.bench.arrivals import Ramp
    from turnstile.bench.http import Server
    from turnstile.bench.metrics import Limits
    from turnstile.bench.session import Settings
    from turnstile.bench.workloads import Workload


class UsageError(ValueError):
    """These flags do not go together; the message says why."""


@dataclass(kw_only=True)
class Target:
    """Which server to measure."""

    url: Annotated[str, Parameter(name=["--url", "--base-url"])] = DEFAULT_URL
    """Where the server listens, with or without /v1."""
    model: str | None = None
    """The model's name; the first one the server lists otherwise."""
    ready_check_timeout_sec: float = 0.0
    """Seconds to wait for a server that is not there yet, or still loads its model."""
    endpoint: str = "/v1/completions"
    """/v1/completions with token ids, or /v1/chat/completions with text."""
    tokenizer: str | None = None
    """Model directory, GGUF file or name whose tokenizer cuts the prompts; the server's
    /tokenize otherwise."""
    api_key: str | None = None
    """Sent as a bearer token; TURNSTILE_API_KEY otherwise."""

    def server(self) -> Server:
        """The address with its key. Raises ValueError for what is no http URL."""
        from turnstile.bench.http import Server

        known = next(iter(os.environ.get("TURNSTILE_API_KEY", "").split()), None)
        return Server.parse(self.url, self.api_key or known)


@dataclass(kw_only=True)
class Measuring:
    """How to measure."""

    repeat: int = 1
    """Repetitions with the same lengths and fresh text; the table shows medians."""
    warmup: Annotated[int, Parameter(name=["--num-warmups", "--warmup"])] = 2
    """Requests before the measurement, not counted."""
    time_limit: float | None = None
    """Seconds after which a repetition is cut off; what runs then counts as incomplete."""
    ignore_eos: bool = True
    """Ask for answers of exactly their length, and count others as failed."""
    seed: int | None = None
    """Seed of lengths and arrivals; the default gives the standard workloads."""
    text_seed: int | None = None
    """Seed of the text. Without it every run has fresh text, so that no prefix cache helps."""
    server_pid: int | None = None
    """First process of the server: CPU time and memory of it and its children are reported."""
    goodput: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None
    """Limits such as ttft:500 tpot:100 e2el:10000, in milliseconds; requests that meet all are
    counted, and refused ones are misses."""

    def settings(self, target: Target) -> Settings:
        """As the measurement wants them. Raises ValueError for what is out of range."""
        from turnstile.bench.session import LENGTH_SEED, Settings

        return Settings(
            repeat=self.repeat,
            warmup=self.warmup,
            length_seed=LENGTH_SEED if self.seed is None else self.seed,
            text_seed=time.time_ns() if self.text_seed is None else self.text_seed,
            time_limit=self.time_limit,
            server_pid=self.server_pid,
            limits=self.limits(),
            endpoint=target.endpoint,
            tokenizer=target.tokenizer,
            ready_s=target.ready_check_timeout_sec,
            ignore_eos=self.ignore_eos,
        )

    def limits(self) -> Limits | None:
        """The limits of goodput. Raises ValueError for unknown ones."""
        from turnstile.bench.metrics import parse_limits

        return parse_limits(self.goodput) if self.goodput else None


@dataclass(kw_only=True)
class Load:
    """When the requests come."""

    max_concurrency: int | None = None
    """Users of a closed loop, where they are not to be the workload's. Beside a rate: the most
    requests at a time; what comes above it waits, and the wait counts."""
    request_rate: float | None = None
    """Arrivals per second of an open loop (Poisson); inf sends everything at once."""
    burstiness: float | None = None
    """Shape of the gamma-distributed gaps of an open loop: 1 is Poisson, less comes in bursts."""
    ramp_up_strategy: Literal["linear", "exponential"] | None = None
    """Let the rate of an open loop move from --ramp-up-start-rps to --ramp-up-end-rps."""
    ramp_up_start_rps: float | None = None
    """Arrivals per second at the first request."""
    ramp_up_end_rps: float | None = None
    """Arrivals per second at the last request."""

    def applied_to(self, workload: Workload) -> Workload:
        """The workload at this load. Raises ValueError where the flags contradict each other."""
        from turnstile.bench.workloads import load

        return load(
            workload,
            users=self.max_concurrency,
            rate=self.request_rate,
            burstiness=self.burstiness,
            ramp=self._ramp(),
        )

    def _ramp(self) -> Ramp | None:
        from turnstile.bench.arrivals import Ramp

        strategy, start, end = self.ramp_up_strategy, self.ramp_up_start_rps, self.ramp_up_end_rps
        if strategy is not None and start is not None and end is not None:
            return Ramp(strategy, start, end)
        if (strategy, start, end) != (None, None, None):
            raise UsageError(
                "a ramp needs --ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps"
            )
        return None


@dataclass(kw_only=True)
class Saving:
    """Where the result goes."""

    output: Annotated[
        Path | None, Parameter(name=["--output", "--output-json", "--result-filename"])
    ] = None
    """JSON file to write; bench-WHAT-TIME.json otherwise."""
    result_dir: Path | None = None
    """Directory for the file; made if it is not there."""

    def check(self) -> None:
        """Find out before a measurement whether its file can be written.

        Raises
        ------
        UsageError
            If its directory is not there, or not ours to write to.
        """
        directory = self.path("check").parent
        if not os.access(directory, os.W_OK | os.X_OK):
            raise UsageError(f"nothing can be written into the directory {directory}")

    def path(self, what: str) -> Path:
        """The file for a result of this kind."""
        file = self.output or Path(time.strftime(f"bench-{what}-%Y%m%d-%H%M%S.json"))
        if self.result_dir is None:
            return file
        self.result_dir.mkdir(parents=True, exist_ok=True)
        return self.result_dir / file


@dataclass(kw_only=True)
class Reporting(Saving):
    """Where the result goes, and its picture."""

    save_detailed: bool = False
    """Keep lengths, times and errors of every request in the file."""
    plot: Path | None = None
    """File to draw the result into, .svg or .png. Needs matplotlib (the extra `bench`)."""
