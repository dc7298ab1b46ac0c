"""What a model's makers recommend for sampling, and which tokens end its output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnstile.models.errors import CorruptFileError
from turnstile.models.gguf import GgufFile
from turnstile.models.hf_config import JsonObject


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Recommended sampling settings (None: nothing recommended) and special ids.

    ``eos_ids`` are all the ids that end an output, in the order given.
    """

    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def generation_from_json(directory: Path) -> GenerationDefaults:
    """Read ``generation_config.json``, with ``config.json`` for ids it does not give."""
    config = JsonObject.read(directory / "config.json")
    path = directory / "generation_config.json"
    given = JsonObject.read(path) if path.exists() else JsonObject(path, {})

    def optional(key: str) -> float | None:
        return None if given.data.get(key) is None else given.number(key)

    def ids(key: str) -> tuple[int, ...]:
        value = given.data.get(key)
        source = given if value is not None else config
        return _ids(value if value is not None else config.data.get(key), source.path, key)

    top_k = optional("top_k")
    return GenerationDefaults(
        eos_ids=ids("eos_token_id"),
        bos_id=next(iter(ids("bos_token_id")), None),
        temperature=optional("temperature"),
        top_p=optional("top_p"),
        top_k=None if top_k is None else int(top_k),
        min_p=optional("min_p"),
        repetition_penalty=optional("repetition_penalty"),
    )


def generation_from_gguf(gguf: GgufFile) -> GenerationDefaults:
    """Read the special ids and ``general.sampling`` of a GGUF file's metadata."""
    data: Mapping[str, Any] = gguf.metadata

    def optional(key: str) -> float | None:
        value = data.get(f"general.sampling.{key}")
        return float(value) if isinstance(value, (int, float)) else None

    ends: list[int] = []
    for name in ("eos", "eot", "eom"):
        key = f"tokenizer.ggml.{name}_token_id"
        ends += _ids(data.get(key), gguf.path, key)
    bos = "tokenizer.ggml.bos_token_id"
    top_k = optional("top_k")
    return GenerationDefaults(
        eos_ids=tuple(dict.fromkeys(ends)),
        bos_id=next(iter(_ids(data.get(bos), gguf.path, bos)), None),
        temperature=optional("temp"),
        top_p=optional("top_p"),
        top_k=None if top_k is None else int(top_k),
        min_p=optional("min_p"),
        repetition_penalty=optional("penalty_repeat"),
    )


def _ids(value: Any, path: Path, key: str) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(each) is int and each >= 0 for each in values):
        raise CorruptFileError(f"{path}: {key} is {value!r}, which is no token id.")
    return tuple(values)
