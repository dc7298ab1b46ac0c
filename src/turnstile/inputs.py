"""What the Python API takes, in every form it may come, brought into the one the engine takes.

The engine's loop is shared by all requests and believes what it is given, so a value of the wrong
type is refused here, at the edge, by the name of its field. Over HTTP, parsing does the same.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeVar

import msgspec

from turnstile.engine.params import MOST_PRIORITY, ParameterError, SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``."""
Messages = Sequence[Mapping[str, Any]]
_T = TypeVar("_T")


def list_of_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """The prompts one by one: text, a mapping, or integers in a row are a single one.

    Raises :class:`ParameterError` for what is neither a prompt nor several.
    """
    if isinstance(prompts, (str, bytes, Mapping)):
        return [prompts]
    try:
        given: list[Any] = list(prompts)
    except TypeError:
        raise _no_prompt(prompts) from None
    return [given] if given and isinstance(given[0], Integral) else given


def text_and_ids(prompt: Prompt) -> tuple[str | None, list[int] | None]:
    """A prompt's text and its token ids; where ids are None, the text is still to be encoded.

    Raises :class:`ParameterError` for what is neither.
    """
    if isinstance(prompt, str):
        return prompt, None
    if not isinstance(prompt, Mapping):
        return None, _token_ids(prompt)
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is None and ids is None:
        raise ParameterError("A prompt needs prompt or prompt_token_ids.", "prompt")
    if not isinstance(text, str | None):
        raise _no_prompt(text)
    return text, None if ids is None else _token_ids(ids)


def _token_ids(ids: Any) -> list[int]:
    if isinstance(ids, (str, bytes)):
        raise _no_prompt(ids)
    try:
        return [operator.index(token) for token in ids]  # numpy's integers too, but no fraction
    except TypeError:
        raise _no_prompt(ids) from None


def _no_prompt(found: object) -> ParameterError:
    return ParameterError(
        "A prompt must be text, a list of integers, or a mapping with prompt or prompt_token_ids, "
        f"not {_shown(found)}.",
        "prompt",
    )


def own_params(given: object) -> SamplingParams:
    """A copy of a request's parameters, every field of its type.

    As elsewhere, one stop string need not be in a list, and None stands for no stop at all.

    Raises :class:`ParameterError` naming the field. Whether values are in their ranges is for
    :meth:`SamplingParams.check`.
    """
    if not isinstance(given, SamplingParams):
        raise ParameterError(
            f"sampling_params must be SamplingParams, not {_shown(given)}.", "sampling_params"
        )
    fields = {
        name: value.tolist() if hasattr(value, "tolist") else value  # a number or array of numpy's
        for name, value in msgspec.structs.asdict(given).items()
    }
    if isinstance(fields["stop"], str):
        fields["stop"] = [fields["stop"]]
    for name in ("stop", "stop_token_ids"):
        if fields[name] is None:
            fields[name] = []
    try:
        params = msgspec.convert(fields, SamplingParams)
    except msgspec.ValidationError as error:
        place = re.search(r"\$\.(\w+)", str(error))
        name = place[1] if place else "sampling_params"
        raise ParameterError(f"{name}: {str(error).partition(' - at')[0]}.", name) from None
    if "" in params.stop:
        raise ParameterError("stop: a stop string must not be empty.", "stop")
    return params


def checked_priority(priority: object) -> int:
    """The priority; raises :class:`ParameterError` for what is no integer, or far from 0."""
    if not isinstance(priority, int) or abs(priority) > MOST_PRIORITY:
        raise ParameterError(
            f"priority must be an integer within ±{MOST_PRIORITY}, not {_shown(priority)}.",
            "priority",
        )
    return priority


def one_each(given: _T | Sequence[_T] | None, count: int, name: str) -> list[_T | None]:
    """``given`` for each of ``count`` prompts; a sequence must have one entry for each.

    Raises :class:`ParameterError` naming the argument.
    """
    if isinstance(given, Sequence) and not isinstance(given, str):
        if len(given) != count:
            raise ParameterError(f"{count} prompts but {len(given)} {name}.", name)
        return list(given)
    return [given] * count


def _shown(value: object) -> str:
    return f"{type(value).__name__} {value!r:.40}"
