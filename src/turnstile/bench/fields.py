"""The result under the names that ``vllm bench serve --save-result`` uses, for tools that read it.

They stand at the top level of the file, beside our own: medians over the repetitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnstile.bench.metrics import METRICS, PERCENTS, Figures
from turnstile.bench.records import Record
from turnstile.bench.workloads import Workload

NAMES = {
    "duration": "duration_s",
    "completed": "completed",
    "failed": "failed",
    "total_input_tokens": "prompt_tokens",
    "total_output_tokens": "output_tokens",
    "request_throughput": "request_throughput",
    "output_throughput": "output_throughput",
    "total_token_throughput": "total_token_throughput",
    "max_concurrent_requests": "peak_concurrency",
    "max_output_tokens_per_s": "peak_output_throughput",
}


def flat(workload: Workload, model: str, endpoint: str, figures: Figures) -> dict[str, Any]:
    """The fields of vLLM's result file that we have a figure for."""
    goodput = figures.get("goodput")
    return {
        "backend": "openai-chat" if "chat" in endpoint else "openai",
        "model_id": model,
        "num_prompts": workload.requests,
        "request_rate": "inf" if workload.rate is None else workload.rate,
        "burstiness": workload.burstiness,
        "max_concurrency": workload.users or workload.max_concurrency,
        **{name: figures[ours] for name, ours in NAMES.items()},
        "request_goodput": goodput["requests_per_s"] if goodput else None,
        **{
            name: value
            for metric in METRICS
            for name, value in _distribution(metric, figures[f"{metric}_ms"]).items()
        },
    }


def _distribution(metric: str, values: Figures) -> dict[str, float | None]:
    named = {
        f"mean_{metric}_ms": values["mean"],
        f"median_{metric}_ms": values["p50"],
        f"std_{metric}_ms": values["std"],
    }
    return named | {f"p{p}_{metric}_ms": values[f"p{p}"] for p in PERCENTS}


def detail(records: Sequence[Record]) -> dict[str, Any]:
    """One entry a request, in the order they were sent; seconds, as vLLM's file has them."""
    return {
        "input_lens": [r.prompt_tokens for r in records],
        "output_lens": [r.output_tokens for r in records],
        "start_times": [r.due for r in records],
        "end_times": [r.ended for r in records],
        "ttfts": [r.ttft for r in records],
        "itls": [r.gaps for r in records],
        "outcomes": [r.outcome for r in records],
        "errors": [r.reason or "" for r in records],
    }
