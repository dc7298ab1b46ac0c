"""Tiny random checkpoints, made on the fly: a real directory in milliseconds, without transformers.

::

    path = make_tiny_llama(tmp_path / "tiny")          config.json, safetensors, tokenizer files
    path = make_tiny_llama(tmp_path / "tiny", seed=1, num_layers=4, vocab_size=1024)

The text that comes out is noise, but everything else is real: a byte-level BPE tokenizer (256
bytes, some merges, three special tokens) with a chat template, weights large enough that greedy
decoding wanders instead of repeating one token, and an end-of-sequence id.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT, TURN_START, TURN_END = range(3)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

MERGES = [
    ("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n"), ("a", "n"), ("e", "r"), ("Ġ", "a"),
    ("o", "n"), ("r", "e"), ("an", "d"), ("Ġ", "and"), ("in", "g"), ("l", "l"), ("o", "u"),
]  # fmt: skip


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE: ids 0-2 are special, 3-258 the bytes, then one id for each merge."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL_TOKENS, *alphabet, *(left + right for left, right in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    return tokenizer


def write_tokenizer(directory: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` (with the chat template)."""
    make_tokenizer().save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[TURN_START],
        "eos_token": SPECIAL_TOKENS[TURN_END],
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def make_tiny_llama(
    directory: Path,
    *,
    seed: int = 0,
    vocab_size: int = 320,
    hidden_size: int = 64,
    intermediate_size: int = 128,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    max_positions: int = 512,
    tie_embeddings: bool = True,
    **config_overrides: Any,
) -> Path:
    """Write a random Llama checkpoint with a tokenizer into ``directory`` (made if absent).

    ``config_overrides`` go into ``config.json`` as they are. Returns ``directory``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": tie_embeddings,
        "bos_token_id": TURN_START,
        "eos_token_id": TURN_END,
        "torch_dtype": "float32",
    } | config_overrides
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    generation = {"bos_token_id": TURN_START, "eos_token_id": [TURN_END, END_OF_TEXT]}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=1))
    write_tokenizer(directory)

    random = np.random.default_rng(seed)
    tensors = _random_llama(
        random, vocab_size, hidden_size, intermediate_size, num_layers,
        num_heads * head_dim, num_kv_heads * head_dim,
    )  # fmt: skip
    if not tie_embeddings:
        head = random.standard_normal((vocab_size, hidden_size))
        tensors["lm_head.weight"] = (head * 1.5 / hidden_size**0.5).astype(np.float32)
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    return directory


def _random_llama(
    random: np.random.Generator, vocab_size: int, hidden_size: int, intermediate_size: int,
    num_layers: int, q_size: int, kv_size: int,
) -> dict[str, np.ndarray]:  # fmt: skip
    """The tensors of a model by their Hugging Face names, all but the head."""

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * 1.5 / columns**0.5).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return (1 + 0.1 * random.standard_normal(size)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(vocab_size, hidden_size) * 4}
    for i in range(num_layers):
        p = f"model.layers.{i}"
        tensors |= {
            f"{p}.input_layernorm.weight": norm(hidden_size),
            f"{p}.self_attn.q_proj.weight": matrix(q_size, hidden_size),
            f"{p}.self_attn.k_proj.weight": matrix(kv_size, hidden_size),
            f"{p}.self_attn.v_proj.weight": matrix(kv_size, hidden_size),
            f"{p}.self_attn.o_proj.weight": matrix(hidden_size, q_size),
            f"{p}.post_attention_layernorm.weight": norm(hidden_size),
            f"{p}.mlp.gate_proj.weight": matrix(intermediate_size, hidden_size),
            f"{p}.mlp.up_proj.weight": matrix(intermediate_size, hidden_size),
            f"{p}.mlp.down_proj.weight": matrix(hidden_size, intermediate_size),
        }
    return tensors | {"model.norm.weight": norm(hidden_size)}
