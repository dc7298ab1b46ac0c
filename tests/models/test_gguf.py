"""The GGUF reader: what ggml's own package writes, and files made to do harm."""

from __future__ import annotations

import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budget import examples
from turnstile.models.errors import CorruptFileError, ModelNotFoundError, UnsupportedModelError
from turnstile.models.gguf import read_gguf


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def entry(key: str, type_id: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", type_id) + value


def tensor(name: str, shape: tuple[int, ...], type_id: int, offset: int) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return string(name) + dims + struct.pack("<IQ", type_id, offset)


def document(
    entries: list[bytes],
    tensors: list[bytes],
    data: bytes = b"",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    num_tensors, num_entries = counts or (len(tensors), len(entries))
    head = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries)
    head += b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A file with every kind of value, by the package that defines the format."""
    path = tmp_path / "written.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.uint8", 200)
    writer.add_int64("a.int64", -(2**40))
    writer.add_float32("a.float32", 0.5)
    writer.add_float64("a.float64", 1e300)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "naïve 🐈")
    writer.add_array("a.strings", ["", "Ġthe", "猫"])
    writer.add_array("a.ints", [-1, 2, 3])
    writer.add_array("a.floats", [0.5, 1.5])
    writer.add_array("a.bools", [True, False])
    writer.add_tensor("first", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("second", np.arange(40, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_everything_written_is_read_back(written: Path) -> None:
    file = read_gguf(written)
    data = dict(file.metadata)
    arrays = {key: data.pop(key).tolist() for key in ("a.ints", "a.floats", "a.bools")}
    assert data == {
        "general.architecture": "llama",
        "a.uint8": 200,
        "a.int64": -(2**40),
        "a.float32": 0.5,
        "a.float64": 1e300,
        "a.bool": True,
        "a.string": "naïve 🐈",
        "a.strings": ["", "Ġthe", "猫"],
    }
    assert arrays == {
        "a.ints": [-1, 2, 3],
        "a.floats": [0.5, 1.5],
        "a.bools": [True, False],
    }
    assert list(file.tensors) == ["first", "second"]
    first, second = file.tensors.values()
    assert (first.shape, first.dtype) == ((2, 3), "float32")
    assert file.file.bytes_of(first).view(np.float32).tolist() == [0, 1, 2, 3, 4, 5]
    assert file.file.bytes_of(second).view(np.float16).tolist() == list(range(40))


def test_memory_given_back_is_read_again_from_the_file(tmp_path: Path) -> None:
    data = bytes(range(256)) * 64
    path = tmp_path / "m.gguf"
    path.write_bytes(document([], [tensor("t", (4096,), 0, 0)], data))
    file = read_gguf(path)
    before = file.file.bytes_of(file.tensors["t"]).copy()
    file.file.release(file.tensors["t"])
    assert np.array_equal(file.file.bytes_of(file.tensors["t"]), before)


def test_a_file_cut_at_any_byte_is_refused(written: Path) -> None:
    whole = written.read_bytes()
    end = max(t.start + t.num_bytes for t in read_gguf(written).tensors.values())
    cut = written.with_name("cut.gguf")
    for length in range(end):
        cut.write_bytes(whole[:length])
        with pytest.raises(CorruptFileError, match="cut"):
            read_gguf(cut)


@given(changes=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 255)), min_size=1))
@settings(max_examples=examples(300))
def test_changed_bytes_are_refused_or_read_but_never_crash(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    metadata = [
        entry("general.alignment", 4, struct.pack("<I", 32)),
        entry("names", 9, struct.pack("<IQ", 8, 2) + string("one") + string("two")),
        entry("numbers", 9, struct.pack("<IQ3i", 5, 3, 1, 2, 3)),
    ]
    tensors = [tensor("a", (32, 2), 8, 0), tensor("b", (3,), 0, 96)]
    raw = bytearray(document(metadata, tensors, bytes(128)))
    for at, value in changes:
        raw[at % len(raw)] = value
    path = tmp_path_factory.getbasetemp() / "changed.gguf"
    path.write_bytes(raw)
    try:
        file = read_gguf(path)
    except (CorruptFileError, UnsupportedModelError):
        return
    for info in file.tensors.values():
        assert info.start + info.num_bytes <= len(raw)


HUGE = 1 << 62
HOSTILE = {
    "no magic": (b"GGML" + bytes(60), CorruptFileError, "no GGUF"),
    "tensor count": (document([], [], counts=(HUGE, 0)), CorruptFileError, "room for"),
    "entry count": (document([], [], counts=(0, HUGE)), CorruptFileError, "room for"),
    "string length": (
        document([struct.pack("<Q", HUGE) + b"key"], []),
        CorruptFileError,
        "ends in the middle",
    ),
    "strings in an array": (
        document([entry("k", 9, struct.pack("<IQ", 8, HUGE))], []),
        CorruptFileError,
        "room for",
    ),
    "a long string in an array": (
        document([entry("k", 9, struct.pack("<IQQ", 8, 1, HUGE))], []),
        CorruptFileError,
        "ends in the middle",
    ),
    "numbers in an array": (
        document([entry("k", 9, struct.pack("<IQ", 10, HUGE))], []),
        CorruptFileError,
        "room for",
    ),
    "nested arrays": (
        document([entry("k", 9, struct.pack("<IQ", 9, 1) * 3)], []),
        CorruptFileError,
        "nests arrays",
    ),
    "value type": (document([entry("k", 77, bytes(8))], []), CorruptFileError, "value type 77"),
    "a key twice": (
        document([entry("k", 0, b"1"), entry("k", 0, b"2")], []),
        CorruptFileError,
        "'k' twice",
    ),
    "alignment": (
        document([entry("general.alignment", 4, struct.pack("<I", 48))], []),
        CorruptFileError,
        "alignment 48",
    ),
    "alignment of zero": (
        document([entry("general.alignment", 4, struct.pack("<I", 0))], []),
        CorruptFileError,
        "alignment 0",
    ),
    "alignment as text": (
        document([entry("general.alignment", 8, string("32"))], []),
        CorruptFileError,
        "alignment '32'",
    ),
    "dimensions": (
        document([], [tensor("t", (1,) * 9, 0, 0)], bytes(64)),
        CorruptFileError,
        "9 dimensions",
    ),
    "a product past 64 bits": (
        document([], [tensor("t", (1 << 32, 1 << 32, 4), 0, 0)], bytes(64)),
        CorruptFileError,
        "ends before tensor 't'",
    ),
    "an empty shape": (
        document([], [tensor("t", (0, 4), 0, 0)], bytes(64)),
        CorruptFileError,
        "impossible shape",
    ),
    "half a block": (
        document([], [tensor("t", (40,), 8, 0)], bytes(64)),
        CorruptFileError,
        "impossible shape",
    ),
    "an offset past the end": (
        document([], [tensor("t", (4,), 0, HUGE)], bytes(64)),
        CorruptFileError,
        "ends before",
    ),
    "an unaligned offset": (
        document([], [tensor("t", (4,), 0, 7)], bytes(64)),
        CorruptFileError,
        "unaligned",
    ),
    "overlapping tensors": (
        document([], [tensor("t", (20,), 0, 0), tensor("u", (4,), 0, 32)], bytes(96)),
        CorruptFileError,
        "overlapping",
    ),
    "a tensor twice": (
        document([], [tensor("t", (4,), 0, 0), tensor("t", (4,), 0, 32)], bytes(64)),
        CorruptFileError,
        "'t' twice",
    ),
    "a type not read here": (
        document([], [tensor("t", (32,), 20, 0)], bytes(64)),
        UnsupportedModelError,
        "IQ4_NL; the known types are FLOAT32",
    ),
    "a type nobody knows": (
        document([], [tensor("t", (32,), 999, 0)], bytes(64)),
        UnsupportedModelError,
        "number 999",
    ),
    "version 1": (document([], [], version=1), UnsupportedModelError, "version 1"),
    "big-endian": (document([], [], version=3 << 24), UnsupportedModelError, "big-endian"),
    "one of several parts": (
        document([entry("split.count", 2, struct.pack("<H", 3))], []),
        UnsupportedModelError,
        "join",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_in_one_sentence_without_allocating(
    name: str, tmp_path: Path
) -> None:
    raw, error, words = HOSTILE[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    tracemalloc.start()
    with pytest.raises(error, match=words) as refused:
        read_gguf(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
    assert str(path) in str(refused.value)


def test_metadata_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnstile.models.gguf.MAX_METADATA_BYTES", 4096)
    strings = struct.pack("<IQ", 8, 500) + string("x") * 500
    path = tmp_path / "m.gguf"
    path.write_bytes(document([entry("k", 9, strings)], []))
    with pytest.raises(CorruptFileError, match="of metadata"):
        read_gguf(path)


def test_a_missing_or_empty_file_or_a_directory_is_a_plain_error(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(CorruptFileError, match="empty"):
        read_gguf(tmp_path / "empty.gguf")
    with pytest.raises(ModelNotFoundError, match="no file"):
        read_gguf(tmp_path / "absent.gguf")
    with pytest.raises(ModelNotFoundError, match="Cannot read"):
        read_gguf(tmp_path)


def test_the_api_process_can_read_models_without_torch() -> None:
    code = (
        "import sys, turnstile.models.gguf, turnstile.models.source, turnstile.kernels;"
        "sys.exit('torch' in sys.modules or 'huggingface_hub' in sys.modules)"
    )
    source = Path(__file__).parents[2] / "src"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(source)})
