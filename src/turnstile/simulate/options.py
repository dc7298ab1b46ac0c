"""What can be asked of the simulator: :class:`MachineOptions` and :class:`LoadOptions`.

Their docstrings are the command line's help.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Annotated, TypeVar

from cyclopts import Parameter

from turnstile.bench.lengths import LengthDistribution, parse_lengths, trace_lengths, trace_names
from turnstile.bench.workloads import WORKLOADS, Workload
from turnstile.core.cost import Coefficients
from turnstile.core.settings import SchedulerConfig
from turnstile.simulate.bench_file import fit_result, is_result, read_result
from turnstile.simulate.calibrate import (
    ENGINE_SETTINGS,
    Calibration,
    CalibrationError,
    ask_server,
    calibrated,
    read_calibration,
)
from turnstile.simulate.hardware import ModelShape, Roofline, choose_hardware, choose_model
from turnstile.simulate.load import Load, from_workload, read_trace
from turnstile.simulate.load import draw as drawn
from turnstile.simulate.run import Plant
from turnstile.simulate.setup import Front, Setup
from turnstile.simulate.timing import LinearTiming, finite

T = TypeVar("T")


class OptionsError(ValueError):
    """This cannot be simulated as asked for; the message says what to change."""


@dataclass(kw_only=True)
class MachineOptions:
    """The machine, or machines, to simulate."""

    source: Annotated[str | None, Parameter(name="--from")] = None
    """A running server (http://…), or a file of --save-calibration or of `bench serve`."""
    hardware: str | None = None
    """Estimate by roofline instead: a100, h100, h200 or cpu."""
    model: str = "8b"
    """Model of the estimate: 135m, 1b, 3b, 7b, 8b, 14b, 32b, 70b, or the path of a model."""
    devices: int = 1
    """Devices of the estimate that work as one."""
    cost: str | None = None
    """Or what a step costs: seconds per step, token, query-key pair and sequence, as a,b,c,d."""
    num_pages: int | None = None
    """Pages of the pool. Default: the server's, or what fits the hardware's memory."""
    page_size: list[int] = field(default_factory=list)
    """Tokens of a page; several to sweep. The pool keeps its size in tokens."""
    max_num_seqs: int | None = None
    """Sequences computed at once (slots)."""
    max_num_batched_tokens: int | None = None
    """Tokens of a step."""
    max_model_len: int | None = None
    """Most tokens of a prompt and its output."""
    target_itl: float | None = None
    """Seconds a step should take while others stream."""
    admission: list[str] = field(default_factory=list)
    """expected, guaranteed, unchecked or module:Class; several to sweep."""
    scheduling_policy: list[str] = field(default_factory=list)
    """fair, fcfs, priority or module:Class; several to sweep."""
    preemption: str | None = None
    """fair, newest or module:function. Default: the server's."""
    max_num_queued_reqs: int | None = None
    """Most requests waiting to start; more are refused, as by the server's gate."""
    max_queue_wait: float | None = None
    """Most seconds of predicted wait; who would wait longer is refused. 0: any."""
    prefix_caching: bool = True
    """Keep the pages of finished prompts for requests that begin alike."""
    replicas: list[int] = field(default_factory=list)
    """Machines alike; several numbers to sweep."""
    router: list[str] = field(default_factory=list)
    """round-robin, least-loaded or prefix-aware; several to sweep."""


@dataclass(kw_only=True)
class LoadOptions:
    """What is asked of it."""

    users: list[str] = field(default_factory=list)
    """Users of a closed loop; several, or a range such as 100-2000, to sweep."""
    rate: list[float] = field(default_factory=list)
    """Or Poisson arrivals per second; several to sweep."""
    trace: Path | None = None
    """Or a recorded load: CSV as the Azure traces, JSON lines as the Mooncake traces."""
    workload: str | None = None
    """Lengths of a workload of `bench serve` (W1 to W5)."""
    lengths: str = "lmsys_turn1"
    """Lengths of a public trace."""
    prompt_lengths: str | None = None
    """128, 16-64, lognormal:MEDIAN:SIGMA[:LOW:HIGH] or TRACE:prompt, where not as in --lengths."""
    output_lengths: str | None = None
    """Likewise."""
    requests: int | None = None
    """How many. Default: 2000, or five for each user where that is more."""
    prefixes: int = 0
    """Every prompt begins with one of so many common texts."""
    prefix_tokens: int = 512
    """Tokens of each of them."""
    think: float = 0.0
    """Seconds a user waits before asking again."""
    max_tokens: int | None = None
    """The limit requests state, where that is more than their answers have."""
    seed: int = 101
    """Of lengths and arrivals. The same seed gives the same figures, to the last bit."""


DEFAULT_REQUESTS = 2000
_RANGE_POINTS = 6


def assemble(
    options: MachineOptions, api_key: str | None = None, save: Path | None = None
) -> tuple[list[Plant], str]:
    """Every combination of machines that is asked for, and one line on where their speed is from.

    What was learned of a real machine is kept in the file ``save``.

    Raises
    ------
    ValueError
        Always a subclass, with a sentence that says what to change.
    """
    given = [o for o in (options.source, options.hardware, options.cost) if o]
    if len(given) != 1:
        raise OptionsError("Say what to simulate: one of --from, --hardware or --cost.")
    if save is not None and not options.source:
        raise OptionsError("--save-calibration needs --from: there is nothing else to learn from.")
    if options.hardware:
        setup, about = _estimated(options)
    elif options.cost:
        setup, about = _stated(options)
    else:
        known = _calibration(options, api_key)
        if save is not None:
            known.write(save)
        setup, about = calibrated(known), known.describe()
    return list(_combinations(_adjusted(setup, options), options)), about


def _calibration(options: MachineOptions, api_key: str | None) -> Calibration:
    source = options.source or ""
    if source.startswith(("http://", "https://")):
        return ask_server(source, api_key)
    path = Path(source)
    if not is_result(path):
        return read_calibration(path)
    if options.num_pages is None:
        raise CalibrationError(
            "A result of bench does not tell the pool: give --num-pages, and --max-num-seqs and "
            "--max-num-batched-tokens where they are not 128 and 768."
        )
    engine = {name: getattr(options, name) for name in ENGINE_SETTINGS if hasattr(options, name)}
    engine |= {
        "page_size": (options.page_size or [16])[0],
        "admission": (options.admission or ["expected"])[0],
        "scheduling_policy": (options.scheduling_policy or ["fair"])[0],
        "enable_prefix_caching": options.prefix_caching,
    }
    known, off = fit_result(read_result(path), engine, f"{path.name}")
    return replace(known, source=f"{path.name}, whose figures it meets within {off:.0%}")


def _estimated(options: MachineOptions) -> tuple[Setup, str]:
    assert options.hardware is not None
    hardware = choose_hardware(options.hardware, options.devices)
    roofline = Roofline(hardware, _shape(options.model))
    page_size = options.page_size[0] if options.page_size else 16
    setup = Setup(
        timing=roofline,
        num_pages=roofline.num_pages(page_size),
        page_size=page_size,
        scheduler=SchedulerConfig(
            max_num_seqs=256,
            max_num_batched_tokens=2048,
            max_model_len=min(8192, roofline.model.max_len),
        ),
        front=Front(per_request=2e-4, delivery=2e-3),
    )
    return setup, (
        f"ESTIMATE by roofline, nothing was measured: {roofline.model.name} on {hardware.name} "
        f"({hardware.source})"
    )


def _shape(model: str) -> ModelShape:
    path = Path(model)
    if path.exists():
        from turnstile.models.source import resolve

        source = resolve(model)
        return ModelShape.of(source.config, source.name)
    return choose_model(model)


def _stated(options: MachineOptions) -> tuple[Setup, str]:
    assert options.cost is not None
    try:
        alpha, beta, gamma, delta = (float(part) for part in options.cost.split(","))
    except ValueError:
        raise OptionsError(f"--cost {options.cost!r}: write four numbers a,b,c,d.") from None
    if options.num_pages is None:
        raise CalibrationError("--cost needs --num-pages: there is no server or memory to ask.")
    setup = Setup(
        timing=LinearTiming(finite(Coefficients(alpha, beta, gamma, delta))),
        num_pages=options.num_pages,
        page_size=options.page_size[0] if options.page_size else 16,
        scheduler=SchedulerConfig(max_num_seqs=128, max_num_batched_tokens=768),
    )
    return setup, "with the cost of steps as stated"


def _adjusted(setup: Setup, options: MachineOptions) -> Setup:
    """With what the flags say."""
    slots = options.max_num_seqs or setup.scheduler.max_num_seqs
    budget = options.max_num_batched_tokens
    scheduler = replace(
        setup.scheduler,
        max_num_seqs=slots,
        max_num_batched_tokens=budget or max(setup.scheduler.max_num_batched_tokens, slots),
        max_model_len=options.max_model_len or setup.scheduler.max_model_len,
        target_itl=options.target_itl or setup.scheduler.target_itl,
    )
    return replace(
        setup,
        num_pages=options.num_pages or setup.num_pages,
        prefix_caching=setup.prefix_caching and options.prefix_caching,
        scheduler=scheduler,
        max_num_queued_reqs=_given(options.max_num_queued_reqs, setup.max_num_queued_reqs),
        max_queue_wait=_given(options.max_queue_wait, setup.max_queue_wait) or None,
    )


def _given(option: T | None, known: T | None) -> T | None:
    return known if option is None else option


def _combinations(setup: Setup, options: MachineOptions) -> Iterator[Plant]:
    tokens = setup.num_pages * setup.page_size
    for size, admission, policy, replicas, router in product(
        options.page_size or [setup.page_size],
        options.admission or [setup.admission],
        options.scheduling_policy or [setup.policy],
        options.replicas or [1],
        options.router or ["round-robin"],
    ):
        if size < 1:
            raise OptionsError(f"--page-size must be at least 1, not {size}.")
        machine = replace(
            setup,
            page_size=size,
            num_pages=max(1, tokens // size),
            admission=admission,
            policy=policy,
            preemption=options.preemption or setup.preemption,
        )
        yield Plant(machine, replicas, router)


@dataclass(frozen=True, slots=True)
class Loads:
    """Makes the loads that are asked for."""

    options: LoadOptions
    max_len: int

    def make(self, least: int = 0, draw: int = 0) -> Load:
        """The requests, at least so many where their number is not given; drawn for the first
        time, or anew for ``draw`` 1, 2, ….
        """
        options, seed = self.options, self.options.seed + draw
        if options.trace is not None:
            load = read_trace(options.trace, options.requests)
        elif options.workload is not None:
            load = from_workload(self._workload(least), seed)
        else:
            prompt, output = self._lengths()
            count = options.requests or max(DEFAULT_REQUESTS, least)
            load = drawn(
                options.lengths, count, prompt, output, seed,
                prefixes=options.prefixes, prefix_tokens=options.prefix_tokens,
                max_len=self.max_len,
            )  # fmt: skip
        return replace(load, max_tokens=options.max_tokens, think=options.think)

    def points(self) -> Iterator[tuple[str, Load]]:
        """Every load to simulate, with its name."""
        options = self.options
        for users in parse_users(options.users):
            yield f"{users} users", self.make(5 * users).with_users(users)
        for rate in options.rate:
            yield f"{rate:g}/s", self.make().with_rate(rate, options.seed)
        if not options.users and not options.rate:
            load = self.make()
            if load.due is None and load.users == 1 and options.workload is None:
                raise OptionsError("Say how much is asked: one of --users, --rate or --trace.")
            yield ("as recorded" if options.trace else load.name), load

    def _workload(self, least: int) -> Workload:
        name = self.options.workload or ""
        if name not in WORKLOADS:
            raise OptionsError(f"There is no workload {name!r}; known are {', '.join(WORKLOADS)}.")
        chosen = WORKLOADS[name]
        return replace(chosen, requests=self.options.requests or max(chosen.requests, least))

    def _lengths(self) -> tuple[LengthDistribution, LengthDistribution]:
        options = self.options
        if options.lengths not in trace_names():
            raise OptionsError(
                f"There are no lengths {options.lengths!r}; known are {', '.join(trace_names())}."
            )
        prompt, output = trace_lengths(options.lengths)
        return (
            parse_lengths(options.prompt_lengths) if options.prompt_lengths else prompt,
            parse_lengths(options.output_lengths) if options.output_lengths else output,
        )


def parse_users(words: list[str]) -> list[int]:
    """Numbers of users; a range such as 100-2000 (or 100…2000) becomes six, evenly by ratio."""
    users: list[int] = []
    for word in words:
        low, _, high = word.replace("…", "-").partition("-")
        try:
            first, last = int(low), int(high or low)
        except ValueError:
            raise OptionsError(
                f"--users {word!r}: write a number, or a range as 100-2000."
            ) from None
        if not 1 <= first <= last:
            raise OptionsError(f"--users {word!r}: at least 1, and ranges rise.")
        points = _RANGE_POINTS if last > first else 1
        ratio = (last / first) ** (1 / max(1, points - 1))
        users += [round(first * ratio**i) for i in range(points)]
    return list(dict.fromkeys(users))
