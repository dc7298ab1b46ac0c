"""Write a GGUF model as a Hugging Face directory in bfloat16, for servers that read no GGUF.

    PYTHONPATH=src python scripts/peers/export_checkpoint.py DIRECTORY [--model NAME_OR_FILE]

The weights are the dequantised ones, so that all servers compute with the same numbers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from turnstile.kernels.base import FloatArray, HeadWeights, LayerWeights, Matrix
from turnstile.kernels.bfloat16 import bfloat16_bits
from turnstile.models.default_model import NAME
from turnstile.models.loading import load_weights
from turnstile.models.source import ModelSource, resolve
from turnstile.text.export import export_tokenizer
from turnstile.text.tokenizer import Tokenizer

LAYER = {
    "input_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "post_attention_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}


class Collector:
    """Stands where a backend would: keeps the tensors under Hugging Face's names."""

    load_format = "bfloat16"

    def __init__(self, tied: bool) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._tied = tied
        self._layers = 0

    def prepare_embedding(self, table: Matrix) -> None:
        self._keep("model.embed_tokens.weight", table)

    def prepare_layer(self, layer: LayerWeights, inv_freq: FloatArray, rope_scale: float) -> None:
        for ours, theirs in LAYER.items():
            tensor = getattr(layer, ours)
            if tensor is not None:
                self._keep(f"model.layers.{self._layers}.{theirs}", tensor)
        self._layers += 1

    def prepare_head(self, head: HeadWeights) -> None:
        self._keep("model.norm.weight", head.norm)
        if not self._tied:
            self._keep("lm_head.weight", head.projection)

    def _keep(self, name: str, array: Matrix) -> None:
        bits = array if array.dtype == np.uint16 else bfloat16_bits(array)
        self.tensors[name] = torch.from_numpy(bits.copy()).view(torch.bfloat16)


def config_of(source: ModelSource) -> dict[str, Any]:
    """``config.json`` of a plain model; raises ValueError for what it does not know to write."""
    config = source.config
    if config.rope.kind not in ("none", "default"):
        raise ValueError(f"{source.name} has RoPE of kind {config.rope.kind}, not written here")
    if any(config.sliding_windows):
        raise ValueError(f"{source.name} has sliding windows, which are not written here")
    return {
        "architectures": [config.family.hf_architecture],
        "model_type": config.family.name,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tied_embeddings,
        "attention_bias": config.qkv_bias,
        "mlp_bias": False,
        "eos_token_id": sorted(source.generation.eos_ids),
        "torch_dtype": "bfloat16",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", default=NAME, help="name or GGUF file")
    options = parser.parse_args()
    source = resolve(options.model)
    settings = config_of(source)
    collector = Collector(source.config.tied_embeddings)
    load_weights(source, collector)  # type: ignore[arg-type]
    options.directory.mkdir(parents=True, exist_ok=True)
    file = options.directory / "model.safetensors"
    save_file(collector.tensors, file, metadata={"format": "pt"})
    (options.directory / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    tokenizer = Tokenizer.from_path(source.tokenizer_path)
    export_tokenizer(tokenizer, options.directory, max_length=source.config.max_positions)
    print(f"{source.name}: bfloat16 weights and tokenizer in {options.directory}")


if __name__ == "__main__":
    main()
