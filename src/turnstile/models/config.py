"""What a model is, in numbers: :class:`ModelConfig`, whatever file it came from. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from turnstile.models.errors import CorruptFileError
from turnstile.models.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture: its names, and what its layers have beyond Llama's.

    ``rotates_neighbours``: GGUF stores this family's q and k with the two halves of every head
    interleaved, which loading undoes.
    """

    name: str
    hf_architecture: str
    gguf_architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    rotates_neighbours: bool = False


FAMILIES = (
    Family("llama", "LlamaForCausalLM", "llama", rotates_neighbours=True),
    Family("mistral", "MistralForCausalLM", "llama", rotates_neighbours=True),
    Family("qwen2", "Qwen2ForCausalLM", "qwen2", qkv_bias=True),
    Family("qwen3", "Qwen3ForCausalLM", "qwen3", qk_norm=True),
)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only transformer.

    ``sliding_windows`` has one entry a layer: how many tokens it sees, itself included, or None.
    ``stored_dtype`` is the type most of the weights have in the file.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope: RopeConfig
    tied_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    sliding_windows: tuple[int | None, ...]
    stored_dtype: str

    @property
    def num_parameters(self) -> int:
        """Parameters, tied ones counted once."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * q + 2 * kv)
        attention += (q + 2 * kv) * self.qkv_bias + self.hidden_size * self.o_bias
        attention += 2 * self.head_dim * self.family.qk_norm
        mlp = 3 * self.hidden_size * self.intermediate_size
        tables = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        per_layer = attention + mlp + 2 * self.hidden_size
        return self.num_layers * per_layer + tables + self.hidden_size


MAX_LAYERS = 4096
MAX_WIDTH = 1 << 24


def checked(config: ModelConfig, where: str) -> ModelConfig:
    """``config`` again, once its numbers make sense together.

    Raises
    ------
    CorruptFileError
        Naming ``where`` and the number that is impossible.
    """
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
    }
    problems = [f"{k} is {v}" for k, v in sizes.items() if not 0 < v <= MAX_WIDTH]
    if not 0 < config.num_layers <= MAX_LAYERS:
        problems.append(f"num_layers is {config.num_layers}")
    if not 0 < config.max_positions < 1 << 31:
        problems.append(f"the context is {config.max_positions}")
    if config.num_kv_heads > 0 and config.num_heads % config.num_kv_heads:
        problems.append(f"{config.num_heads} heads share {config.num_kv_heads} KV heads")
    if config.head_dim % 2:
        problems.append(f"head_dim is odd ({config.head_dim}), which RoPE cannot turn")
    if not 0 <= config.norm_eps < 1:
        problems.append(f"the norm epsilon is {config.norm_eps}")
    if any(window is not None and window < 1 for window in config.sliding_windows):
        problems.append("a sliding window is empty")
    problems.extend(_rope_problems(config.rope))
    if problems:
        raise CorruptFileError(f"{where} describes an impossible model: {'; '.join(problems)}.")
    return config


def _rope_problems(rope: RopeConfig) -> list[str]:
    """Also keeps numbers so large or small that the arithmetic of RoPE would overflow."""
    problems = []
    if not 1 < rope.theta < 1e15:
        problems.append(f"the RoPE base is {rope.theta}")
    if not 1e-6 < rope.factor < 1e6:
        problems.append(f"the RoPE factor is {rope.factor}")
    if rope.kind in ("llama3", "yarn") and not 1 <= rope.original_positions < 1 << 31:
        problems.append(f"the original context of RoPE is {rope.original_positions}")
    if rope.kind == "llama3" and not rope.high_frequency - rope.low_frequency > 1e-6:
        problems.append("the llama3 RoPE frequencies are not ascending")
    if rope.kind == "yarn" and not 1e-6 < rope.beta_slow < rope.beta_fast < 1e6:
        problems.append("the YaRN betas are not ascending")
    if rope.attention_factor is not None and not 0 < rope.attention_factor < 1e6:
        problems.append(f"the YaRN attention factor is {rope.attention_factor}")
    if rope.kind == "factors" and len(rope.factors) != rope.head_dim // 2:
        problems.append(f"{len(rope.factors)} RoPE factors for {rope.head_dim // 2} pairs")
    if not all(1e-6 < factor < 1e6 for factor in rope.factors):
        problems.append("a RoPE factor is out of range")
    return problems


def known_architectures(attribute: str) -> str:
    """The names of the known architectures, for messages."""
    return ", ".join(dict.fromkeys(getattr(family, attribute) for family in FAMILIES))
