"""In exact mode a row depends on its own tokens alone, bit for bit; a plain control shows that
the comparison can fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from budget import examples
from stepping import Stepper
from tiny_models import make_tiny_llama
from turnstile.kernels import create_backend
from turnstile.models.decoder import Decoder
from turnstile.models.source import resolve

SHAPE = {
    # Nothing here is a power of two, so that every remainder of a kernel is met.
    "hidden_size": 88,
    "intermediate_size": 200,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 20,
    "vocab_size": 333,
    "num_layers": 3,
}
PROMPT = [(7 * i * i + 3 * i) % 333 for i in range(150)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("exact"), **SHAPE)


DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(
    scope="module", params=[(d, f) for d in DEVICES for f in ("float32", "bfloat16")], ids="-".join
)
def decoder(checkpoint: Path, request: pytest.FixtureRequest) -> Decoder:
    return load(checkpoint, *request.param)


def load(
    checkpoint: Path, device: str = "cpu", weight_format: str = "float32", exact: bool = True
) -> Decoder:
    torch.set_num_threads(2)  # the tiles must be tried on more than one
    backend = create_backend(device, weight_format, exact=exact, name="reference")
    return Decoder.load(resolve(str(checkpoint)), backend)


@pytest.fixture(params=[1, 2, 3])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


def alone(decoder: Decoder) -> Tensor:
    """The truth: one sequence, one step, one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logits = Stepper(decoder).run("me", PROMPT)
    torch.set_num_threads(threads)
    return logits


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("chunk", [1, 3, 4, 17, 64])
def test_chunks_of_any_size_give_the_same_bits(decoder: Decoder, chunk: int) -> None:
    stepper = Stepper(decoder, seed=chunk)
    assert torch.equal(stepper.run("me", PROMPT, chunk), alone(decoder))
    assert stepper.lengths["me"] == len(PROMPT)


@pytest.mark.usefixtures("_threads")
def test_fifty_others_in_the_batch_change_no_bit_of_a_sequence(decoder: Decoder) -> None:
    """Fifty others: some in prefill, some decoding, of many lengths, on pages mixed with mine."""
    stepper = Stepper(decoder, num_pages=800, seed=5)
    others = {f"other {i}": PROMPT[i : i + 1 + 5 * i % 140] for i in range(50)}
    stepper.step(others)
    parts = []
    for start in range(0, len(PROMPT), 25):
        before = {name: [start] for name in list(others)[: start // 5]}
        after = {name: PROMPT[:start] or [1] for name in list(others)[40:]}
        chunks = {**before, "me": PROMPT[start : start + 25], **after}
        parts.append(stepper.step(chunks)["me"])
    assert torch.equal(torch.cat(parts), alone(decoder))


@given(data=st.data())
@settings(max_examples=examples(25))
def test_any_cuts_among_any_company_give_the_same_bits(
    checkpoint: Path, data: st.DataObject
) -> None:
    decoder = DECODERS.setdefault(checkpoint, load(checkpoint))
    torch.set_num_threads(1)
    cuts = sorted(data.draw(st.sets(st.integers(1, 149), max_size=8)))
    stepper = Stepper(decoder, page_size=16, num_pages=400, seed=data.draw(st.integers(0, 99)))
    parts = []
    for start, end in zip([0, *cuts], [*cuts, 150], strict=True):
        company = data.draw(st.lists(st.integers(1, 40), max_size=4))
        chunks = {f"{start} {i}": PROMPT[:size] for i, size in enumerate(company)}
        chunks["me"] = PROMPT[start:end]
        order = data.draw(st.permutations(list(chunks)))
        parts.append(stepper.step({name: chunks[name] for name in order})["me"])
    assert torch.equal(torch.cat(parts), alone(decoder))


DECODERS: dict[Path, Decoder] = {}


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_storage_type_of_k_and_v_does_not_matter_to_it(checkpoint: Path, kv_dtype: str) -> None:
    decoder = Decoder.load(
        resolve(str(checkpoint)), create_backend("cpu", "float32", kv_dtype, name="reference")
    )
    whole, chunked = (Stepper(decoder, seed=c).run("me", PROMPT, c) for c in (150, 7))
    assert torch.equal(whole, chunked)


def test_chunks_read_k_and_v_as_stored(checkpoint: Path) -> None:
    """Fresh activations would make bfloat16 storage show only for earlier chunks."""
    source = resolve(str(checkpoint))
    stored, kept = (
        Decoder.load(source, create_backend("cpu", "float32", kv, name="reference"))
        for kv in ("bfloat16", "float32")
    )
    assert not torch.equal(alone(stored), alone(kept))


def test_plain_products_fail_the_same_comparison(checkpoint: Path) -> None:
    """The control: without fixed tiles a token alone is not the token in a chunk."""
    decoder = load(checkpoint, exact=False)
    torch.set_num_threads(1)
    whole, chunked = (Stepper(decoder).run("me", PROMPT, c) for c in (150, 1))
    assert not torch.equal(whole, chunked)
    assert torch.allclose(whole, chunked, rtol=1e-3, atol=1e-3)


def test_what_a_former_owner_left_in_a_page_is_never_read(decoder: Decoder) -> None:
    stepper = Stepper(decoder, num_pages=20, poison=True)
    first = stepper.run("me", PROMPT, 40)
    stepper.leave("me")
    for layer in stepper.kv.layers:
        layer.k[:20] = torch.nan
        layer.v[:20] = torch.inf
    assert torch.equal(stepper.run("me", PROMPT, 40), first)
    assert first.isfinite().all()


def test_a_sequence_with_nan_spoils_nobody_else(decoder: Decoder) -> None:
    stepper = Stepper(decoder)
    stepper.step({"bad": PROMPT[:30], "me": PROMPT[:100]})
    for layer in stepper.kv.layers:
        layer.k[stepper.pages["bad"]] = torch.nan
    logits = stepper.step({"bad": [1], "me": PROMPT[100:]})
    assert logits["bad"].isnan().all()
    assert torch.equal(logits["me"], alone(decoder)[100:])
    assert np.isnan(decoder.backend.log_normalizer(logits["bad"].numpy())).all()


def test_a_copied_page_carries_a_fork(decoder: Decoder) -> None:
    stepper = Stepper(decoder)
    stepper.run("me", PROMPT[:100])
    full, partial = stepper.pages["me"][:6], stepper.pages["me"][6]
    copy = stepper.free.pop()
    decoder.backend.copy_pages(stepper.kv, [(partial, copy)])
    stepper.pages["fork"], stepper.lengths["fork"] = [*full, copy], 100
    logits = stepper.step({"me": [5, 6], "fork": PROMPT[100:]})
    assert torch.equal(logits["fork"], alone(decoder)[100:])
    assert torch.equal(logits["me"], Stepper(decoder).run("x", [*PROMPT[:100], 5, 6])[100:])


def test_only_the_rows_asked_for_get_logits(decoder: Decoder) -> None:
    stepper = Stepper(decoder)
    batch = stepper.batch({"me": PROMPT[:20]}, every=True)
    whole = decoder.forward(batch, stepper.kv).copy()
    batch.logit_rows = batch.logit_rows[[3, 19]]
    assert np.array_equal(decoder.forward(batch, stepper.kv), whole[[3, 19]])
    batch.logit_rows = batch.logit_rows[:0]
    assert decoder.forward(batch, stepper.kv).shape == (0, 333)
