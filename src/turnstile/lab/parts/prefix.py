"""A system prompt that everybody shares: computed once, held by all, and counted."""

from __future__ import annotations

from turnstile.bench.lengths import Uniform
from turnstile.lab.continuous import ContinuousServer
from turnstile.lab.drive import Run, drive
from turnstile.lab.load import Ask, make_asks
from turnstile.lab.model import LabModel
from turnstile.lab.policies import NO_SHARING, TURNSTILE, Policy
from turnstile.lab.story import Part, Table, share

SYSTEM = 96
"""Tokens of the system prompt: whole pages."""
PAGE_SIZE = 16
REQUESTS = 24
LONGEST = 160
MEMORY = 2048


def run(model: LabModel, part: Part) -> None:
    """With the prefix cache, and without it."""
    asks = shared_asks(model)
    part.say(
        f"""{REQUESTS} requests begin with the same {SYSTEM} tokens. A full page is known by the
        tokens in it and all before it, so whoever begins alike holds the same pages; those who
        arrive together compute them once. Every page counts its holders and is free when the last
        one has left."""
    )
    shared, alone = _server(model, TURNSTILE), _server(model, NO_SHARING)
    runs = {"prefix cache": drive(shared, asks), "without": drive(alone, asks)}
    part.show(_work(runs, {"prefix cache": shared, "without": alone}))
    part.show(_counts(model, asks))
    saved = (REQUESTS - 1) * SYSTEM
    part.claim(
        f"All but the first find the system prompt: {saved:,} tokens are not computed.",
        shared.scheduler.cache.hits == saved
        and runs["without"].computed - runs["prefix cache"].computed == saved,
    )
    if model.exact:
        part.claim(
            "What comes from the cache changes no token.",
            runs["prefix cache"].tokens() == runs["without"].tokens(),
        )
    part.claim(
        "When all have left, no page is held, and the prompt's pages wait for the next.",
        shared.pool.num_held == 0 and shared.pool.num_cached >= SYSTEM // PAGE_SIZE,
    )
    part.say(
        """What goes wrong without the counts is under `counts`: a page is given away while others
        still read it."""
    )


def shared_asks(model: LabModel, count: int = REQUESTS, seed: int = 11) -> list[Ask]:
    """Requests that begin with the same system prompt and end after different lengths."""
    system = [(7 * i + 3) % model.vocab_size for i in range(SYSTEM)]
    return make_asks(
        Uniform(4, 12), Uniform(4, 40), count, model.vocab_size, seed=seed, shared=system
    )


def _server(model: LabModel, policy: Policy) -> ContinuousServer:
    return ContinuousServer(
        model, policy, memory_tokens=MEMORY, max_model_len=LONGEST, page_size=PAGE_SIZE, slots=12,
        budget=64, watched=True,
    )  # fmt: skip


def _work(runs: dict[str, Run], servers: dict[str, ContinuousServer]) -> Table:
    rows = []
    for name, run in runs.items():
        cache = servers[name].scheduler.cache
        prompts = sum(len(answer.ask.prompt) for answer in run.answers.values())
        first = [answer.wait for answer in run.answers.values()]
        rows.append(
            (
                name, prompts, cache.hits, share(cache.hits, prompts), len(run.steps),
                max(step.reserved for step in run.steps), sum(first) / len(first),
            )
        )  # fmt: skip
    return Table(
        "The work",
        ("", "prompt tokens", "found", "hit rate", "steps", "most memory", "first token, steps"),
        tuple(rows),
        note="Most memory: tokens of pages held at once. First token: mean wait for it.",
    )


def _counts(model: LabModel, asks: list[Ask]) -> Table:
    """The first requests, stopped in the middle: who holds which pages."""
    server = _server(model, TURNSTILE)
    few = asks[:4]
    for ask in few:
        server.submit(ask, 0.0)
    rows: list[tuple[str, str, str]] = []
    for step in range(1, 64):
        server.step(float(step), False)
        running = server.scheduler.running
        if len(running) == len(few) and all(sequence.decoding for sequence in running):
            break
    for sequence in server.scheduler.running:
        pages = sequence.table.pages
        holders = [server.pool.refcount(page) for page in pages]
        rows.append((sequence.request.id, " ".join(map(str, pages)), " ".join(map(str, holders))))
    return Table(
        f"Page tables of the first {len(few)}, once all of them generate",
        ("", "pages", "holders of each"),
        tuple(rows),
    )
