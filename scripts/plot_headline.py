"""How many people fit on one GPU: static batches over contiguous memory, up to pages in a batch
that everybody can enter at every step. Simulated, for hardware by its data sheet.

    PYTHONPATH=src python scripts/plot_headline.py --output headline.svg

The same memory, the same promise, the same chat lengths; 95 % of the requests must keep the
promise. Prints the table; the figure is one SVG file.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from xml.sax.saxutils import escape

from turnstile.bench.lengths import trace_lengths
from turnstile.core.settings import SchedulerConfig
from turnstile.simulate.capacity import Capacity, most_users
from turnstile.simulate.figures import Limits
from turnstile.simulate.hardware import Roofline, choose_hardware, choose_model
from turnstile.simulate.load import Load, draw
from turnstile.simulate.run import Plant
from turnstile.simulate.setup import Front, Setup

PAGE_SIZE = 16


@dataclass(frozen=True)
class Bar:
    label: str
    plant: Plant


@dataclass(frozen=True)
class Promise:
    label: str
    limits: Limits


def bars(roofline: Roofline, reserved: int) -> list[Bar]:
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
    return [
        Bar("static batches, contiguous memory", Plant(paged, static=True)),
        Bar("continuous batching, contiguous memory", Plant(contiguous)),
        Bar("continuous batching, pages", Plant(paged)),
    ]


def promises(share: float) -> list[Promise]:
    return [
        Promise(
            "first token within 2 s, then one every 50 ms",
            Limits({"ttft": 2000.0, "tpot": 50.0}, share),
        ),
        Promise("the whole answer within 100 ms a token", Limits({"norm": 100.0}, share)),
    ]


def table(found: Sequence[tuple[Promise, Bar, Capacity]]) -> str:
    lines = ["| promise | how it serves | users | tok/s | mean batch |", "|---|---|---|---|---|"]
    for promise, bar, capacity in found:
        figures = capacity.figures
        speed = f"{figures['output_throughput']:.0f}" if figures else "–"
        batch = f"{figures['machine']['mean_batch']:.1f}" if figures else "–"
        lines.append(
            f"| {promise.label} | {bar.label} | {capacity.value:.0f} | {speed} | {batch} |"
        )
    return "\n".join(lines)


def svg(title: str, below: str, found: Sequence[tuple[Promise, Bar, Capacity]]) -> str:
    """Bars in groups, one group a promise."""
    colours = ("#9aa5b1", "#5b8db8", "#1f6f4a")
    width, left, height, gap = 860, 300, 26, 10
    most = max(capacity.value for _, _, capacity in found) or 1.0
    parts, y, last = [], 70, ""
    for number, (promise, bar, capacity) in enumerate(found):
        if promise.label != last:
            y += 18 if last else 0
            parts.append(f'<text x="20" y="{y}" font-weight="bold">{escape(promise.label)}</text>')
            last, y = promise.label, y + 12
        length = max(1.0, (width - left - 90) * capacity.value / most)
        middle = y + height * 0.68
        colour = colours[number % len(colours)]
        parts.append(
            f'<text x="{left - 10}" y="{middle}" text-anchor="end">{escape(bar.label)}</text>'
            f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{height}" fill="{colour}"/>'
            f'<text x="{left + length + 8:.1f}" y="{middle}">{capacity.value:.0f} users</text>'
        )
        y += height + gap
    parts.append(f'<text x="20" y="{y + 22}" font-size="12" fill="#555">{escape(below)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y + 40}" '
        f'font-family="sans-serif" font-size="14">'
        f'<rect width="100%" height="100%" fill="white"/>'
        f'<text x="20" y="34" font-size="18" font-weight="bold">{escape(title)}</text>'
        f"{''.join(parts)}</svg>\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--model", default="8b")
    parser.add_argument("--reserved", type=int, default=4096, help="longest context, in tokens")
    parser.add_argument("--think", type=float, default=10.0, help="seconds between two questions")
    parser.add_argument("--requests", type=int, default=1500, help="at least so many a trial")
    parser.add_argument("--share", type=float, default=0.95)
    parser.add_argument("--output", type=Path, default=Path("headline.svg"))
    options = parser.parse_args()
    hardware = choose_hardware(options.hardware)
    roofline = Roofline(hardware, choose_model(options.model))
    prompt, output = trace_lengths("lmsys_turn1")

    def make(users: int) -> Load:
        count = max(options.requests, 4 * users)
        load = draw("chat", count, prompt, output, 101, max_len=options.reserved)
        return replace(load, think=options.think)

    found = []
    for promise in promises(options.share):
        for bar in bars(roofline, options.reserved):
            began = time.monotonic()
            capacity = most_users(bar.plant, make, promise.limits, start=256)
            found.append((promise, bar, capacity))
            print(
                f"{promise.label}; {bar.label}: {capacity.value:.0f} users "
                f"({time.monotonic() - began:.0f} s)",
                file=sys.stderr,
            )
    title = f"Concurrent users, {options.model} on one {hardware.name.upper()}"
    below = (
        f"Simulated by roofline, an estimate: {hardware.source}; LMSYS lengths, "
        f"{options.think:g} s between questions, {options.share:.0%} keep the promise."
    )
    options.output.write_text(svg(title, below, found))
    print(table(found))
    print(f"\n{below}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
