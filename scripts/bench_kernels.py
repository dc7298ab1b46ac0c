"""Time whole steps of a model on the native backend, and take them apart.

    PYTHONPATH=src python scripts/bench_kernels.py [--only "100 users"]
    PYTHONPATH=src python scripts/bench_kernels.py --table      # those of docs/performance.md
    PYTHONPATH=src python scripts/bench_kernels.py --cached-read    # a constant of core/cost.py

For every shape of step: milliseconds, where they go, and the share of the machine's best that the
products (operations a second) and the attention (bytes a second) reach. The best is measured in
the same run. Medians of ``--repeat`` steps; noisy neighbours show as a low peak, too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import numpy as np

from turnstile.kernels.base import FlatBatch, Opaque
from turnstile.kernels.native import NativeBackend
from turnstile.models.config import ModelConfig
from turnstile.models.decoder import Decoder
from turnstile.models.default_model import NAME
from turnstile.models.source import resolve

PAGE = 16
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
PRODUCTS = ("qkv", "o", "gate, up, silu", "down", "head")
APART = ("1 user", "100 users", "100 users + 128 prompt", "512 prompt")
"""Steps whose parts ``--table`` shows."""
TABLE = (*APART, "4 users", "16 users", "32 users", "100 users + 256 prompt")
"""Steps that ``--table`` measures: two minutes for both formats with ``--repeat 5``."""


@dataclass(frozen=True)
class Shape:
    """A step: ``decode`` sequences of about ``context`` tokens, the first ``shared`` of them in the
    same pages, and ``prefill`` new prompts, which may lie ``behind`` the same pages.
    """

    name: str
    decode: int
    context: int
    prefill: int = 0
    prompt: int = 128
    shared: int = 0
    behind: bool = False


SHAPES = (
    Shape("1 user", 1, 200),
    Shape("1 user, context 2000", 1, 2000),
    Shape("4 users", 4, 200),
    Shape("16 users", 16, 200),
    Shape("32 users", 32, 200),
    Shape("100 users", 100, 200),
    Shape("100 users + 128 prompt", 100, 200, 1),
    Shape("100 users + 256 prompt", 100, 200, 2),
    Shape("100 users, context 560", 100, 560),
    Shape("100 users, context 560, 512 shared", 100, 560, shared=512),
    Shape("90 users, 512 shared + 10 prompts behind it", 90, 560, 10, 40, 512, behind=True),
    Shape("90 users + 678 prompt", 90, 200, 6, 113),
    Shape("90 users + 678 prompt, behind 512 shared", 90, 712, 6, 113, 512, behind=True),
    Shape("256 users", 256, 200),
    Shape("512 prompt", 0, 0, 4),
)


def make_batch(shape: Shape, vocab: int, num_pages: int) -> FlatBatch:
    """Random tokens in random pages; what is not shared spreads from half to one and a half of its
    mean.
    """
    random = np.random.default_rng(0)
    parts = []
    for _ in range(shape.decode):
        spread = random.uniform(0.5, 1.5) if shape.decode > 1 else 1.0
        own = int((shape.context - shape.shared) * spread)
        parts.append((shape.shared + own - 1, 1))
    parts += [(shape.shared if shape.behind else 0, shape.prompt)] * shape.prefill
    counts = [new for _, new in parts]
    needed = [-(-(old + new) // PAGE) for old, new in parts]
    order = random.permutation(num_pages).astype(np.int32)
    tables = np.zeros((len(parts), max(needed)), np.int32)
    start = 0
    for row, count in enumerate(needed):
        tables[row, :count] = order[start : start + count]
        start += count
    common = shape.shared // PAGE
    sharers = len(parts) if shape.behind else shape.decode
    tables[:sharers, :common] = tables[:1, :common]
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    return FlatBatch(
        PAGE,
        random.integers(0, vocab, sum(counts)).astype(np.int32),
        np.concatenate([np.arange(old, old + new, dtype=np.int32) for old, new in parts]),
        np.repeat(np.arange(len(parts), dtype=np.int32), counts),
        tables,
        offsets,
        np.array([old + new for old, new in parts], np.int32),
        offsets[1:] - 1,
    )


def fill(decoder: Decoder, batch: FlatBatch, kv: Opaque) -> None:
    """Write every context, as a prompt of random tokens: a page that was never written is a page
    of zeros that all share, and reading it costs nothing.
    """
    random = np.random.default_rng(1)
    for row, offset in enumerate(batch.query_offsets[:-1]):
        count = int(batch.positions[offset])
        if count:
            prompt = FlatBatch(
                PAGE,
                random.integers(0, decoder.config.vocab_size, count).astype(np.int32),
                np.arange(count, dtype=np.int32),
                np.zeros(count, np.int32),
                batch.page_tables[row : row + 1],
                np.array([0, count], np.int32),
                np.array([count], np.int32),
                np.array([count - 1], np.int32),
            )
            decoder.forward(prompt, kv)


def product_operations(config: ModelConfig, batch: FlatBatch) -> float:
    """Two for each multiply-add of all matrix products. Of the last layer, rows without logits
    need K and V alone.
    """
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * q + 2 * kv + 3 * config.intermediate_size)
    head = config.hidden_size * config.vocab_size
    rows, others = len(batch.logit_rows), batch.num_tokens - len(batch.logit_rows)
    spared = layer - config.hidden_size * (q + 2 * kv)
    whole = batch.num_tokens * layer * config.num_layers
    return 2.0 * (whole - others * spared + rows * head)


def measure(decoder: Decoder, shape: Shape, repeat: int) -> tuple[float, dict[str, float], float]:
    """Median seconds of a step, seconds of each part, and those of argmax and normaliser."""
    num_pages = 6000
    kv = decoder.backend.allocate_kv(decoder.kv_shape(PAGE, num_pages))
    batch = make_batch(shape, decoder.config.vocab_size, num_pages)
    backend = decoder.backend
    assert isinstance(backend, NativeBackend)
    fill(decoder, batch, kv)
    steps, after = [], []
    parts: dict[str, list[float]] = {}
    for round_number in range(repeat + 2):
        before = backend.laps()
        start = time.perf_counter()
        logits = decoder.forward(batch, kv)
        middle = time.perf_counter()
        backend.argmax(logits)
        backend.log_normalizer(logits)
        end = time.perf_counter()
        if round_number < 2:
            continue
        steps.append(middle - start)
        after.append(end - middle)
        for name, seconds in backend.laps().items():
            parts.setdefault(name, []).append(seconds - before[name])
    medians = {name: statistics.median(values) for name, values in parts.items()}
    return statistics.median(steps), medians, statistics.median(after)


@dataclass(frozen=True)
class Result:
    """One shape, measured: seconds of a step, of its parts, of argmax and normaliser after it."""

    shape: Shape
    seconds: float
    parts: dict[str, float]
    after: float
    tokens: int
    operations: float
    kv_bytes: float
    weight_bytes: int  # of one weight

    @property
    def products(self) -> float:
        """Seconds of all matrix products."""
        return sum(self.parts[name] for name in PRODUCTS)

    def rates(self, peak: float, bandwidth: float) -> str:
        """What the products and the attention reach, and the share of the best."""
        rate = self.operations / self.products
        text = f"products {rate / 1e9:,.0f} G/s ({rate / peak:.0%})"
        if self.tokens == 1:
            read = rate / 2 * self.weight_bytes
            text += f", weights {read / 1e9:.0f} GB/s ({read / bandwidth:.0%})"
        if self.shape.decode:
            read = self.kv_bytes / self.parts["attention"]
            text += f"; K and V {read / 1e9:.0f} GB/s ({read / bandwidth:.0%})"
        return text


def run(decoder: Decoder, form: str, shape: Shape, repeat: int) -> Result:
    seconds, parts, after = measure(decoder, shape, repeat)
    batch = make_batch(shape, decoder.config.vocab_size, 6000)
    page = decoder.backend.kv_page_bytes(decoder.kv_shape(PAGE, 1))
    sharers = shape.decode + (shape.prefill if shape.behind else 0)
    distinct = batch.context_lengths.sum() - shape.shared * (sharers - 1)  # read from memory
    return Result(
        shape,
        seconds,
        parts,
        after,
        batch.num_tokens,
        product_operations(decoder.config, batch),
        page / PAGE * distinct,
        WEIGHT_BYTES[form],
    )


def report(result: Result, peak: float, bandwidth: float) -> None:
    print(
        f"\n{result.shape.name}: {result.seconds * 1e3:.2f} ms, "
        f"{result.tokens / result.seconds:,.0f} tokens/s; {result.rates(peak, bandwidth)}; "
        f"argmax and normaliser {result.after * 1e3:.2f} ms"
    )
    shown = sorted(result.parts.items(), key=lambda item: -item[1])
    print("   " + ", ".join(f"{name} {value * 1e3:.2f}" for name, value in shown))


def print_tables(results: dict[str, list[Result]]) -> None:
    """Markdown: milliseconds and tokens a second of every step, then the parts of some."""
    print("\n| step | " + " | ".join(f"{name}, ms | tokens/s" for name in results) + " |")
    print("|---" * (1 + 2 * len(results)) + "|")
    for row in zip(*results.values(), strict=True):
        cells = [f"{r.seconds * 1e3:.1f} | {r.tokens / r.seconds:,.0f}" for r in row]
        print(f"| {row[0].shape.name} | " + " | ".join(cells) + " |")
    for name, measured in results.items():
        apart = [r for r in measured if r.shape.name in APART]
        print(f"\n| {name}, ms | " + " | ".join(r.shape.name for r in apart) + " |")
        print("|---" * (1 + len(apart)) + "|")
        for part in max(apart, key=lambda r: r.seconds).parts:
            print(f"| {part} | " + " | ".join(f"{r.parts[part] * 1e3:.2f}" for r in apart) + " |")
        print("| argmax, normaliser | " + " | ".join(f"{r.after * 1e3:.2f}" for r in apart) + " |")


def cached_read(decoder: Decoder, repeat: int, rounds: int = 3) -> None:
    """Measure ``CACHED_READ`` of ``core/cost.py`` and print the line: contexts of which most is in
    the same pages against those that share none, in turns, as the machine's pace moves.
    """
    apart, shared = (shape for shape in SHAPES if shape.name.startswith("100 users, context"))
    ratios = []
    for _ in range(rounds):
        whole, part = (measure(decoder, shape, repeat)[1]["attention"] for shape in (apart, shared))
        ratios.append(part / whole)
        print(f"attention {whole * 1e3:.2f} ms, with shared pages {part * 1e3:.2f} ms")
    tokens = make_batch(shared, decoder.config.vocab_size, 6000).context_lengths.sum()
    again = shared.shared * (shared.decode - 1) / tokens
    ratio = statistics.median(ratios)
    print(f"{ratio:.3f} as long, where {again:.3f} of what is read has been read before:")
    print(f"CACHED_READ = {max(0.0, (ratio - (1 - again)) / again):.2f}")


def load(model: str, form: str, kv: str, threads: int | None) -> tuple[Decoder, float, float]:
    """The model, and the operations and bytes a second that the machine reaches at best."""
    backend = NativeBackend(form, kv, threads)
    decoder = Decoder.load(resolve(model), backend)
    peak, bandwidth = backend.peak_operations(), backend.peak_bandwidth()
    print(
        f"{form} weights, {kv} K and V, {backend.level}, {backend.threads} threads; "
        f"at best {peak / 1e9:,.0f} G operations/s, {bandwidth / 1e9:.0f} GB/s"
    )
    return decoder, peak, bandwidth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=NAME, help="path or name of a model")
    parser.add_argument("--format", default="int8", help="float32, bfloat16 or int8")
    parser.add_argument("--kv", default=None, help="the same choices; default: the format")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--only", default="", help="steps whose name contains this")
    parser.add_argument(
        "--table", action="store_true", help="int8 and bfloat16, as tables in Markdown"
    )
    parser.add_argument(
        "--cached-read", action="store_true", help="the line of core/cost.py: a minute or two"
    )
    options = parser.parse_args()
    if options.cached_read:
        decoder, *_ = load(
            options.model, options.format, options.kv or options.format, options.threads
        )
        cached_read(decoder, options.repeat)
        return
    results: dict[str, list[Result]] = {}
    for form in ("int8", "bfloat16") if options.table else (options.format,):
        decoder, *best = load(options.model, form, options.kv or form, options.threads)
        results[form] = []
        for shape in SHAPES:
            wanted = shape.name in TABLE if options.table else True
            if wanted and options.only in shape.name:
                result = run(decoder, form, shape, options.repeat)
                report(result, *best)
                results[form].append(result)
    if options.table:
        print_tables(results)


if __name__ == "__main__":
    main()
