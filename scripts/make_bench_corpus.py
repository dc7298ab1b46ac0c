"""Rebuild src/turnstile/bench/data/prose.txt.xz, the prose that the benchmark cuts prompts from.

Input: the two novels below as plain text, one line a line, as Debian's package r-cran-janeaustenr
(1.0.0) ships them in data/Rdata.rdb. Both were published before 1820 and are in the public domain.
The package's file is a row of zlib streams, each behind its length, each holding one character
vector in R's XDR serialisation; only that much of the format is read here.

    python scripts/make_bench_corpus.py path/to/Rdata.rdb
"""

import argparse
import lzma
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

NOVELS = ("PRIDE AND PREJUDICE", "Persuasion")
TARGET = Path(__file__).parents[1] / "src/turnstile/bench/data/prose.txt.xz"
HEADING = re.compile(r"^\s*(volume|chapter|finis|the end)\b.{0,20}$", re.IGNORECASE)


def character_vectors(database: bytes) -> Iterator[list[str]]:
    """The character vectors of a lazy-load database, in file order."""
    position = 0
    while position < len(database):
        stream = zlib.decompressobj()
        raw = stream.decompress(database[position + 4 :])
        position = len(database) - len(stream.unused_data)
        version = struct.unpack_from(">I", raw, 2)[0]
        offset = 14
        if version == 3:  # since version 3 the native encoding is named in the header
            offset += 4 + struct.unpack_from(">I", raw, offset)[0]
        count = struct.unpack_from(">I", raw, offset + 4)[0]
        offset += 8
        lines = []
        for _ in range(count):
            length = struct.unpack_from(">i", raw, offset + 4)[0]
            lines.append(raw[offset + 8 : offset + 8 + length].decode("utf-8"))
            offset += 8 + length
        yield lines


def paragraphs(lines: list[str]) -> list[str]:
    """Running text: one paragraph a line, without headings and emphasis marks."""
    found: list[str] = []
    current: list[str] = []
    for line in [*lines[3:], ""]:
        if line.strip() and not HEADING.match(line):
            current.append(line.strip())
        elif current:
            found.append(
                re.sub(r"\s+", " ", " ".join(current).replace("_", "").replace("--", " – "))
            )
            current = []
    return [p for p in found if len(p.split()) >= 4]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("database", type=Path)
    database = parser.parse_args().database.read_bytes()
    text = []
    for lines in character_vectors(database):
        if lines[0] in NOVELS:
            text += paragraphs(lines)
    data = "\n".join(text).encode()
    TARGET.write_bytes(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
    print(f"{TARGET.name}: {len(data):,} bytes, {len(data.split()):,} words")


if __name__ == "__main__":
    main()
