"""Requests named by a file: recorded traces, conversations, one's own prompts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

# vLLM leaves out the same conversations of ShareGPT, in characters here: no tokenizer is at hand.
MIN_CHARACTERS, MAX_CHARACTERS = 16, 6000


class DatasetError(ValueError):
    """The file cannot be used; the message names it, and the line where there is one."""


class Item(NamedTuple):
    """One request of a file: lengths to fill with prose, or text to send."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    prompt_text: str = ""
    output_text: str = ""
    blocks: tuple[int, ...] = ()
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class FileDataset:
    """A file with requests.

    Parameters
    ----------
    kind
        ``trace``: JSON lines with ``timestamp`` (milliseconds; or ``arrival``, seconds),
        ``input_length``, ``output_length`` and, where prompts share beginnings, ``hash_ids``: equal
        numbers are equal blocks of text (the format of Mooncake's traces).
        ``sharegpt``: a JSON list of conversations, of which the first question is sent and the
        first answer gives the length. ``custom``: JSON lines with ``prompt`` and, if wanted,
        ``output_tokens``.
    path
        Where it is.
    output_tokens
        Tokens of every answer, where the file is not to decide. 256 where a custom file is silent.
    speed
        How many seconds of a trace pass in one.
    block_tokens
        Tokens of a block that ``hash_ids`` name.
    """

    kind: Literal["trace", "sharegpt", "custom"]
    path: str
    output_tokens: int | None = None
    speed: float = 1.0
    block_tokens: int = 512

    def __post_init__(self) -> None:
        if not self.speed > 0:
            raise DatasetError(f"the speed of a trace must be over 0, got {self.speed}")
        if self.block_tokens < 1:
            raise DatasetError("the blocks of a trace need at least 1 token")
        if self.output_tokens is not None and self.output_tokens < 1:
            raise DatasetError(f"an answer needs at least 1 token, not {self.output_tokens}")

    @property
    def timed(self) -> bool:
        """Whether the file says when its requests come."""
        return self.kind == "trace"

    def __len__(self) -> int:
        return len(_read(self))

    def times(self) -> tuple[float, ...]:
        """Seconds from the first request to each, at the speed asked for."""
        items = _read(self)
        return tuple((item.at - items[0].at) / self.speed for item in items)

    def items(self, seed: int, count: int) -> list[Item]:
        """The first `count` requests of a trace; of other files any, in an order of the seed.

        Raises
        ------
        DatasetError
            If the file holds fewer, or cannot be read.
        """
        items = _read(self)
        if count > len(items):
            raise DatasetError(f"{self.path} holds {len(items)} requests, not {count}")
        if not self.timed:
            order = np.random.default_rng(seed).permutation(len(items))
            items = [items[place] for place in order.tolist()]
        return items[:count]


@lru_cache(maxsize=8)
def _read(dataset: FileDataset) -> list[Item]:
    try:
        data = Path(dataset.path).expanduser().read_bytes()
    except OSError as error:
        raise DatasetError(f"cannot read {dataset.path}: {error.strerror}") from None
    if dataset.kind == "sharegpt":
        items = _sharegpt(dataset, _decode(data, dataset.path))
    else:
        parse = _trace_row if dataset.kind == "trace" else _custom_row
        items = [
            parse(dataset, row, f"{dataset.path}, line {number}")
            for number, row in _lines(data, dataset.path)
        ]
    if not items:
        raise DatasetError(f"{dataset.path} holds no requests")
    return sorted(items, key=lambda item: item.at) if dataset.timed else items


def _decode(data: bytes, where: str) -> Any:
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise DatasetError(f"{where} is not JSON: {error}") from None


def _lines(data: bytes, path: str) -> list[tuple[int, dict[str, Any]]]:
    rows = []
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        row = _decode(line, f"{path}, line {number}")
        if not isinstance(row, dict):
            raise DatasetError(f"{path}, line {number}: not an object")
        rows.append((number, row))
    return rows


def _trace_row(dataset: FileDataset, row: dict[str, Any], where: str) -> Item:
    if "timestamp" in row:
        at = _number(row, "timestamp", where) / 1000.0
    else:
        at = _number(row, "arrival", where)
    prompt = _number(row, "input_length", where)
    output = dataset.output_tokens or _number(row, "output_length", where)
    if prompt < 1 or output < 1:
        raise DatasetError(f"{where}: lengths must be at least 1")
    blocks = row.get("hash_ids") or []
    if not isinstance(blocks, list) or not all(isinstance(b, int) for b in blocks):
        raise DatasetError(f"{where}: hash_ids must be a list of integers")
    return Item(int(prompt), int(output), blocks=tuple(blocks), at=at)


def _custom_row(dataset: FileDataset, row: dict[str, Any], where: str) -> Item:
    prompt = row.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise DatasetError(f"{where}: prompt must be a text")
    own = int(_number(row, "output_tokens", where)) if "output_tokens" in row else 256
    if own < 1:
        raise DatasetError(f"{where}: output_tokens must be at least 1")
    return Item(prompt_text=prompt, output_tokens=dataset.output_tokens or own)


def _sharegpt(dataset: FileDataset, content: Any) -> list[Item]:
    if not isinstance(content, list):
        raise DatasetError(f"{dataset.path} must hold a list of conversations")
    items = []
    for entry in content:
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(turns, list) or len(turns) < 2:
            continue
        if not all(isinstance(turn, dict) for turn in turns[:2]):
            raise DatasetError(f"{dataset.path}: a turn of a conversation must be an object")
        question, answer = (str(turn.get("value", "")) for turn in turns[:2])
        sizes = (len(question), len(answer))
        if min(sizes) >= MIN_CHARACTERS and max(sizes) <= MAX_CHARACTERS:
            items.append(Item(None, dataset.output_tokens, question, answer))
    return items


def _number(row: dict[str, Any], name: str, where: str) -> float:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DatasetError(f"{where}: {name} must be a number")
    return float(value)
