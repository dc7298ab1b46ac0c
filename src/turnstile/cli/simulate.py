"""``turnstile simulate``: the scheduler that serves, on virtual time."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from cyclopts import App, Parameter

from turnstile.simulate.options import LoadOptions, MachineOptions

if TYPE_CHECKING:
    from turnstile.simulate.figures import Limits
    from turnstile.simulate.load import Load
    from turnstile.simulate.options import Loads
    from turnstile.simulate.report import Point
    from turnstile.simulate.run import Plant

FORMAT = "turnstile-simulation-1"

app = App(
    name="simulate",
    help="Run the scheduler that serves on virtual time: how many users does this machine hold, "
    "and with which policy?\n\n"
    "The machine's speed comes from a running server (--from http://127.0.0.1:8000, after some "
    "work), from a calibration file, or from a data sheet (--hardware h100 --model 8b: an "
    "estimate).",
    default_parameter=Parameter(consume_multiple=True, negative_iterable=()),
)


@app.default
def simulate(
    *,
    machine: Annotated[MachineOptions, Parameter(name="*", group="Machine")] | None = None,
    load: Annotated[LoadOptions, Parameter(name="*", group="Load")] | None = None,
    goodput: list[str] | None = None,
    share: float = 0.99,
    capacity: Literal["users", "rate"] | None = None,
    tries: int = 3,
    price: float | None = None,
    api_key: str | None = None,
    save_calibration: Path | None = None,
    output: Path | None = None,
) -> int:
    """Simulate every combination of load and machine that is asked for.

    Parameters
    ----------
    goodput
        Limits such as ttft:500 tpot:50, in milliseconds (ttft, tpot, e2el, norm).
    share
        Share of the requests that must keep all limits.
    capacity
        Find the most users, or the highest rate, that keep the limits.
    tries
        Draws of lengths and arrivals that --capacity tries each load with: their median counts.
    price
        Price of a machine for an hour, in any currency, for the cost of a million output tokens.
    api_key
        Key of the server of --from; TURNSTILE_API_KEY otherwise.
    save_calibration
        File to keep what was learned from --from, for later simulations without it.
    output
        JSON file to write.
    """
    from turnstile.bench.metrics import parse_limits
    from turnstile.simulate.figures import Limits
    from turnstile.simulate.options import Loads, OptionsError, assemble
    from turnstile.simulate.report import beyond_measured, table

    machine, load = machine or MachineOptions(), load or LoadOptions()
    key = api_key or next(iter(os.environ.get("TURNSTILE_API_KEY", "").split()), None)
    plants, about = assemble(machine, key, save_calibration)
    print(about)
    limits = Limits(parse_limits(goodput), share) if goodput else None
    loads = Loads(load, plants[0].setup.scheduler.max_model_len)
    if capacity is None:
        points = _points(plants, loads, limits, price)
    elif limits is None:
        raise OptionsError("--capacity needs --goodput: the limits to keep.")
    else:
        points = _capacities(capacity, plants, loads, limits, tries, price)
    print(table(points))
    warning = beyond_measured(points, plants[0].setup.measured_batch)
    if warning is not None:
        _tell(warning)
    if output is not None:
        _write(output, about, load.seed, points)
    return 0


def _points(
    plants: list[Plant], loads: Loads, limits: Limits | None, price: float | None
) -> list[Point]:
    """Every load on every machine."""
    from turnstile.simulate.report import point
    from turnstile.simulate.run import simulate as run

    points = []
    for name, requests in loads.points():
        for plant in plants:
            _tell(f"{name}: {len(requests)} requests")
            figures = run(plant, requests, limits, _progress)
            points.append(point(name, plant, figures, price))
    return points


def _capacities(
    kind: str, plants: list[Plant], loads: Loads, limits: Limits, tries: int, price: float | None
) -> list[Point]:
    """The most that each machine holds, each load judged by the median of so many tries."""
    from turnstile.simulate.capacity import highest_rate, most_users
    from turnstile.simulate.report import describe_capacity, point

    def of_users(users: float, draw: int) -> Load:
        return loads.make(5 * int(users), draw).with_users(int(users))

    def of_rate(rate: float, draw: int) -> Load:
        return loads.make(draw=draw).with_rate(rate, loads.options.seed + draw)

    points = []
    for plant in plants:
        if kind == "users":
            found = most_users(plant, of_users, limits, tries=tries)
        else:
            found = highest_rate(plant, of_rate, limits, tries=tries)
        print(describe_capacity(kind if kind == "users" else "requests/s", found, limits))
        if found.figures is not None:
            name = f"{found.value:.0f} users" if kind == "users" else f"{found.value:.3g}/s"
            points.append(point(name, plant, found.figures, price) | {"tried": found.tried})
    return points


def _write(output: Path, about: str, seed: int, points: list[Point]) -> None:
    """All figures, as JSON."""
    content = {
        "format": FORMAT,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": about,
        "seed": seed,
        "points": points,
    }
    output.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1))
    _tell(f"written: {output}")


def _progress(arrivals: int) -> None:
    """Said where somebody waits for long: every hundred thousand arrivals."""
    if arrivals % 100_000 == 0:
        _tell(f"{arrivals} requests have arrived")


def _tell(text: str) -> None:
    print(text, file=sys.stderr)
