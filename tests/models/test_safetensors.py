"""The safetensors reader: what the format's own library writes, and files made to do harm."""

from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from budget import examples
from turnstile.models.errors import CorruptFileError, UnsupportedModelError
from turnstile.models.safetensors import INDEX_NAME, open_safetensors


def document(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: str = "F32", shape: Any = (4,), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_tensors_written_by_the_library_are_read_back(tmp_path: Path) -> None:
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(5, dtype=np.float16),
        "empty": np.zeros((0, 4), np.float32),
    }
    save_file(tensors, str(tmp_path / "model.safetensors"), metadata={"format": "pt"})
    files = open_safetensors(tmp_path)
    assert sorted(files.names()) == ["a", "b", "empty"]
    for name, dtype in (("a", np.float32), ("b", np.float16), ("empty", np.float32)):
        value = files.bytes_of(name).view(dtype).reshape(files.info(name).shape)
        assert np.array_equal(value, tensors[name])
    assert files.num_bytes == 34


def test_a_file_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.ones(6, np.float32), "b": np.ones(3, np.float16)}, str(path))
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptFileError, match="model"):
            open_safetensors(tmp_path)


@given(changes=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), min_size=1))
@settings(max_examples=examples(300))
def test_changed_bytes_are_refused_or_read_but_never_crash(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    raw = bytearray(document({"a": entry(), "b": entry("F16", [2], [16, 20])}, bytes(20)))
    for at, value in changes:
        raw[at % len(raw)] = value
    directory = tmp_path_factory.getbasetemp() / "changed"
    directory.mkdir(exist_ok=True)
    (directory / "model.safetensors").write_bytes(raw)
    try:
        files = open_safetensors(directory)
    except (CorruptFileError, UnsupportedModelError):
        return
    for name in files.names():
        assert len(files.bytes_of(name)) == files.info(name).num_bytes


HOSTILE = {
    "a giant header": (document({}, length=1 << 60), CorruptFileError, "header of"),
    "no JSON": (document(b"{" * 50), CorruptFileError, "no JSON"),
    "deep JSON": (document(b"[" * 100_000), CorruptFileError, "no JSON"),
    "a list": (document([1]), CorruptFileError, "no JSON object"),
    "an entry of text": (document({"t": "x"}), CorruptFileError, "'t' is malformed"),
    "no offsets": (document({"t": {"dtype": "F32"}}), CorruptFileError, "malformed"),
    "three offsets": (document({"t": entry(offsets=[0, 1, 2])}), CorruptFileError, "malformed"),
    "a negative size": (document({"t": entry(shape=[-4])}), CorruptFileError, "impossible"),
    "a size of text": (document({"t": entry(shape=["4"])}), CorruptFileError, "impossible"),
    "a size of true": (document({"t": entry(shape=[True])}), CorruptFileError, "impossible"),
    "a type that is a list": (document({"t": entry([])}), CorruptFileError, "malformed"),
    "numbers too long to print": (
        document(
            b'{"t": {"dtype": "F32", "shape": [1%s, 1%s], "data_offsets": [0, 16]}}'
            % (b"0" * 4000, b"0" * 4000)
        ),
        CorruptFileError,
        "impossible",
    ),
    "numbers too many to multiply": (
        document({"t": entry(shape=[1 << 62] * 20_000)}),
        CorruptFileError,
        "20000 dimensions; at most 8",
    ),
    "a tensor twice": (
        document(b'{"t": %s, "t": %s}' % ((json.dumps(entry()).encode(),) * 2), bytes(16)),
        CorruptFileError,
        "has 't' twice",
    ),
    "a giant shape": (
        document({"t": entry(shape=[1 << 40, 1 << 40])}, bytes(16)),
        CorruptFileError,
        "takes 16 bytes",
    ),
    "data past the end": (
        document({"t": entry(shape=[1 << 40], offsets=[0, 1 << 42])}, bytes(16)),
        CorruptFileError,
        "truncated",
    ),
    "offsets reversed": (
        document({"t": entry(offsets=[16, 0])}, bytes(16)),
        CorruptFileError,
        "takes -16 bytes",
    ),
    "overlapping tensors": (
        document({"t": entry(), "u": entry(offsets=[8, 24])}, bytes(24)),
        CorruptFileError,
        "overlap",
    ),
    "a type not read here": (
        document({"t": entry("I8", [16])}, bytes(16)),
        UnsupportedModelError,
        "type I8; known are F32, F16, BF16",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_in_one_sentence_without_allocating(
    name: str, tmp_path: Path
) -> None:
    raw, error, words = HOSTILE[name]
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    tracemalloc.start()
    with pytest.raises(error, match=words) as refused:
        open_safetensors(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("name", ["../other.safetensors", "/other.safetensors", "..", "."])
def test_an_index_cannot_lead_out_of_its_directory(name: str, tmp_path: Path) -> None:
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"t": name}}))
    with pytest.raises(CorruptFileError, match="no plain file name"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', "[" * 100_000])
def test_a_broken_index_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(CorruptFileError, match="weight_map"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("name", ["part-2.safetensors", "\0", "\ud800", "x" * 5000])
def test_a_missing_part_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"t": name}}))
    with pytest.raises(CorruptFileError, match=re.escape(f"{name!r}, which is missing")):
        open_safetensors(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file({"t": np.ones(4, np.float32)}, str(tmp_path / f"{name}.safetensors"))
    with pytest.raises(CorruptFileError, match="'t' is both in"):
        open_safetensors(tmp_path)


def test_a_directory_with_other_weights_says_which_are_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UnsupportedModelError, match=r"no \.safetensors file"):
        open_safetensors(tmp_path)
