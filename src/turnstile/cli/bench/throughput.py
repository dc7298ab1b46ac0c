"""``turnstile bench throughput``."""

from __future__ import annotations

import time
from typing import Annotated

from cyclopts import Parameter

from turnstile.cli.bench.options import Saving, UsageError
from turnstile.cli.bench.running import tell, write
from turnstile.cli.bench.work import Work
from turnstile.engine.config import EngineConfig


def throughput(
    *,
    work: Annotated[Work, Parameter(name="*", group="Work")] | None = None,
    n: int = 1,
    temperature: float = 1.0,
    repeat: int = 1,
    seed: int | None = None,
    saving: Annotated[Saving, Parameter(name="*", group="Result")] | None = None,
    engine: Annotated[EngineConfig, Parameter(name="*", group="Engine")] | None = None,
) -> int:
    """Compute a workload as fast as it goes, in this process, without a server.

    All requests are there from the beginning; W2's lengths, where no others are asked for.

    Parameters
    ----------
    n
        Samples of each prompt.
    temperature
        Of the samples; 0 is greedy.
    repeat
        Repetitions with the same lengths and fresh text; medians are reported.
    seed
        Seed of the lengths; the default gives the standard workloads.
    """
    from turnstile.bench import offline
    from turnstile.bench.session import LENGTH_SEED
    from turnstile.llm import LLM

    saving = saving or Saving()
    saving.check()
    chosen = (work or Work()).chosen("W2")
    if repeat < 1:
        raise UsageError("--repeat must be at least 1")
    with LLM(**vars(engine or EngineConfig())) as llm:
        result = offline.throughput(
            llm,
            chosen,
            offline.Sampling(n, temperature),
            repeat=repeat,
            length_seed=LENGTH_SEED if seed is None else seed,
            text_seed=time.time_ns(),
            tell=tell,
        )
    write(saving.path("throughput"), result)
    print(offline.throughput_lines(result))
    return 0
