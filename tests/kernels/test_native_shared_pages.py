"""Sequences that begin with the same pages attend them together, and none of them can tell: ids and
logits are, bit for bit, what each gets alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from stepping import Stepper
from tiny_models import make_tiny_llama
from turnstile.kernels.native import NativeBackend, available
from turnstile.models.decoder import Decoder
from turnstile.models.source import resolve

if not available()[0]:
    pytest.skip(available()[1], allow_module_level=True)

import turnstile_kernels

LEVELS = turnstile_kernels.levels()
FORMATS = [("float32", "float32"), ("bfloat16", "bfloat16"), ("int8", "int8")]
SHAPE = {"num_heads": 6, "num_kv_heads": 2, "vocab_size": 333, "max_positions": 2048}
PREFIX = [(11 * i * i + 5 * i) % 333 for i in range(272)]  # 17 pages, two spans of 128 and a bit


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    return {
        d: make_tiny_llama(
            tmp_path_factory.mktemp(f"head{d}"),
            **SHAPE, num_layers=2, hidden_size=64, intermediate_size=64, head_dim=d,
        )
        for d in (48, 64)
    }  # fmt: skip


@pytest.fixture(scope="module", params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=FORMATS, ids="-".join)
def decoder(checkpoints: dict[int, Path], level: str, request: pytest.FixtureRequest) -> Decoder:
    head_dim = 64 if level in ("amx", "portable") else 48  # whole tiles where there are tiles
    return load(checkpoints[head_dim], request.param, level)


def load(checkpoint: Path, formats: tuple[str, str], level: str, threads: int = 1) -> Decoder:
    backend = NativeBackend(*formats, threads, level=level)
    return Decoder.load(resolve(str(checkpoint)), backend)


def own(name: str, count: int) -> list[int]:
    return np.random.default_rng(sum(map(ord, name))).integers(0, 333, count).tolist()


class Sharing(Stepper):
    """A stepper whose sequences can begin with another's full pages, as the prefix cache has it."""

    def begin_as(self, name: str, other: str, tokens: int) -> None:
        self.pages[name] = self.pages[other][: tokens // self.page_size]
        self.lengths[name] = tokens


def alone(decoder: Decoder, prefix: list[int], name: str, steps: int) -> Tensor:
    """What is computed after ``prefix``: seven tokens at once, then ``steps - 1`` single ones."""
    stepper = Stepper(decoder, num_pages=64)
    stepper.run("me", prefix)
    ids = own(name, 6 + steps)
    return torch.cat([stepper.run("me", ids[:7]), stepper.run("me", ids[7:], 1)])


def together(
    stepper: Stepper, names: list[str], steps: int, others: dict[str, list[int]] | None = None
) -> dict[str, Tensor]:
    """The same for all of them at once; ``others`` compute a token in every step, too."""
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    for step in range(steps):
        cut = slice(0, 7) if step == 0 else slice(6 + step, 7 + step)
        chunks = {name: own(name, 6 + steps)[cut] for name in names}
        for name, ids in (others or {}).items():
            chunks[name] = [ids[step]]
        for name, row in stepper.step(chunks).items():
            if name in rows:
                rows[name].append(row)
    return {name: torch.cat(parts) for name, parts in rows.items()}


def logprobs(logits: Tensor) -> Tensor:
    return logits - logits.logsumexp(1, keepdim=True)


def assert_same(got: Tensor, expected: Tensor) -> None:
    assert torch.equal(got.argmax(1), expected.argmax(1))
    assert torch.equal(logprobs(got), logprobs(expected))
    assert torch.equal(got, expected)


def test_behind_one_prefix_everybody_gets_what_they_get_alone(decoder: Decoder) -> None:
    stepper = Sharing(decoder, num_pages=256)
    stepper.run("first", PREFIX)
    names = [f"user {i}" for i in range(19)]
    for name in names:
        stepper.begin_as(name, "first", 272)
    got = together(stepper, names, 3, {"first": own("first", 3)})
    for name in names[::9]:
        assert_same(got[name], alone(decoder, PREFIX, name, 3))


def test_behind_one_prefix_rows_without_logits_do_not_show(decoder: Decoder) -> None:
    stepper = Sharing(decoder, num_pages=256)
    stepper.run("first", PREFIX)
    names = [f"user {i}" for i in range(6)]
    for name in names:
        stepper.begin_as(name, "first", 272)
    batch = stepper.batch({name: own(name, 8)[:7] for name in names}, every=False)
    batch.logit_rows = batch.logit_rows[1:]  # the first user's prompt goes on
    got = torch.from_numpy(decoder.forward(batch, stepper.kv).copy())
    for row, name in enumerate(names[1:]):
        assert_same(got[row : row + 1], alone(decoder, PREFIX, name, 2)[6:7])


def test_different_lengths_of_shared_runs(decoder: Decoder) -> None:
    """One page, just under and over a span, some spans; and branches that part later."""
    stepper = Sharing(decoder, num_pages=256)
    stepper.run("first", PREFIX)
    lengths = [16, 112, 128, 128, 144, 240, 256, 272, 272]
    for i, length in enumerate(lengths):
        stepper.begin_as(f"user {i}", "first", length)
    stepper.begin_as("branch", "first", 128)
    branch = PREFIX[:128] + own("branch", 144)
    stepper.step({"branch": branch[128:]})
    for i in range(3):
        stepper.begin_as(f"twig {i}", "branch", 256)
        stepper.begin_as(f"leaf {i}", "first", 256)
    names = list(stepper.pages)[1:]
    names.remove("branch")
    got = together(stepper, names, 2, {"first": own("first", 2), "branch": own("branch", 2)})
    for i in (0, 2, 4, 6, 8):
        assert_same(got[f"user {i}"], alone(decoder, PREFIX[: lengths[i]], f"user {i}", 2))
    assert_same(got["twig 1"], alone(decoder, branch[:256], "twig 1", 2))
    assert_same(got["leaf 2"], alone(decoder, PREFIX[:256], "leaf 2", 2))


def test_the_same_pages_elsewhere_are_no_common_beginning(decoder: Decoder) -> None:
    """Pages are compared from the first on: with the first exchanged, nothing is shared, though all
    others are the same; and a page that is another's second is not its first.
    """
    stepper = Sharing(decoder, num_pages=256)
    stepper.run("first", PREFIX)
    expected = alone(decoder, PREFIX, "me", 2)
    for name in ("me", "twin", "moved"):
        stepper.begin_as(name, "first", 272)
    stepper.pages["moved"] = stepper.pages["moved"][1:] + stepper.pages["moved"][:1]
    stepper.begin_as("other", "first", 272)
    stepper.run("replacement", own("replacement", 16))
    stepper.pages["other"][0] = stepper.pages["replacement"][0]
    alone_again = {}
    for name in ("moved", "other"):
        apart = Sharing(decoder, num_pages=256)
        apart.kv.bytes()[:] = stepper.kv.bytes()
        apart.pages[name], apart.lengths[name] = list(stepper.pages[name]), 272
        apart.free = [page for page in apart.free if page not in apart.pages[name]]
        alone_again |= together(apart, [name], 2)
    got = together(stepper, ["moved", "me", "other", "twin"], 2)
    assert_same(got["me"], expected)
    assert_same(got["twin"], alone(decoder, PREFIX, "twin", 2))
    for name, rows in alone_again.items():
        assert_same(got[name], rows)


def test_a_fork_parts_from_its_original(decoder: Decoder) -> None:
    """Full pages are shared and the last one is copied, in the middle of a page."""
    stepper = Sharing(decoder, num_pages=256)
    prefix = PREFIX[:267]
    stepper.run("first", prefix)
    names = ["first"]
    for i in range(4):
        name = f"fork {i}"
        stepper.begin_as(name, "first", 256)
        stepper.pages[name].append(stepper.free.pop())
        copy = (stepper.pages["first"][16], stepper.pages[name][16])
        decoder.backend.copy_pages(stepper.kv, [copy])
        stepper.lengths[name] = 267
        names.append(name)
    got = together(stepper, names, 3)
    for name in ("first", "fork 0", "fork 3"):
        assert_same(got[name], alone(decoder, prefix, name, 3))


def test_preempted_and_computed_again_among_those_who_share(decoder: Decoder) -> None:
    stepper = Sharing(decoder, num_pages=256)
    stepper.run("first", PREFIX)
    names = [f"user {i}" for i in range(6)]
    for name in names:
        stepper.begin_as(name, "first", 272)
    together(stepper, names, 2)
    victim = names[2]
    ids = own(victim, 9)
    stepper.pages[victim] = []  # its own pages are somebody else's now
    stepper.lengths[victim] = 0
    stepper.begin_as(victim, "first", 128)
    chunks = {name: [7] for name in names if name != victim}
    again = stepper.step(chunks | {victim: PREFIX[128:] + ids[:8]})[victim]
    chunks = {name: [9] for name in names if name != victim}
    again = torch.cat([again, stepper.step(chunks | {victim: ids[8:]})[victim]])
    assert_same(again[-9:], alone(decoder, PREFIX, victim, 3)[:9])


def test_what_nobody_wrote_is_never_read_beside_shared_pages(decoder: Decoder) -> None:
    stepper = Sharing(decoder, num_pages=256)
    stepper.kv.bytes()[:] = 0xFF  # NaN in every float format, and in the scales of int8
    stepper.run("first", PREFIX)
    names = ["one", "two", "three"]
    for name in names:
        stepper.begin_as(name, "first", 272)
    got = together(stepper, names, 2)
    assert_same(got["two"], alone(decoder, PREFIX, "two", 2))


def test_a_nan_does_not_reach_those_who_share_with_it(decoder: Decoder) -> None:
    """One sequence's own tokens are NaN: not the shared pages, nor the others' results."""
    stepper = Sharing(decoder, num_pages=256)
    stepper.run("first", PREFIX)
    for name in ("bad", "good"):
        stepper.begin_as(name, "first", 272)
    table = torch.full((333, decoder.config.hidden_size), torch.nan)
    embedding = decoder.weights.embedding
    decoder.weights.embedding = decoder.backend.prepare_embedding(table)
    try:
        assert stepper.step({"bad": own("bad", 7)})["bad"].isnan().all()
    finally:
        decoder.weights.embedding = embedding
    rows = [stepper.step({"bad": [5], "good": own("good", 8)[:7]})]
    rows.append(stepper.step({"good": own("good", 8)[7:], "bad": [6]}))
    assert all(row["bad"].isnan().all() for row in rows)
    assert_same(torch.cat([row["good"] for row in rows]), alone(decoder, PREFIX, "good", 2))


@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
def test_shared_pages_give_the_same_bits_on_any_number_of_threads(
    checkpoints: dict[int, Path], formats: tuple[str, str]
) -> None:
    names = [f"user {i}" for i in range(9)]
    results = []
    for threads in (1, 3):
        stepper = Sharing(load(checkpoints[64], formats, LEVELS[0], threads), num_pages=256)
        stepper.run("first", PREFIX)
        for name in names:
            stepper.begin_as(name, "first", 272)
        results.append(together(stepper, names, 4))
    for name in names:
        assert torch.equal(results[0][name], results[1][name])


def test_int8_has_the_bits_of_vectors_in_tiles_where_pages_are_shared(
    checkpoints: dict[int, Path],
) -> None:
    wide = [level for level in LEVELS if level not in ("avx2", "portable")]
    if len(wide) < 2:
        pytest.skip(f"this processor runs only {', '.join(LEVELS)}")
    results = []
    for level in wide:
        stepper = Sharing(load(checkpoints[64], ("int8", "int8"), level), num_pages=256)
        stepper.run("first", PREFIX)
        for i in range(11):
            stepper.begin_as(f"user {i}", "first", 272)
        results.append(together(stepper, [f"user {i}" for i in range(11)], 2))
    for result in results[1:]:
        assert all(torch.equal(result[name], results[0][name]) for name in result)
