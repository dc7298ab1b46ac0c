"""How many people the same memory holds: static batches over contiguous memory, continuous ones,
and pages. On the engine here, measured; and on one GPU, simulated by its data sheet.

    PYTHONPATH=src python scripts/plot_headline.py --output headline.svg

The same bytes of K and V, the same promise and the same lengths within each half; what the halves
hold cannot be compared with one another. Prints the tables; the figure is one SVG file. The first
half loads the machine for minutes and wants it for itself.
"""

import argparse
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from xml.sax.saxutils import escape

from turnstile.bench.lengths import trace_lengths
from turnstile.core.settings import SchedulerConfig
from turnstile.lab.capacity import ATTAINMENT, TRIES
from turnstile.lab.model import open_model
from turnstile.lab.parts import capacity as lab
from turnstile.simulate.capacity import most_users
from turnstile.simulate.figures import Limits
from turnstile.simulate.hardware import Roofline, choose_hardware, choose_model
from turnstile.simulate.load import Load, draw
from turnstile.simulate.run import Plant
from turnstile.simulate.setup import Front, Setup

PAGE_SIZE = 16
STATIC, CONTIGUOUS, PAGED = (
    "static batches, contiguous memory",
    "continuous batching, contiguous memory",
    "continuous batching, pages",
)
COLOURS = {STATIC: "#9aa5b1", CONTIGUOUS: "#5b8db8", PAGED: "#1f6f4a"}
PROMISE = {"ttft": 2000.0, "tpot": 50.0}
STARTS = {STATIC: 4, CONTIGUOUS: 512, PAGED: 1024}
"""Users that the search begins with: near what it will find, to spare it some trials."""


@dataclass(frozen=True)
class Bar:
    """One way to serve, and what it holds."""

    label: str
    users: int
    tokens_per_second: float | None


@dataclass(frozen=True)
class Half:
    """Three bars that can be compared, and what a reader must know of them."""

    title: str
    promise: str
    about: str
    bars: tuple[Bar, ...]


# -- measured here --------------------------------------------------------------------------------


def measured(processor_time: bool) -> Half:
    """The three ways on the engine that serves, with the default model."""
    model = open_model(processor_time=processor_time)
    bars = []
    for label, found in zip((STATIC, CONTIGUOUS, PAGED), lab.search(model).values(), strict=True):
        best = found.best
        speed = best.figures["output_throughput"] if best else None
        bars.append(Bar(label, found.users, speed))
        _tell(f"measured; {label}: {found.users} users")
    limits, unit = lab.limits_of(model)
    return Half(
        # What its seconds are is said below the bars.
        f"Measured: {model.describe().partition(';')[0]}",
        f"{ATTAINMENT:.0%} of the requests begin within {limits['ttft']:g} {unit} and go on with a "
        f"token every {limits['tpot']:g} {unit}",
        f"{lab.MEMORY:,} tokens of K and V, no request longer than {lab.LONGEST}; users ask again "
        f"at once{'; in seconds of the processor, on one thread' if processor_time else ''}; "
        f"up to {TRIES} draws of each number.",
        tuple(bars),
    )


# -- simulated ------------------------------------------------------------------------------------


def plants(roofline: Roofline, reserved: int) -> dict[str, Plant]:
    """The three ways to serve, with the same bytes."""
    config = SchedulerConfig(max_num_seqs=1024, max_num_batched_tokens=2048, max_model_len=reserved)
    pages = roofline.num_pages(PAGE_SIZE)
    paged = Setup(
        timing=roofline,
        num_pages=pages,
        page_size=PAGE_SIZE,
        scheduler=config,
        front=Front(per_request=2e-4, delivery=2e-3),
    )
    # One page as long as the longest context is a reservation of it, to the same allocator. A slot
    # for each, and nobody needs a second one: admission has nothing to ask.
    fit = pages * PAGE_SIZE // reserved
    contiguous = replace(
        paged,
        page_size=reserved,
        num_pages=fit,
        prefix_caching=False,
        admission="unchecked",
        scheduler=replace(config, max_num_seqs=min(fit, config.max_num_seqs)),
    )
    return {
        STATIC: Plant(paged, static=True),
        CONTIGUOUS: Plant(contiguous),
        PAGED: Plant(paged),
    }


def simulated(options: argparse.Namespace) -> Half:
    """The three ways on hardware by its data sheet."""
    hardware = choose_hardware(options.hardware)
    roofline = Roofline(hardware, choose_model(options.model))
    prompt, output = trace_lengths("lmsys_turn1")

    def make(users: float, number: int) -> Load:
        count = max(options.requests, 4 * int(users))
        load = draw("chat", count, prompt, output, 101 + number, max_len=options.reserved)
        return replace(load, think=options.think).with_users(int(users))

    limits = Limits(PROMISE, options.share)
    bars = []
    for label, plant in plants(roofline, options.reserved).items():
        began = time.monotonic()
        found = most_users(plant, make, limits, start=STARTS[label], tries=3)
        speed = found.figures["output_throughput"] if found.figures else None
        bars.append(Bar(label, round(found.value), speed))
        took = time.monotonic() - began
        _tell(f"simulated; {label}: {found.value:.0f} users ({took:.0f} s)")
    tokens = roofline.num_pages(PAGE_SIZE) * PAGE_SIZE
    return Half(
        f"Simulated: {options.model} on one {hardware.name.upper()}",
        f"{options.share:.0%} of the requests begin within {PROMISE['ttft']:g} ms and go on with a "
        f"token every {PROMISE['tpot']:g} ms",
        f"An estimate by roofline ({hardware.source}); {tokens:,} tokens of K and V, "
        f"{options.reserved:,} reserved a request where memory is contiguous; LMSYS lengths, "
        f"{options.think:g} s between an answer and the next question.",
        tuple(bars),
    )


# -- the figure -----------------------------------------------------------------------------------


def table(half: Half) -> str:
    lines = [
        half.title,
        half.promise,
        "",
        "| how it serves | users | | tok/s |",
        "|---|---|---|---|",
    ]
    least = half.bars[0].users
    for bar in half.bars:
        times = f"{bar.users / least:.1f} ×" if least else "–"
        speed = f"{bar.tokens_per_second:.0f}" if bar.tokens_per_second else "–"
        lines.append(f"| {bar.label} | {bar.users:,} | {times} | {speed} |")
    return "\n".join([*lines, "", half.about, ""])


def svg(halves: Sequence[Half]) -> str:
    """Bars in two groups, each on its own scale."""
    width, left, height, gap = 940, 330, 26, 10
    parts, y = [], 62
    for half in halves:
        y += 22
        parts.append(_text(20, y, half.title, 'font-size="15" font-weight="bold"'))
        parts.append(_text(20, y + 20, half.promise, 'font-size="13"'))
        y += 32
        most = max(bar.users for bar in half.bars) or 1
        for bar in half.bars:
            length = max(1.0, (width - left - 110) * bar.users / most)
            middle = y + height * 0.68
            parts.append(_text(left - 10, middle, bar.label, 'text-anchor="end"'))
            parts.append(
                f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{height}" '
                f'fill="{COLOURS[bar.label]}"/>'
            )
            parts.append(_text(left + length + 8, middle, f"{bar.users:,} users"))
            y += height + gap
        for line in textwrap.wrap(half.about, 130):
            y += 16
            parts.append(_text(20, y - 2, line, 'font-size="12" fill="#555"'))
        y += 14
    title = _text(
        20, 38, "Users that the same memory holds, with the same promise",
        'font-size="19" font-weight="bold"',
    )  # fmt: skip
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 6}" '
        'font-family="sans-serif" font-size="14">'
        '<rect width="100%" height="100%" fill="white"/>'
        f"{title}{''.join(parts)}</svg>\n"
    )


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--model", default="8b", help="of the simulated half")
    parser.add_argument("--reserved", type=int, default=4096, help="longest context, in tokens")
    parser.add_argument("--think", type=float, default=10.0, help="seconds between two questions")
    parser.add_argument("--requests", type=int, default=1500, help="at least so many a trial")
    parser.add_argument("--share", type=float, default=0.95)
    parser.add_argument("--only", choices=("measured", "simulated"), help="one of the halves")
    parser.add_argument(
        "--processor-time", action="store_true",
        help="measure in the seconds the processor spends here, on one thread",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, default=Path("headline.svg"))
    options = parser.parse_args()
    halves = []
    if options.only != "simulated":
        halves.append(measured(options.processor_time))
    if options.only != "measured":
        halves.append(simulated(options))
    options.output.write_text(svg(halves))
    print("\n".join(table(half) for half in halves))
    return 0


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
