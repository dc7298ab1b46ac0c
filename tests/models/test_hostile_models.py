"""Whatever is wrong with a model, what comes out is a ModelError: one sentence, and no crash."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budget import examples
from models.test_gguf import document, entry, string, tensor
from models.test_gguf_models import build, write
from tiny_models import make_tiny_llama
from turnstile.kernels import create_backend
from turnstile.models.decoder import Decoder
from turnstile.models.errors import CorruptFileError, ModelError
from turnstile.models.source import resolve

Load = Callable[[Path], None]
BACKEND = create_backend("cpu", exact=False, name="reference")


def load(path: Path) -> None:
    with contextlib.suppress(ModelError):
        Decoder.load(resolve(str(path)), BACKEND)


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("hostile") / "m.gguf"
    sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 32, "head_dim": 16}
    model = build("llama", **sizes, num_hidden_layers=1)

    def extra(writer: Any) -> None:
        writer.add_sliding_window(9)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(2.0)
        writer.add_rope_scaling_orig_ctx_len(64)

    write(path, model, "llama", extra=extra)
    Decoder.load(resolve(str(path)), BACKEND)
    return path.read_bytes()


@given(data=st.data())
@settings(max_examples=examples(200))
def test_a_gguf_with_changed_bytes(
    data: st.DataObject, gguf_bytes: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    raw = bytearray(gguf_bytes)
    header = gguf_bytes.index(b"output_norm.weight") + 60
    for _ in range(data.draw(st.integers(1, 3))):
        value = data.draw(st.one_of(st.binary(min_size=1, max_size=8), st.just(b"\xff" * 8)))
        at = data.draw(st.integers(4, header))
        raw[at : at + len(value)] = value
    path = tmp_path_factory.getbasetemp() / "changed-model.gguf"
    path.write_bytes(raw)
    load(path)


@given(data=st.data())
@settings(max_examples=examples(200))
def test_metadata_of_other_types_loads_or_is_refused_cleanly(
    data: st.DataObject, gguf_bytes: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any key may turn out an array, a string, or a number of another kind and size."""
    key = data.draw(
        st.sampled_from(
            [b"general.architecture", b"llama.block_count", b"llama.context_length",
             b"llama.attention.head_count", b"llama.rope.freq_base", b"llama.rope.scaling.type",
             b"tokenizer.ggml.eos_token_id", b"llama.attention.sliding_window"]
        )
    )  # fmt: skip
    four = st.integers(0, 2**32 - 1).map(lambda n: n.to_bytes(4, "little"))
    eight = st.one_of(st.integers(0, 40), st.integers(0, 2**64 - 1)).map(
        lambda n: n.to_bytes(8, "little")
    )
    arrays = st.tuples(st.sampled_from([4, 5, 6]), st.lists(four, max_size=3)).map(
        lambda pair: b"\x09\0\0\0" + pair[0].to_bytes(4, "little")
        + len(pair[1]).to_bytes(8, "little") + b"".join(pair[1])
    )  # fmt: skip
    value = data.draw(
        st.one_of(
            four.map(lambda raw: b"\x04\0\0\0" + raw),
            four.map(lambda raw: b"\x05\0\0\0" + raw),
            four.map(lambda raw: b"\x06\0\0\0" + raw),
            eight.map(lambda raw: b"\x0a\0\0\0" + raw),
            eight.map(lambda raw: b"\x0c\0\0\0" + raw),
            st.binary(max_size=6).map(
                lambda raw: b"\x08\0\0\0" + len(raw).to_bytes(8, "little") + raw
            ),
            arrays,
        )
    )
    at = gguf_bytes.index(len(key).to_bytes(8, "little") + key) + 8 + len(key)
    text = gguf_bytes[at] == 8
    old = 12 + int.from_bytes(gguf_bytes[at + 4 : at + 12], "little") if text else 8
    raw = gguf_bytes[:at] + value + gguf_bytes[at + old :]
    path = tmp_path_factory.getbasetemp() / "retyped-model.gguf"
    path.write_bytes(raw)
    load(path)


SMALL = [
    entry("general.architecture", 8, string("llama")),
    *(
        entry(f"llama.{key}", 4, struct.pack("<I", value))
        for key, value in {
            "embedding_length": 4, "attention.head_count": 2, "block_count": 1,
            "feed_forward_length": 4, "context_length": 64,
        }.items()
    ),
    entry("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([tensor("token_embd.weight", (32,), 0, 0)], r"shape \[32\], which is no matrix"),
        (
            [tensor("token_embd.weight", (4, 8), 0, 0), tensor("rope_freqs.weight", (8,), 0, 128)],
            r"rope_freqs.weight has shape \[8\], but a head has 1 pairs",
        ),
    ],
)
def test_a_tensor_that_settles_a_number_must_have_its_shape(
    tensors: list[bytes], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(document(SMALL, tensors, bytes(256)))
    with pytest.raises(CorruptFileError, match=words):
        resolve(str(path))


anything = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 10), st.integers(), st.floats(),
    st.text(max_size=4), st.lists(st.integers(-1, 3), max_size=3),
    st.dictionaries(st.sampled_from(["rope_type", "factor", "type"]), st.text(max_size=6)),
    st.fixed_dictionaries(
        {"rope_type": st.sampled_from(["yarn", "linear", "llama3"])},
        optional={
            name: st.one_of(st.floats(), st.integers(-1, 9))
            for name in ("factor", "original_max_position_embeddings", "low_freq_factor",
                         "high_freq_factor", "beta_fast", "beta_slow", "mscale",
                         "mscale_all_dim", "attention_factor", "rope_theta")
        },
    ),
)  # fmt: skip


@given(data=st.data())
@settings(max_examples=examples(200))
def test_a_config_with_changed_values(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = make_tiny_llama(tmp_path_factory.getbasetemp() / "hostile-config")
    path = directory / data.draw(st.sampled_from(["config.json", "generation_config.json"]))
    config = json.loads(path.read_text())
    extra = ["rope_scaling", "rope_parameters", "sliding_window", "layer_types", "temperature"]
    for key in data.draw(st.sets(st.sampled_from([*config, *extra]), min_size=1, max_size=3)):
        config[key] = data.draw(anything)
    path.write_text(json.dumps(config))
    load(directory)
