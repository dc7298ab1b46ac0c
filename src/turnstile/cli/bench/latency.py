"""``turnstile bench latency``."""

from __future__ import annotations

import time
from typing import Annotated

from cyclopts import Parameter

from turnstile.cli.bench.options import Saving
from turnstile.cli.bench.running import tell, write
from turnstile.engine.config import EngineConfig


def latency(
    *,
    input_len: int = 32,
    output_len: int = 128,
    batch_size: int = 8,
    n: int = 1,
    temperature: float = 1.0,
    num_iters_warmup: int = 10,
    num_iters: int = 30,
    saving: Annotated[Saving, Parameter(name="*", group="Result")] | None = None,
    engine: Annotated[EngineConfig, Parameter(name="*", group="Engine")] | None = None,
) -> int:
    """Time one batch after another, in this process, without a server.

    Parameters
    ----------
    input_len
        Tokens of each prompt.
    output_len
        Tokens of each answer.
    batch_size
        Requests of a batch.
    n
        Samples of each prompt.
    temperature
        Of the samples; 0 is greedy.
    num_iters_warmup
        Batches before the measurement, not counted.
    num_iters
        Batches to time.
    """
    from turnstile.bench import offline
    from turnstile.llm import LLM

    saving = saving or Saving()
    saving.check()
    with LLM(**vars(engine or EngineConfig())) as llm:
        result = offline.latency(
            llm,
            offline.Sampling(n, temperature),
            input_len=input_len,
            output_len=output_len,
            batch_size=batch_size,
            num_iters_warmup=num_iters_warmup,
            num_iters=num_iters,
            text_seed=time.time_ns(),
            tell=tell,
        )
    write(saving.path("latency"), result)
    print(offline.latency_lines(result))
    return 0
