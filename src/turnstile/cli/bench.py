"""``turnstile bench``: measure a running server, compare two measurements."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter

from turnstile.cli.client import DEFAULT_URL

EXIT_FAILURES = 1

app = App(
    name="bench",
    help="Measure a running server.\n\n"
    "Works with any server that streams /v1/completions and has /tokenize (Turnstile, vLLM, "
    "llama-server). Workloads: W1 100 users; W2 256 requests at once; W3 100 users behind a common "
    "prefix; W4 one user; W5 Poisson arrivals.",
)


@app.command
def serve(
    *,
    workload: str = "W1",
    url: Annotated[str, Parameter(name=["--url", "--base-url"])] = DEFAULT_URL,
    model: str | None = None,
    repeat: int = 1,
    num_prompts: int | None = None,
    max_concurrency: int | None = None,
    request_rate: float | None = None,
    burstiness: float | None = None,
    prompt_lengths: str | None = None,
    output_lengths: str | None = None,
    warmup: int = 2,
    time_limit: float | None = None,
    seed: int | None = None,
    text_seed: int | None = None,
    server_pid: int | None = None,
    goodput: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    api_key: str | None = None,
    output: Path | None = None,
) -> int:
    """Send a workload to a server and print what came of it.

    Exits with 1 if any request failed.

    Parameters
    ----------
    workload
        W1 to W5. A workload changed by other flags is marked with a star in the table.
    url
        Where the server listens, with or without /v1.
    model
        The model's name; the first one the server lists otherwise.
    repeat
        Repetitions with the same lengths and fresh text; the table shows medians.
    num_prompts
        Number of requests, where it is not to be the workload's.
    max_concurrency
        Users of a closed loop, where they are not to be the workload's.
    request_rate
        Arrivals per second of an open loop (Poisson).
    burstiness
        Shape of the gamma-distributed gaps of an open loop: 1 is Poisson, less comes in bursts.
    prompt_lengths
        128, 16-64, lognormal:MEDIAN:SIGMA[:LOW:HIGH], or a trace such as azure_conv_2023:prompt.
    output_lengths
        Likewise.
    warmup
        Requests before the measurement, not counted.
    time_limit
        Seconds after which a repetition is cut off; what runs then counts as incomplete.
    seed
        Seed of lengths and arrivals; the default gives the standard workloads.
    text_seed
        Seed of the text. Without it every run has fresh text, so that no prefix cache helps.
    server_pid
        First process of the server: CPU time and memory of it and its children are reported.
    goodput
        Limits such as ttft:500 tpot:100 e2el:10000, in milliseconds; requests that meet all are
        counted, and refused ones are misses.
    api_key
        Sent as a bearer token; TURNSTILE_API_KEY otherwise.
    output
        JSON file to write; bench-WORKLOAD-TIME.json otherwise.
    """
    from turnstile.bench.http import Server
    from turnstile.bench.lengths import parse_lengths
    from turnstile.bench.metrics import parse_limits
    from turnstile.bench.session import FORMAT, LENGTH_SEED, ServerError, Settings, bench
    from turnstile.bench.workloads import choose

    chosen = choose(
        workload,
        requests=num_prompts,
        users=max_concurrency,
        rate=request_rate,
        burstiness=burstiness,
        prompt=parse_lengths(prompt_lengths) if prompt_lengths else None,
        output=parse_lengths(output_lengths) if output_lengths else None,
    )
    settings = Settings(
        repeat=repeat,
        warmup=warmup,
        length_seed=LENGTH_SEED if seed is None else seed,
        text_seed=time.time_ns() if text_seed is None else text_seed,
        time_limit=time_limit,
        server_pid=server_pid,
        limits=parse_limits(goodput) if goodput else None,
    )
    name = chosen.name.rstrip("*")
    path = output or Path(time.strftime(f"bench-{name}-%Y%m%d-%H%M%S.json"))
    try:
        result = _run(bench(Server.parse(url, _key(api_key)), model, chosen, settings, _tell))
    except ServerError as error:
        _write(path, {"format": FORMAT, "workload": asdict(chosen), "error": str(error)})
        raise
    return _finish(result, path)


@app.command
def sweep(
    *,
    request_rate: Annotated[list[float] | None, Parameter(consume_multiple=True)] = None,
    max_concurrency: Annotated[list[int] | None, Parameter(consume_multiple=True)] = None,
    workload: str = "W1",
    url: Annotated[str, Parameter(name=["--url", "--base-url"])] = DEFAULT_URL,
    model: str | None = None,
    num_prompts: int | None = None,
    time_limit: float | None = None,
    goodput: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    api_key: str | None = None,
    output: Path | None = None,
) -> int:
    """Send the same work at one load after another and print a line for each.

    With --goodput the last load before the first that breaks the limits is named: the capacity.

    Parameters
    ----------
    request_rate
        Rates of open loops to try, in requests per second.
    max_concurrency
        Or numbers of users of closed loops to try.
    workload
        Whose lengths to use, W1 to W5.
    url
        Where the server listens, with or without /v1.
    model
        The model's name; the first one the server lists otherwise.
    num_prompts
        Requests at each load, where they are not to be the workload's.
    time_limit
        Seconds after which a load is cut off; what runs then counts as incomplete.
    goodput
        Limits such as ttft:500 tpot:100, in milliseconds.
    api_key
        Sent as a bearer token; TURNSTILE_API_KEY otherwise.
    output
        JSON file to write; bench-sweep-TIME.json otherwise.
    """
    from turnstile.bench.http import Server
    from turnstile.bench.metrics import parse_limits
    from turnstile.bench.session import Settings
    from turnstile.bench.sweep import sweep as measure_all
    from turnstile.bench.sweep import sweep_table
    from turnstile.bench.workloads import choose

    if (request_rate is None) == (max_concurrency is None):
        raise ValueError("give the loads to try, either --request-rate or --max-concurrency")
    points = [
        (f"{rate:g}/s", choose(workload, requests=num_prompts, rate=rate))
        for rate in request_rate or ()
    ]
    points += [
        (f"{users} users", choose(workload, requests=num_prompts, users=users))
        for users in max_concurrency or ()
    ]
    settings = Settings(
        text_seed=time.time_ns(),
        time_limit=time_limit,
        limits=parse_limits(goodput) if goodput else None,
    )
    server = Server.parse(url, _key(api_key))
    result = _run(measure_all(server, model, points, settings, _tell))
    _write(output or Path(time.strftime("bench-sweep-%Y%m%d-%H%M%S.json")), result)
    print(sweep_table(result))
    return 0 if all(p["median"]["completed"] for p in result["points"]) else EXIT_FAILURES


@app.command
def compare(first: Path, second: Path, /) -> int:
    """Show two results side by side, with the ratio of the second to the first.

    Parameters
    ----------
    first
        JSON file of `bench serve`.
    second
        Another one, of the same workload.
    """
    from turnstile.bench.report import compare as side_by_side

    print(f"A = {first}\nB = {second}")
    print(side_by_side(_load(first), _load(second)))
    return 0


def _key(given: str | None) -> str | None:
    return given or next(iter(os.environ.get("TURNSTILE_API_KEY", "").split()), None)


def _load(path: Path) -> dict[str, Any]:
    from turnstile.bench.session import FORMAT

    try:
        result: Any = msgspec.json.decode(path.read_bytes())
    except msgspec.DecodeError:
        result = None
    if not isinstance(result, dict) or result.get("format") != FORMAT:
        raise ValueError(f"{path} is not a result of turnstile bench serve")
    if "error" in result:
        raise ValueError(f"{path} holds no figures: {result['error']}")
    return result


def _run(measurement: Any) -> dict[str, Any]:
    """Run it on uvloop where there is one, which costs the generator half the CPU time."""
    import asyncio
    from importlib import import_module
    from importlib.util import find_spec

    loops: Any = import_module("uvloop") if find_spec("uvloop") else asyncio
    with asyncio.Runner(loop_factory=loops.new_event_loop) as runner:
        result: dict[str, Any] = runner.run(measurement)
    return result


def _finish(result: dict[str, Any], path: Path) -> int:
    from turnstile.bench.report import table

    _write(path, result)
    print(table(result))
    lost = any(r["failed"] or not r["completed"] for r in result["repetitions"])
    return EXIT_FAILURES if lost else 0


def _write(path: Path, result: dict[str, Any]) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1))
    _tell(f"written: {path}")


def _tell(text: str) -> None:
    print(text, file=sys.stderr)
