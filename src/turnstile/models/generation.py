"""What a model's makers recommend for sampling, and which tokens end its output."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnstile.models.errors import CorruptFileError
from turnstile.models.gguf import GgufFile
from turnstile.models.hf_config import JsonObject

logger = logging.getLogger(__name__)

_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (1e-9, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
}
"""Recommendations that can be followed: what a request itself may ask for."""

_GGUF_NAMES = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


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


def generation_from_json(directory: Path, vocab_size: int) -> GenerationDefaults:
    """Read ``generation_config.json``, with ``config.json`` for ids it does not give.

    ``vocab_size`` counts the model's logits; ids beyond them can never be drawn and are dropped.
    Raises :class:`CorruptFileError` where a file is broken or an id is none.
    """
    config = JsonObject.read(directory / "config.json")
    path = directory / "generation_config.json"
    given = JsonObject.read(path) if path.exists() else JsonObject(path, {})

    def ids(key: str) -> tuple[int, ...]:
        value = given.data.get(key)
        source = given if value is not None else config
        value = value if value is not None else config.data.get(key)
        return _ids(value, source.path, key, vocab_size)

    return GenerationDefaults(
        eos_ids=ids("eos_token_id"),
        bos_id=next(iter(ids("bos_token_id")), None),
        **_recommended({name: given.data.get(name) for name in _RANGES}, path),
    )


def generation_from_gguf(gguf: GgufFile, vocab_size: int) -> GenerationDefaults:
    """Read the special ids and ``general.sampling`` of a GGUF file's metadata.

    ``vocab_size`` as for :func:`generation_from_json`. Raises :class:`CorruptFileError` where an
    id is none.
    """
    data: Mapping[str, Any] = gguf.metadata

    ends: list[int] = []
    for name in ("eos", "eot", "eom"):
        key = f"tokenizer.ggml.{name}_token_id"
        ends += _ids(data.get(key), gguf.path, key, vocab_size)
    bos = "tokenizer.ggml.bos_token_id"
    given = {name: data.get(f"general.sampling.{key}") for name, key in _GGUF_NAMES.items()}
    return GenerationDefaults(
        eos_ids=tuple(dict.fromkeys(ends)),
        bos_id=next(iter(_ids(data.get(bos), gguf.path, bos, vocab_size)), None),
        **_recommended(given, gguf.path),
    )


def _recommended(given: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Those of the given settings that can be followed; a warning names each of the others.

    A model with a senseless recommendation is sound all the same, but every request that names
    no value of its own would be refused for it.
    """
    kept: dict[str, Any] = {}
    for name, value in given.items():
        low, high = _RANGES[name]
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if number and low <= value <= high:
            kept[name] = int(value) if name == "top_k" else float(value)
        elif value is not None:
            logger.warning(
                "%s recommends the %s %.40r, which is no number from %g to %g: ignored",
                path, name, value, low, high,
            )  # fmt: skip
    return kept


def _ids(value: Any, path: Path, key: str, vocab_size: int) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(each) is int and each >= 0 for each in values):
        raise CorruptFileError(f"{path}: {key} is {value!r}, which is no token id.")
    beyond = [each for each in values if each >= vocab_size]
    if beyond:
        logger.warning(
            "%s: %s names %s, but the model's ids end at %d: ignored",
            path, key, beyond[:3], vocab_size - 1,
        )  # fmt: skip
    return tuple(each for each in values if each < vocab_size)
