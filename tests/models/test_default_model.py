"""The default model, against transformers with weights that ggml's own package dequantised."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.quants import dequantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from models.agreement import assert_agreement
from stepping import Stepper
from turnstile.kernels import create_backend
from turnstile.models import default_model
from turnstile.models.decoder import Decoder
from turnstile.models.gguf import read_gguf
from turnstile.models.source import resolve

pytestmark = pytest.mark.model

TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Once upon a time, in a village by the sea, there lived a",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "Dear Sir or Madam,\n\nI am writing to",
    "Water boils at 100 degrees",
    "SELECT name, COUNT(*) FROM users GROUP BY",
    "La tour Eiffel est",
    "Q: What is the largest planet?\nA:",
)
GENERATED = 64


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    if not default_model.is_present():
        pytest.skip("the default model is not in the cache: run `turnstile pull`")
    return Decoder.load(resolve(default_model.NAME), create_backend("cpu", name="reference"))


@pytest.fixture(scope="module")
def oracle(decoder: Decoder) -> transformers.LlamaForCausalLM:
    """A transformers model filled from the file by another reader, name by name."""
    reader = gguf.GGUFReader(default_model.default_model_path())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for name, parameter in model.named_parameters():
        ggml_name = names.get_name(name, try_suffixes=(".weight",))
        values = dequantize(tensors[ggml_name].data, tensors[ggml_name].tensor_type)
        value = torch.from_numpy(np.array(values, np.float32))
        for projection, heads in (("q_proj", 9), ("k_proj", 3)):
            if projection in name:  # ggml interleaves the halves of every head
                value = value.view(heads, 32, 2, 576).swapaxes(1, 2).reshape(value.shape)
        with torch.no_grad():
            parameter.copy_(value)
    return model


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    metadata = read_gguf(default_model.default_model_path()).metadata
    vocabulary = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return [tokenizer.encode(text).ids for text in TEXTS]


def greedy(
    decoder: Decoder, prompts: list[list[int]], count: int = GENERATED
) -> list[tuple[list[int], Tensor]]:
    """Generate for all prompts at once: the tokens, and the logits each was chosen from."""
    stepper = Stepper(decoder, num_pages=512)
    chunks = {str(i): prompt for i, prompt in enumerate(prompts)}
    chosen: dict[str, list[int]] = {name: [] for name in chunks}
    rows: dict[str, list[Tensor]] = {name: [] for name in chunks}
    for _ in range(count):
        for name, logits in stepper.step(chunks).items():
            rows[name].append(logits[-1])
            chosen[name].append(int(decoder.backend.argmax(logits[-1:].numpy())[0]))
        chunks = {name: tokens[-1:] for name, tokens in chosen.items()}
    return [(chosen[name], torch.stack(rows[name])) for name in chunks]


def test_generation_agrees_with_transformers(
    decoder: Decoder, oracle: transformers.LlamaForCausalLM, prompts: list[list[int]]
) -> None:
    """Nine prompts, 64 tokens each, the oracle forced along what we generated."""
    for prompt, (chosen, ours) in zip(prompts, greedy(decoder, prompts), strict=True):
        assert len(chosen) == GENERATED
        with torch.no_grad():
            theirs = oracle(torch.tensor([prompt + chosen])).logits[0]
        assert_agreement(ours, theirs[len(prompt) - 1 : -1])


def test_prefill_agrees_with_transformers(
    decoder: Decoder, oracle: transformers.LlamaForCausalLM, prompts: list[list[int]]
) -> None:
    ids = [token for prompt in prompts for token in prompt] * 3
    assert len(ids) > 256
    with torch.no_grad():
        theirs = oracle(torch.tensor([ids])).logits[0]
    assert_agreement(Stepper(decoder).run("only", ids), theirs)


def test_one_in_a_crowd_gets_what_it_gets_alone(decoder: Decoder, prompts: list[list[int]]) -> None:
    [(chosen, alone)] = greedy(decoder, prompts[:1], 13)
    stepper = Stepper(decoder, num_pages=512)
    crowd = {f"user {i}": prompts[i % len(prompts)] for i in range(20)}
    steps = [{**crowd, "me": prompts[0]}]
    steps += [{name: [token] for name in [*crowd, "me"]} for token in chosen[:12]]
    rows = [stepper.step(chunks)["me"][-1] for chunks in steps]
    assert torch.equal(torch.stack(rows), alone)
