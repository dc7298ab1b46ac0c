"""The requests of one repetition: lengths drawn from a seed, text cut from prose."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from turnstile.bench.corpus import Prose
from turnstile.bench.workloads import Workload

Tokenize = Callable[[str], Awaitable[list[int]]]
Decode = Callable[[list[int]], Awaitable[str]]

_MOST_TRIES = 5
"""Up to 16 words a token."""


class PassageError(RuntimeError):
    """No prompt of the length wanted can be made; the message says why."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One request to send: the prompt as token ids and the number of tokens to answer with.

    Parameters
    ----------
    text
        The prompt as text, where the endpoint takes text.
    follow_ups
        What the user asks next, once there is an answer; each prompt is the new part alone.
    """

    prompt: list[int]
    output_tokens: int
    follow_ups: tuple[Planned, ...] = ()
    text: str = ""


async def plan(workload: Workload, tokenize: Tokenize, prose: Prose, seed: int) -> list[Planned]:
    """Draw the lengths (from `seed`) and cut the prompts (going on in `prose`).

    The ids are those of running text, cut to the exact length. The prompt and the output lengths
    come from one generator, in this order, so that a seed names the same lengths everywhere; those
    of further turns come after them.
    """
    if workload.dataset is not None:
        return await _from_file(workload, tokenize, prose, seed)
    rng = np.random.default_rng(seed)
    prompts = workload.prompt.draw(workload.requests, rng)
    outputs = workload.output.draw(workload.requests, rng)
    prefixes = [
        await passage(tokenize, prose, workload.prefix) if workload.prefix else []
        for _ in range(workload.prefix_groups)
    ]
    turns = workload.turns.draw(workload.requests, rng) if workload.turns is not None else None
    planned = []
    for number, (own, output) in enumerate(zip(prompts.tolist(), outputs.tolist(), strict=True)):
        prompt = prefixes[number % len(prefixes)] + await passage(tokenize, prose, own)
        more = 0 if turns is None else int(turns[number]) - 1
        follow_ups = []
        for question, answer in zip(
            workload.prompt.draw(more, rng).tolist(),
            workload.output.draw(more, rng).tolist(),
            strict=True,
        ):
            follow_ups.append(Planned(await passage(tokenize, prose, question), answer))
        planned.append(Planned(prompt, output, tuple(follow_ups)))
    return planned


async def _from_file(
    workload: Workload, tokenize: Tokenize, prose: Prose, seed: int
) -> list[Planned]:
    assert workload.dataset is not None
    blocks: dict[int, list[int]] = {}  # what the trace names by a number, in this repetition
    planned = []
    for item in workload.dataset.items(seed, workload.requests):
        ids: list[int] = []
        for block in item.blocks:
            if block not in blocks:
                blocks[block] = await passage(tokenize, prose, workload.dataset.block_tokens)
            ids = ids + blocks[block]
        if item.prompt_tokens is not None:
            missing = item.prompt_tokens - len(ids)
            own = await passage(tokenize, prose, missing) if missing > 0 else []
            ids = (ids + own)[: item.prompt_tokens]
        else:
            ids = await tokenize(item.prompt_text)
        output = item.output_tokens
        if output is None:
            output = len(await tokenize(item.output_text))
        if ids and output > 0:
            planned.append(Planned(ids, output))
    return planned


async def with_text(plan: Sequence[Planned], decode: Decode) -> list[Planned]:
    """The same requests with the text of their prompts."""
    return [
        replace(
            item,
            text=await decode(item.prompt),
            follow_ups=tuple(await with_text(item.follow_ups, decode)),
        )
        for item in plan
    ]


async def passage(tokenize: Tokenize, prose: Prose, count: int) -> list[int]:
    """Return the first `count` token ids of a passage that begins where none has begun before.

    Raises :class:`PassageError` where the server's tokenizer makes far fewer tokens than words.
    """
    start, words = prose.next_start(), count + 8
    for _ in range(_MOST_TRIES):
        ids = await tokenize(" ".join(prose.words(start, words)))
        if len(ids) >= count:
            return ids[:count]
        words *= 2  # tokens longer than words: no tokenizer known has many
    raise PassageError(
        f"{words // 2} words of prose make {len(ids)} tokens, fewer than the {count} of a prompt: "
        "the server's tokenizer does not count as one should."
    )
