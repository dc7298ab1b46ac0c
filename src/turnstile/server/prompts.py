"""From prompts as clients send them to token ids, without holding up the event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from turnstile.server.errors import ApiError, bad_request
from turnstile.server.model import ServedModel
from turnstile.server.parameters import context_error, wanted_tokens
from turnstile.server.schemas import CompletionRequest, Prompt
from turnstile.server.threads import Threads

T = TypeVar("T")

OFF_LOOP_CHARS = 16_384
"""Work on longer text than this happens in a thread: probes and streams must not wait for it."""

TEXTS = Threads("turnstile-text", number=2, most=16 * 2**20, what="long texts")
"""Weighed in characters: one body of the default largest size, or hundreds of long prompts."""

LEAST_GIANT = 2**20
GIANT_PER_TOKEN = 16
"""Longer text than the one, and than so many characters for each token of the context, is refused
where it need not fit the context. A million characters take 0.4 s and 110 MB (SmolLM2).
"""


@dataclass(slots=True)
class TokenizedPrompt:
    """A prompt ready for the engine. ``text`` is what the client sent, None where it sent ids."""

    ids: list[int]
    text: str | None = None


async def off_loop(chars: int, work: Callable[[], T]) -> T:
    """Do ``work`` on ``chars`` characters: here where they are few, else in a thread.

    Raises :class:`ApiError` 503 where too much is waiting for the threads.
    """
    if chars <= OFF_LOOP_CHARS:
        return work()
    return await TEXTS.run(chars, work)


def check_choices(num_prompts: int, n: int, most: int) -> None:
    """Raise :class:`ApiError` 400 for more choices than ``most``: ``n`` for each prompt."""
    if num_prompts * n > most:
        raise bad_request(
            f"{num_prompts} prompts × n={n} are more than {most} choices; split the request.", "n"
        )


async def completion_prompts(
    request: CompletionRequest, model: ServedModel, *, n: int, max_choices: int
) -> list[TokenizedPrompt]:
    """Tokenize and check every prompt of a completion, all or none.

    ``n`` choices are made for each; there may be ``max_choices`` in all. Raises
    :class:`ApiError` 400 that says which prompt is wrong, and how.
    """
    prompts = _as_list(request.prompt)
    # Before anything looks at the prompts: a body can hold millions of tiny ones.
    check_choices(len(prompts), n, max_choices)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if request.truncate_prompt_tokens is None:
        for text in texts:
            refuse_hopeless(len(text.encode("utf-8", "surrogatepass")), model)
    else:
        refuse_giant(sum(map(len, texts)), model, "prompt")
    add_special = request.add_special_tokens is not False
    tokenizer = model.tokenizer
    encoded = await off_loop(
        sum(map(len, texts)),
        lambda: tokenizer.encode_batch(texts, add_special_tokens=add_special),
    )
    remaining = iter(encoded)
    done: list[TokenizedPrompt] = []
    for place, prompt in enumerate(prompts):
        where = "prompt" if len(prompts) == 1 else f"prompt.{place}"
        if isinstance(prompt, str):
            ids: list[int] = next(remaining)
        else:
            ids = prompt
            if request.truncate_prompt_tokens is None and len(ids) > model.max_model_len:
                raise context_error(len(ids), model.max_model_len, wanted_tokens(request) or 1)
            await off_loop(len(ids), partial(check_ids, ids, model.vocab_size, where))
        if not ids:
            raise bad_request(f"{where} is empty; send at least one token.", where)
        kept = truncate(ids, request.truncate_prompt_tokens, model)
        whole = isinstance(prompt, str) and len(kept) == len(ids)
        done.append(TokenizedPrompt(kept, str(prompt) if whole else None))
    return done


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


def refuse_hopeless(num_bytes: int, model: ServedModel) -> None:
    """Raise :class:`ApiError` 400 for text that cannot fit, before any time goes into it."""
    least = model.tokenizer.min_tokens(num_bytes)
    limit = model.max_model_len
    if least >= limit:
        raise ApiError(
            400,
            f"The prompt is {num_bytes} bytes, which is at least {least} tokens; the context is "
            f"{limit} tokens, the output included. Shorten the prompt.",
            param="prompt",
            code="context_length_exceeded",
            extra={"n_prompt_tokens": least, "n_ctx": limit},
        )


def refuse_giant(size: int, model: ServedModel, where: str) -> None:
    """Raise :class:`ApiError` 400 for text that need not fit, because it is cut or only counted,
    and is so long that it would hold up others and take hundreds of megabytes.
    """
    most = max(LEAST_GIANT, GIANT_PER_TOKEN * model.max_model_len)
    if size > most:
        raise bad_request(
            f"{where} is {size} characters long; at most {most} are taken, whatever is cut off "
            "later. Send it in pieces.",
            where,
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
