"""The engine without a server: how much it computes, and how long one batch takes.

The engine runs in this process, through the Python API; what a server adds (HTTP, JSON, a second
process) is not in these figures.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from turnstile import __version__
from turnstile.bench.corpus import Prose
from turnstile.bench.plan import Planned, passage, plan
from turnstile.bench.workloads import Workload
from turnstile.engine.params import SamplingParams
from turnstile.llm import LLM

THROUGHPUT_FORMAT = "turnstile-bench-throughput-1"
LATENCY_FORMAT = "turnstile-bench-latency-1"
PERCENTS = (10, 25, 50, 75, 90, 99)

Result = dict[str, Any]
Tell = Callable[[str], None]


class SizeError(ValueError):
    """There is nothing to measure; the message names the flag."""


class IncompleteError(RuntimeError):
    """The engine left answers short, so that there is nothing to report."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens are drawn.

    Parameters
    ----------
    n
        Samples of each prompt.
    temperature
        Of the samples; 0 is greedy.
    """

    n: int = 1
    temperature: float = 1.0

    def params(self, output_tokens: int) -> SamplingParams:
        """For an answer of exactly so many tokens. Seeded, so that runs are alike."""
        return SamplingParams(
            n=self.n,
            temperature=self.temperature,
            max_tokens=output_tokens,
            ignore_eos=True,
            seed=0,
        )


def throughput(
    llm: LLM,
    workload: Workload,
    sampling: Sampling,
    *,
    repeat: int = 1,
    length_seed: int,
    text_seed: int,
    tell: Tell = lambda text: None,
) -> Result:
    """Give the engine all requests at once, and time how long it takes to answer them all.

    The names in the result are those of ``vllm bench throughput --output-json``, medians over the
    repetitions; arrival times and turns of the workload play no part.

    Raises
    ------
    IncompleteError
        If an answer ended early.
    """
    prose = Prose(text_seed)
    tokenize = _tokenizer(llm)
    warm = Planned(asyncio.run(passage(tokenize, prose, 32)), 8)
    _generate(llm, [warm], sampling)
    times: list[float] = []
    prompt_tokens = output_tokens = 0
    for number in range(repeat):
        tell(f"repetition {number + 1} of {repeat}: {workload.requests} requests")
        planned = asyncio.run(plan(workload, tokenize, prose, length_seed))
        prompt_tokens = sum(len(p.prompt) for p in planned)
        output_tokens = sum(p.output_tokens for p in planned) * sampling.n
        times.append(_generate(llm, planned, sampling))
    elapsed = float(np.median(times))
    return {
        "format": THROUGHPUT_FORMAT,
        "turnstile": __version__,
        "workload": workload.name,
        "elapsed_time": elapsed,
        "num_requests": workload.requests,
        "total_num_tokens": prompt_tokens + output_tokens,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "requests_per_second": workload.requests / elapsed,
        "tokens_per_second": (prompt_tokens + output_tokens) / elapsed,
        "output_tokens_per_second": output_tokens / elapsed,
        "elapsed_times": times,
    }


def latency(
    llm: LLM,
    sampling: Sampling,
    *,
    input_len: int,
    output_len: int,
    batch_size: int,
    num_iters_warmup: int,
    num_iters: int,
    text_seed: int,
    tell: Tell = lambda text: None,
) -> Result:
    """Time batches of equal requests one after another; fresh text in each.

    The names in the result are those of ``vllm bench latency --output-json``, in seconds.

    Raises
    ------
    SizeError
        If there is nothing to measure.
    IncompleteError
        If an answer ended early.
    """
    for name, value in (
        ("--input-len", input_len),
        ("--output-len", output_len),
        ("--batch-size", batch_size),
        ("--num-iters", num_iters),
    ):
        if value < 1:
            raise SizeError(f"{name} must be at least 1, got {value}")
    prose, tokenize = Prose(text_seed), _tokenizer(llm)

    def batch() -> list[Planned]:
        return [
            Planned(asyncio.run(passage(tokenize, prose, input_len)), output_len)
            for _ in range(batch_size)
        ]

    tell(f"{num_iters_warmup} batches to warm up, {num_iters} to measure")
    for _ in range(num_iters_warmup):
        _generate(llm, batch(), sampling)
    times = [_generate(llm, batch(), sampling) for _ in range(num_iters)]
    ranks = np.percentile(times, PERCENTS)
    return {
        "format": LATENCY_FORMAT,
        "turnstile": __version__,
        "input_len": input_len,
        "output_len": output_len,
        "batch_size": batch_size,
        "avg_latency": float(np.mean(times)),
        "latencies": times,
        "percentiles": {str(p): float(v) for p, v in zip(PERCENTS, ranks, strict=True)},
    }


def throughput_lines(result: Result) -> str:
    """The lines ``vllm bench throughput`` prints."""
    return (
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, "
        f"{result['output_tokens_per_second']:.2f} output tokens/s\n"
        f"Total num prompt tokens:  {result['prompt_tokens']}\n"
        f"Total num output tokens:  {result['output_tokens']}"
    )


def latency_lines(result: Result) -> str:
    """The lines ``vllm bench latency`` prints."""
    lines = [f"Avg latency: {result['avg_latency']:.4f} seconds"]
    lines += [f"{p}% percentile latency: {v:.4f} seconds" for p, v in result["percentiles"].items()]
    return "\n".join(lines)


def _generate(llm: LLM, planned: Sequence[Planned], sampling: Sampling) -> float:
    """Seconds until every request has its answer."""
    params = [sampling.params(p.output_tokens) for p in planned]
    start = time.perf_counter()
    outputs = llm.generate([p.prompt for p in planned], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    for item, output in zip(planned, outputs, strict=True):
        for sample in output.outputs:
            if len(sample.token_ids) != item.output_tokens:
                raise IncompleteError(
                    f"an answer of {item.output_tokens} tokens ended after "
                    f"{len(sample.token_ids)} ({sample.error or sample.finish_reason})"
                )
    return seconds


def _tokenizer(llm: LLM) -> Callable[[str], Any]:
    tokenizer = llm.get_tokenizer()

    async def tokenize(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    return tokenize
