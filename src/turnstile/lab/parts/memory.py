"""A contiguous cache against pages: the book's arithmetic, real lengths, and the engine."""

from __future__ import annotations

import itertools

import numpy as np

from turnstile.bench.lengths import Lognormal, Uniform, trace_lengths, trace_names
from turnstile.core.pages import PagePool
from turnstile.lab.contiguous import ContiguousPool
from turnstile.lab.continuous import ContinuousServer
from turnstile.lab.drive import Run, drive
from turnstile.lab.filling import Filling, fill
from turnstile.lab.load import make_asks
from turnstile.lab.model import LabModel
from turnstile.lab.policies import NO_SHARING, ORCA
from turnstile.lab.story import Cell, Part, Plot, Series, Table, share

REQUESTS, RESERVED, USED = 100, 4096, 200
"""The book's example: so many requests, each with so many tokens reserved and used."""
PAGE_SIZES = (1, 8, 16, 32, 64, 128)
TRACE_PAGE_SIZES = (16, 128)
TRACE_ROWS = 32
"""How many reservations the memory for a trace has room for."""

LONGEST = 128
ROOM = 8 * LONGEST


def run(model: LabModel, part: Part) -> None:
    """Compare them."""
    _arithmetic(model, part)
    _traces(part)
    _engine(model, part)


def _arithmetic(model: LabModel, part: Part) -> None:
    memory = REQUESTS * RESERVED
    part.say(
        f"""A contiguous cache reserves for every request the longest sequence there may be:
        {RESERVED:,} tokens, though this one uses {USED}. Here both kinds of cache are filled, in
        the allocator that serves, with requests of {USED} tokens: first {REQUESTS}, then as many as
        fit the same memory ({memory:,} tokens, {model.kv_bytes(memory) / 2**20:,.0f} MiB for this
        model)."""
    )
    pools: list[tuple[str, PagePool]] = [("contiguous", ContiguousPool(memory, RESERVED))]
    pools += [(f"pages of {size}", PagePool(memory // size, size)) for size in PAGE_SIZES]
    rows = []
    results: list[tuple[PagePool, Filling, Filling]] = []
    for name, pool in pools:
        some = fill(pool, itertools.repeat(USED, REQUESTS))
        all_of_them = fill(pool, itertools.repeat(USED))
        results.append((pool, some, all_of_them))
        rows.append(
            (
                name, some.reserved, share(some.used, some.reserved), some.most_wasted,
                all_of_them.sequences,
            )
        )  # fmt: skip
    part.show(
        Table(
            f"{REQUESTS} requests of {USED} tokens",
            ("", "tokens reserved", "useful", "wasted each", "requests that fit"),
            tuple(rows),
        )
    )
    contiguous = results[0][1]
    part.claim(
        f"{REQUESTS} contiguous requests fill the memory, and {100 * contiguous.useful:.1f} % of "
        "it is useful (the book's 5 %).",
        contiguous.reserved == contiguous.memory
        and results[0][2].sequences == REQUESTS
        and round(100 * contiguous.useful) == 5,
    )
    part.claim(
        "With pages a sequence wastes less than one page, whatever the size.",
        all(some.most_wasted < pool.page_size for pool, some, _ in results[1:]),
    )
    sixteen = results[1 + PAGE_SIZES.index(16)][2].sequences
    part.claim(
        f"The same bytes hold {sixteen:,} such requests in pages of 16.",
        sixteen == memory // 16 // -(-USED // 16),
    )


def _traces(part: Part) -> None:
    part.say(
        f"""The same with the lengths of public traces (prompt and answer, drawn from their
        quantiles). The memory is {TRACE_ROWS} reservations of the longest sequence of the trace,
        rounded up to a power of two."""
    )
    rows: dict[int, list[tuple[Cell, ...]]] = {size: [] for size in TRACE_PAGE_SIZES}
    kept = True
    for name in trace_names():
        prompts, outputs = trace_lengths(name)
        longest = 1 << (int(prompts.values[-1] + outputs.values[-1]) - 1).bit_length()
        memory = TRACE_ROWS * longest
        random = np.random.default_rng(5)
        count = 200 * TRACE_ROWS
        lengths = (prompts.draw(count, random) + outputs.draw(count, random)).tolist()
        contiguous = fill(ContiguousPool(memory, longest), _ones(lengths, longest))
        useful = share(sum(lengths[:TRACE_ROWS]), memory)
        for size, own in rows.items():
            paged = fill(PagePool(memory // size, size), lengths)
            kept &= paged.most_wasted < size and paged.sequences > contiguous.sequences
            own.append(
                (
                    name, longest, useful, paged.sequences, paged.wasted_each,
                    share(paged.used, paged.reserved),
                )
            )  # fmt: skip
        kept &= contiguous.sequences == TRACE_ROWS
    for size, own in rows.items():
        part.show(
            Table(
                f"Requests of public traces, {TRACE_ROWS} reservations against pages of {size}",
                ("", "reserved", "useful", "fit in pages", "wasted each", "useful in pages"),
                tuple(own),
            )
        )
    part.claim("Every trace fits more often in pages than in reservations.", kept)


def _ones(lengths: list[int], longest: int) -> list[int]:
    """What a request asks of a contiguous cache, whatever its length."""
    return [longest] * len(lengths)


def _engine(model: LabModel, part: Part) -> None:
    asks = make_asks(
        Uniform(4, 24), Lognormal(14, 0.9, 2, 96), 64, model.vocab_size, seed=3, longest=LONGEST
    )
    runs: dict[str, Run] = {}
    for name, policy in (("contiguous", ORCA), ("paged", NO_SHARING)):
        server = ContinuousServer(
            model, policy, memory_tokens=ROOM, max_model_len=LONGEST, slots=64, budget=128,
            watched=True,
        )  # fmt: skip
        runs[name] = drive(server, asks, seconds=model.seconds)
    part.say(
        f"""On the engine: {len(asks)} requests at once, none longer than {LONGEST} tokens, in
        {ROOM:,} tokens of memory ({model.kv_bytes(ROOM) / 2**20:.1f} MiB), continuous batching in
        both. Only the memory differs."""
    )
    part.show(
        Table(
            "The same bytes on the engine",
            ("", "most at once", "steps", "mean useful share", "tokens/s"),
            tuple(
                (
                    name, each.peak_sequences, len(each.steps),
                    share(sum(s.filled for s in each.steps), sum(s.reserved for s in each.steps)),
                    each.outputs / each.seconds,
                )
                for name, each in runs.items()
            ),
        )
    )  # fmt: skip
    part.show(
        Plot(
            "Memory taken, and what it holds",
            "step",
            "tokens",
            tuple(
                Series(f"{name}, {what}", range(len(values)), values)
                for name, each in runs.items()
                for what, values in (
                    ("taken", [step.reserved for step in each.steps]),
                    ("filled", [step.filled for step in each.steps]),
                )
            ),
            form="steps",
        )
    )
    old, new = runs["contiguous"], runs["paged"]
    part.claim(
        f"The same bytes hold {new.peak_sequences} requests at once in pages, "
        f"{old.peak_sequences} in reservations.",
        new.peak_sequences >= 2 * old.peak_sequences == 2 * (ROOM // LONGEST),
    )
    part.claim(
        f"They are done after {len(new.steps)} steps instead of {len(old.steps)}.",
        len(new.steps) < len(old.steps),
    )
    if model.exact:
        part.claim("Where the memory lies changes no token.", new.tokens() == old.tokens() != {})
