"""How far a measurement is from what the machine can do at best.

Two limits: multiply-adds a second in the weights' format, and bytes a second from memory. The work
asks for at least so much of both, however it is batched; over the time it took, that is the share
reached. The machine's best is measured in the same run, on the same threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnstile.models.config import ModelConfig

WEIGHT_BYTES = {"int8": 1, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Peaks:
    """What the machine does at best.

    Parameters
    ----------
    level
        Instruction set in use.
    weight_format
        Format that the operations are of.
    operations
        A second, two for each multiply-add.
    bandwidth
        Bytes a second that can be read from memory.
    """

    level: str
    weight_format: str
    threads: int
    operations: float
    bandwidth: float

    def better(self, other: Peaks) -> Peaks:
        """The best of two measurements: neighbours only ever take from it."""
        return Peaks(
            self.level,
            self.weight_format,
            self.threads,
            max(self.operations, other.operations),
            max(self.bandwidth, other.bandwidth),
        )


def measure_peaks(weight_format: str, threads: int) -> Peaks:
    """Measure them; takes some seconds, in which nothing else should run.

    Raises
    ------
    ModuleNotFoundError
        If the native kernels are not installed.
    """
    from turnstile.kernels.native import NativeBackend

    backend = NativeBackend(weight_format, weight_format, threads)
    return Peaks(
        backend.level,
        weight_format,
        backend.threads,
        backend.peak_operations(),
        backend.peak_bandwidth(),
    )


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What a token costs.

    Parameters
    ----------
    token_operations
        In the layers' matrix products, for every token computed.
    logit_operations
        In the output projection, for every token drawn.
    step_bytes
        Weights that every step reads, however many tokens it has.
    kv_token_bytes
        K and V of one token.
    """

    token_operations: float
    logit_operations: float
    step_bytes: float
    kv_token_bytes: float

    @classmethod
    def of(cls, config: ModelConfig, weight_format: str, kv_token_bytes: float) -> ModelCost:
        """The cost of this model in this format."""
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        layer = config.hidden_size * (2 * q + 2 * kv + 3 * config.intermediate_size)
        layers, head = layer * config.num_layers, config.hidden_size * config.vocab_size
        step_bytes = (layers + head) * WEIGHT_BYTES[weight_format]
        return cls(2.0 * layers, 2.0 * head, step_bytes, kv_token_bytes)


@dataclass(frozen=True, slots=True)
class Demand:
    """The least that some work takes: operations, and bytes from memory."""

    operations: float
    num_bytes: float

    @classmethod
    def of(
        cls, cost: ModelCost, lengths: Sequence[tuple[int, int]], cached: float, steps: float
    ) -> Demand:
        """What requests of these lengths take.

        Parameters
        ----------
        lengths
            Prompt and output tokens of each request.
        cached
            Prompt tokens that came from the prefix cache, and were not computed.
        steps
            Forward passes in all; each reads the weights once.
        """
        computed = sum(prompt + max(output - 1, 0) for prompt, output in lengths) - cached
        drawn = sum(output for _, output in lengths)
        # The k-th output after the first sees the prompt and k tokens more.
        seen = sum(
            (output - 1) * prompt + output * (output - 1) // 2
            for prompt, output in lengths
            if output > 1
        )
        return cls(
            computed * cost.token_operations + drawn * cost.logit_operations,
            steps * cost.step_bytes + (seen + computed) * cost.kv_token_bytes,
        )

    def shares(self, peaks: Peaks, seconds: float) -> dict[str, float]:
        """The shares of the machine's best that this work over these seconds is."""
        return {
            "operations_per_s": self.operations / seconds,
            "operations_share": self.operations / seconds / peaks.operations,
            "bytes_per_s": self.num_bytes / seconds,
            "bandwidth_share": self.num_bytes / seconds / peaks.bandwidth,
        }


def roofline_line(name: str, shares: Mapping[str, Any]) -> str:
    """One line for people."""
    busy = shares.get("busy_share")
    return (
        f"{name:<5}products {shares['operations_per_s'] / 1e9:>6,.0f} G/s "
        f"({shares['operations_share']:>4.0%} of the best), "
        f"memory {shares['bytes_per_s'] / 1e9:>5.1f} GB/s ({shares['bandwidth_share']:>4.0%})"
        + (f", engine in steps {busy:.0%} of the time" if busy is not None else "")
    )
