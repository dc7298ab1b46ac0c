"""From prompts as clients send them to token ids, without holding up the event loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from turnstile.server.answer.parameters import context_error, wanted_tokens
from turnstile.server.answer.reader import HEAVY_CHARS, Reader
from turnstile.server.answer.schemas import CompletionRequest, Prompt
from turnstile.server.errors import bad_request
from turnstile.server.model import ServedModel


@dataclass(slots=True)
class TokenizedPrompt:
    """A prompt ready for the engine. ``text`` is what the client sent, None where it sent ids."""

    ids: list[int]
    text: str | None = None


def check_choices(num_prompts: int, n: int, most: int) -> None:
    """Raise :class:`ApiError` 400 for more choices than ``most``: ``n`` for each prompt."""
    if num_prompts * n > most:
        raise bad_request(
            f"{num_prompts} prompts × n={n} are more than {most} choices; split the request.", "n"
        )


async def completion_prompts(
    request: CompletionRequest, reader: Reader, *, n: int, max_choices: int
) -> list[TokenizedPrompt]:
    """Tokenize and check every prompt of a completion, all or none.

    ``n`` choices are made for each; there may be ``max_choices`` in all. Raises
    :class:`ApiError` 400 that says which prompt is wrong, and how.
    """
    prompts = _as_list(request.prompt)
    # Before anything looks at the prompts: a body can hold millions of tiny ones.
    check_choices(len(prompts), n, max_choices)
    encoded = await _encode_texts(request, prompts, reader)
    model = reader.model
    done: list[TokenizedPrompt] = []
    for place, prompt in enumerate(prompts):
        where = _name(place, prompts)
        if isinstance(prompt, str):
            ids = encoded[place]
        else:
            ids = prompt
            _refuse_overlong(ids, where, request, model)
            await reader.off_loop(len(ids), partial(check_ids, ids, model.vocab_size, where))
        if not ids:
            raise bad_request(f"{where} is empty; send at least one token.", where)
        kept = truncate(ids, request.truncate_prompt_tokens, model)
        whole = isinstance(prompt, str) and len(kept) == len(ids)
        done.append(TokenizedPrompt(kept, str(prompt) if whole else None))
    return done


def _name(place: int, prompts: Sequence[object]) -> str:
    return "prompt" if len(prompts) == 1 else f"prompt.{place}"


async def _encode_texts(
    request: CompletionRequest, prompts: Sequence[str | list[int]], reader: Reader
) -> dict[int, list[int]]:
    """The ids of those prompts that are texts, by their places.

    Each piece of the work takes a turn of its own, and the first prompt that does not fit ends it.
    """
    texts = {place: prompt for place, prompt in enumerate(prompts) if isinstance(prompt, str)}
    if request.truncate_prompt_tokens is None:
        for place, text in texts.items():
            size = len(text.encode("utf-8", "surrogatepass"))
            reader.refuse_hopeless(size, _name(place, prompts), _output(request))
    else:
        reader.refuse_giant(sum(map(len, texts.values())), "prompt")
    encode = partial(
        reader.model.tokenizer.encode_batch,
        add_special_tokens=request.add_special_tokens is not False,
    )
    encoded: dict[int, list[int]] = {}
    for places in _pieces(texts):
        piece = [texts[place] for place in places]
        ids = await reader.off_loop(sum(map(len, piece)), partial(encode, piece))
        encoded.update(zip(places, ids, strict=True))
        for place in places:
            _refuse_overlong(encoded[place], _name(place, prompts), request, reader.model)
    return encoded


def _pieces(texts: dict[int, str]) -> Iterator[list[int]]:
    """The places of texts, in groups that make no thread busy for long; a long text is alone."""
    places: list[int] = []
    chars = 0
    for place, text in texts.items():
        if places and chars + len(text) > HEAVY_CHARS:
            yield places
            places, chars = [], 0
        places.append(place)
        chars += len(text)
    if places:
        yield places


def _output(request: CompletionRequest) -> int:
    """The least output the request is about: none where it only scores its prompt."""
    wanted = wanted_tokens(request)
    return 1 if wanted is None else wanted


def _refuse_overlong(
    ids: Sequence[int], where: str, request: CompletionRequest, model: ServedModel
) -> None:
    """Raise :class:`ApiError` 400 for a prompt longer than the context, where it is not cut."""
    if request.truncate_prompt_tokens is None and len(ids) > model.max_model_len:
        raise context_error(len(ids), model.max_model_len, _output(request), where)


def _as_list(prompt: Prompt | None) -> Sequence[str | list[int]]:
    """The prompts of a request: one text, one list of ids, or a list of either."""
    if prompt is None:
        raise bad_request("prompt is required.", "prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request("prompt is empty; send at least one token.", "prompt")
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [prompt]  # type: ignore[list-item]
    if int in kinds:
        raise bad_request("prompt mixes token ids with prompts; send one or the other.", "prompt")
    return prompt  # type: ignore[return-value]


def check_ids(ids: Sequence[int], vocab_size: int, where: str) -> None:
    """Raise :class:`ApiError` 400 for the first id outside the vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        place, wrong = next((i, t) for i, t in enumerate(ids) if not 0 <= t < vocab_size)
        shown = str(wrong) if abs(wrong) < 10**20 else "a huge number"
        raise bad_request(
            f"{where}.{place}: {shown} is no token id; ids go from 0 to {vocab_size - 1}.", where
        )


def truncate(ids: list[int], keep: int | None, model: ServedModel) -> list[int]:
    """The last ``keep`` ids; -1 keeps as many as leave room for one token of output."""
    if keep is None:
        return ids
    most = model.max_model_len - 1
    if keep == -1:
        keep = most
    if not 1 <= keep <= most:
        raise bad_request(
            f"truncate_prompt_tokens must be -1 or from 1 to {most}.", "truncate_prompt_tokens"
        )
    return ids[-keep:]
