"""The native backend: a row's bits depend on its own tokens alone, in every format, on every
instruction set level; and the numbers are the reference's.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from stepping import Stepper
from tiny_models import make_tiny_llama
from turnstile.kernels import create_backend
from turnstile.kernels.native import NativeBackend, available
from turnstile.models.decoder import Decoder
from turnstile.models.source import resolve

if not available()[0]:
    pytest.skip(available()[1], allow_module_level=True)

import turnstile_kernels

LEVELS = turnstile_kernels.levels()
FORMATS = [
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("int8", "int8"),
    ("int8", "bfloat16"),
]
SHAPE = {
    "hidden_size": 112,  # neither a power of two nor whole panels
    "intermediate_size": 200,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 48,
    "vocab_size": 333,
    "num_layers": 3,
    "max_positions": 2048,
}
WHOLE = SHAPE | {  # every product fits whole tiles, where there are tiles
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 64,
}
PROMPT = [(7 * i * i + 3 * i) % 333 for i in range(150)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("whole"), **WHOLE)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, level: str, whole: Path) -> Path:
    odd = tmp_path_factory.mktemp("exact")
    return whole if level == "amx" else make_tiny_llama(odd, **SHAPE)


def load(
    checkpoint: Path, formats: tuple[str, str], level: str | None = None, threads: int = 1
) -> Decoder:
    backend = NativeBackend(*formats, threads, level=level)
    return Decoder.load(resolve(str(checkpoint)), backend)


@pytest.fixture(scope="module", params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=FORMATS, ids="-".join)
def decoder(checkpoint: Path, level: str, request: pytest.FixtureRequest) -> Decoder:
    return load(checkpoint, request.param, level)


@pytest.mark.parametrize("chunk", [1, 3, 16, 17, 64])
def test_chunks_of_any_size_give_the_same_bits(decoder: Decoder, chunk: int) -> None:
    alone = Stepper(decoder).run("me", PROMPT)
    assert torch.equal(Stepper(decoder, seed=chunk).run("me", PROMPT, chunk), alone)


def test_a_row_among_99_has_the_bits_it_has_alone(decoder: Decoder) -> None:
    alone = Stepper(decoder).run("me", PROMPT)
    crowd = Stepper(decoder, num_pages=1200, seed=1)
    random = np.random.default_rng(0)
    names = [f"other {i}" for i in range(99)]
    crowd.step({name: random.integers(0, 333, 1 + i % 40).tolist() for i, name in enumerate(names)})
    rows = []
    for start in range(0, 150, 30):
        chunks = {name: [int(random.integers(333))] for name in names}
        order = list(chunks.items())
        order.insert(int(random.integers(100)), ("me", PROMPT[start : start + 30]))
        rows.append(crowd.step(dict(order))["me"])
    assert torch.equal(torch.cat(rows), alone)


@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
def test_logits_have_the_same_bits_on_any_number_of_threads(
    whole: Path, formats: tuple[str, str]
) -> None:
    one, three = load(whole, formats), load(whole, formats, threads=3)
    expected = Stepper(one).run("me", PROMPT)
    for _ in range(10):  # who takes which piece is different every time
        assert torch.equal(Stepper(three).run("me", PROMPT, 40), expected)


def test_logits_written_past_the_caches_have_the_same_bits(whole: Path) -> None:
    decoder = load(whole, ("int8", "int8"), threads=2)
    ids = [(5 * i * i + i) % 333 for i in range(1600)]  # more than 2 MB of logits in one step
    assert torch.equal(Stepper(decoder).run("me", ids), Stepper(decoder).run("me", ids, 400))


def test_int8_has_the_bits_of_vectors_in_tiles_too(whole: Path) -> None:
    wide = [level for level in LEVELS if level not in ("avx2", "portable")]
    if len(wide) < 2:
        pytest.skip(f"this processor runs only {', '.join(LEVELS)}")
    first, *others = (
        Stepper(load(whole, ("int8", "int8"), level)).run("me", PROMPT, 40) for level in wide
    )
    for other in others:
        assert torch.equal(other, first)


def test_what_nobody_wrote_is_never_read(decoder: Decoder) -> None:
    clean = Stepper(decoder).run("me", PROMPT, 20)
    poisoned = Stepper(decoder)
    poisoned.kv.bytes()[:] = 0xFF  # NaN in every float format, and in the scales of int8
    assert torch.equal(poisoned.run("me", PROMPT, 20), clean)


def test_rows_without_logits_do_not_show_in_those_with(decoder: Decoder) -> None:
    """Of the last layer they get K and V alone: what is asked for later still has its bits."""
    alone = Stepper(decoder).run("me", PROMPT)
    stepper = Stepper(decoder)
    batch = stepper.batch({"other": PROMPT[:40], "me": PROMPT[:100], "third": [5]}, every=True)
    batch.logit_rows = np.array([3, 39, 40, 57, 58, 59, 120, 139], np.int32)
    got = torch.from_numpy(decoder.forward(batch, stepper.kv).copy())
    assert torch.equal(got, alone[[3, 39, 0, 17, 18, 19, 80, 99]])
    unheard = stepper.batch({"me": PROMPT[100:140]}, every=True)
    unheard.logit_rows = unheard.logit_rows[:0]
    assert decoder.forward(unheard, stepper.kv).shape == (0, 333)
    assert torch.equal(stepper.step({"me": PROMPT[140:]})["me"], alone[140:])


@pytest.mark.parametrize("rows", [[3, 2], [2, 2], [-1], [20]], ids=str)
def test_logit_rows_must_ascend_inside_the_batch(whole: Path, rows: list[int]) -> None:
    stepper = Stepper(load(whole, ("int8", "int8")))
    batch = stepper.batch({"me": PROMPT[:20]}, every=True)
    batch.logit_rows = np.array(rows, np.int32)
    with pytest.raises(ValueError, match="logit row"):
        stepper.decoder.forward(batch, stepper.kv)


def test_a_copied_page_continues_as_the_original(decoder: Decoder) -> None:
    stepper = Stepper(decoder)
    stepper.run("me", PROMPT[:41])
    backend, pages = decoder.backend, stepper.pages["me"]
    copies = [stepper.free.pop() for _ in pages]
    backend.copy_pages(stepper.kv, list(zip(pages, copies, strict=True)))
    stepper.pages["fork"], stepper.lengths["fork"] = copies, stepper.lengths["me"]
    both = stepper.step({"me": PROMPT[41:60], "fork": PROMPT[41:60]})
    assert torch.equal(both["me"], both["fork"])


@pytest.mark.parametrize(
    ("formats", "tolerance"),
    [
        (("float32", "float32"), 1e-5),
        (("float32", "bfloat16"), 0.02),
        (("float32", "int8"), 0.05),
        (("bfloat16", "bfloat16"), 0.05),
        (("int8", "int8"), 0.15),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_every_format_is_near_the_reference(
    checkpoint: Path, level: str, formats: tuple[str, str], tolerance: float
) -> None:
    source = resolve(str(checkpoint))
    reference = Decoder.load(source, create_backend("cpu", "float32", name="reference"))
    expected = Stepper(reference).run("me", PROMPT)
    got = Stepper(load(checkpoint, formats, level)).run("me", PROMPT)
    error = (got - expected).pow(2).mean().sqrt() / expected.std()
    assert error < tolerance


def test_a_nan_stays_in_its_own_row(decoder: Decoder) -> None:
    """Token 5 is made to embed as NaN: its sequence must show it, its neighbour must not."""
    stepper = Stepper(decoder)
    table = np.full((333, decoder.config.hidden_size), np.nan, np.float32)
    good = Stepper(decoder).run("good", PROMPT[:20])
    embedding = decoder.weights.embedding
    decoder.weights.embedding = decoder.backend.prepare_embedding(table)
    try:
        bad = stepper.run("bad", [5, 6])
    finally:
        decoder.weights.embedding = embedding
    assert bad.isnan().all()
    assert np.isnan(decoder.backend.log_normalizer(bad.numpy())).all()
    both = stepper.step({"bad": [7], "good": PROMPT[:20]})
    assert both["bad"].isnan().all()
    assert torch.equal(both["good"], good)
