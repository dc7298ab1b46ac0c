"""Hardware by its data sheet, models by their shape, and the roofline that follows. Estimates.

A step reads all weights once and computes ``2 · parameters`` operations a token; whichever takes
longer counts. On top come the K and V that attention reads, the operations of long prompts'
attention, and a fixed time for launching kernels. Efficiencies are what well-made engines reach of
the data sheet. Nothing here was measured on that hardware, and every report says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from turnstile.core.cost import Coefficients
from turnstile.models.config import ModelConfig
from turnstile.simulate.timing import StepWork


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the roofline needs to know of a model."""

    name: str
    parameters: float
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_len: int

    @classmethod
    def of(cls, config: ModelConfig, name: str) -> ModelShape:
        """The shape of a model read from its files."""
        return cls(
            name,
            config.num_parameters,
            config.num_layers,
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.vocab_size,
            config.max_positions,
        )


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine by its data sheet.

    Attributes
    ----------
    operations, bandwidth, memory
        Dense operations (two a multiply-add) and bytes per second of the weights' type, and bytes
        for weights and the KV pool.
    compute_share, bandwidth_share, memory_share
        What an engine reaches of them.
    launch
        Seconds of a step in which nothing of this happens.
    row
        Seconds a sequence in the step costs outside the model (sampling, bookkeeping).
    weight_bytes, kv_bytes
        Bytes of a weight, and of an element of K or V.
    source
        Where the figures come from.
    """

    name: str
    operations: float
    bandwidth: float
    memory: float
    source: str
    compute_share: float = 0.55
    bandwidth_share: float = 0.8
    memory_share: float = 0.9
    launch: float = 1.0e-3
    row: float = 2.0e-6
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0


HARDWARE = {
    h.name: h
    for h in (
        Hardware("a100", 312e12, 2.039e12, 80e9, "NVIDIA A100 80 GB SXM, bfloat16 dense"),
        Hardware("h100", 989e12, 3.35e12, 80e9, "NVIDIA H100 80 GB SXM, bfloat16 dense"),
        Hardware("h200", 989e12, 4.8e12, 141e9, "NVIDIA H200 141 GB SXM, bfloat16 dense"),
        Hardware(
            "cpu", 1.9e12, 46e9, 8e9, "two cores with AVX-512 VNNI, int8 (docs/performance.md)",
            compute_share=0.9, bandwidth_share=0.9, launch=2.0e-4, row=2.0e-5,
            weight_bytes=1.0, kv_bytes=1.0,
        ),
    )
}  # fmt: skip

MODELS = {
    m.name: m
    for m in (
        ModelShape("135m", 134.5e6, 30, 576, 9, 3, 64, 49152, 8192),
        ModelShape("1b", 1.236e9, 16, 2048, 32, 8, 64, 128256, 131072),
        ModelShape("3b", 3.213e9, 28, 3072, 24, 8, 128, 128256, 131072),
        ModelShape("7b", 7.616e9, 28, 3584, 28, 4, 128, 152064, 32768),
        ModelShape("8b", 8.03e9, 32, 4096, 32, 8, 128, 128256, 131072),
        ModelShape("14b", 14.77e9, 48, 5120, 40, 8, 128, 152064, 32768),
        ModelShape("32b", 32.76e9, 64, 5120, 40, 8, 128, 152064, 32768),
        ModelShape("70b", 70.55e9, 80, 8192, 64, 8, 128, 128256, 131072),
    )
}
"""By the name people call them: SmolLM2 135M; Llama 3.2 1B and 3B, 3.1 8B and 70B; Qwen2.5."""


class PresetError(ValueError):
    """There is no such preset, or the model does not fit the hardware."""


def choose_hardware(name: str, count: int = 1) -> Hardware:
    """The preset of that name; ``count`` devices work as one (tensor parallel, 90 % as good).

    Raises
    ------
    PresetError
        There is none.
    """
    found = HARDWARE.get(name.lower())
    if found is None:
        raise PresetError(f"There is no hardware {name!r}; known are {', '.join(HARDWARE)}.")
    if count < 1:
        raise PresetError(f"--devices must be at least 1, not {count}.")
    if count == 1:
        return found
    return replace(
        found,
        name=f"{count}x{found.name}",
        operations=found.operations * count * 0.9,
        bandwidth=found.bandwidth * count * 0.9,
        memory=found.memory * count,
    )


def choose_model(name: str) -> ModelShape:
    """The shape of that name. Raises :class:`PresetError` if there is none."""
    found = MODELS.get(name.lower())
    if found is None:
        raise PresetError(
            f"There is no model shape {name!r}; known are {', '.join(MODELS)}, "
            "or the path of a model."
        )
    return found


class Roofline:
    """The time of a step by :class:`Hardware` and :class:`ModelShape`; see the module."""

    def __init__(self, hardware: Hardware, model: ModelShape) -> None:
        self.hardware = hardware
        self.model = model
        self.weights = model.parameters * hardware.weight_bytes
        self.kv_token = 2 * model.layers * model.kv_heads * model.head_dim * hardware.kv_bytes
        """Bytes of K and V a token has in all layers."""
        operations = hardware.operations * hardware.compute_share
        bandwidth = hardware.bandwidth * hardware.bandwidth_share
        # The embedding is a look-up, and the head runs for rows that draw: counted with the rest.
        self._token = 2 * model.parameters / operations
        self._read_weights = self.weights / bandwidth
        self._read_kv = self.kv_token / bandwidth
        self._pair = 4 * model.layers * model.heads * model.head_dim / operations

    def num_pages(self, page_size: int) -> int:
        """Pages that fit beside the weights.

        Raises
        ------
        PresetError
            The weights alone are too large.
        """
        room = self.hardware.memory * self.hardware.memory_share - self.weights
        pages = int(room // (self.kv_token * page_size))
        if pages < 1:
            raise PresetError(
                f"{self.model.name} ({self.weights / 1e9:.0f} GB of weights) does not fit "
                f"{self.hardware.name} ({self.hardware.memory / 1e9:.0f} GB); try --devices."
            )
        return pages

    @property
    def coefficients(self) -> Coefficients:
        """At a batch for which reading the weights takes as long as computing."""
        hardware = self.hardware
        start = hardware.launch + self._read_weights
        return Coefficients(start, self._token, self._pair, hardware.row, self._read_kv)

    def seconds(self, work: StepWork, step: int) -> float:
        hardware = self.hardware
        tokens = work.decodes + work.chunk_tokens
        matrices = max(self._read_weights, tokens * self._token)
        attention = (work.decode_context + work.chunk_context) * self._read_kv
        attention += work.chunk_pairs * self._pair
        rows = (work.decodes + work.chunks) * hardware.row
        return hardware.launch + matrices + attention + rows
