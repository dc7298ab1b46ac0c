"""``turnstile bench suite``."""

from __future__ import annotations

import contextlib
import shlex
import time
from dataclasses import replace
from typing import Annotated

from cyclopts import Parameter

from turnstile.cli.bench.options import Saving
from turnstile.cli.bench.running import EXIT_FAILURES, run, tell, without_details, write

REPEAT = 3


def suite(
    *,
    url: Annotated[str | None, Parameter(name=["--url", "--base-url"])] = None,
    server_pid: int | None = None,
    serve: Annotated[str, Parameter(allow_leading_hyphen=True)] = "",
    workload: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    num_prompts: int | None = None,
    request_rate: float | None = None,
    repeat: int | None = None,
    saving: Annotated[Saving, Parameter(name="*", group="Result")] | None = None,
) -> int:
    """Measure W1 to W5, and how far each is from what the machine does at best.

    Starts a server for it, on a free port, and stops it afterwards; with --url one that runs is
    measured. Exits with 1 if any request failed.

    Parameters
    ----------
    url
        Where a server listens that runs already.
    server_pid
        Its first process, to report CPU time and memory.
    serve
        Flags for the server that is started, such as "--dtype bfloat16".
    workload
        Which of them; all otherwise.
    num_prompts
        Requests of each, where not the workload's.
    request_rate
        Arrivals per second of W5.
    repeat
        Repetitions of each, with the same lengths and fresh text; the table shows medians.
        Without it 3, but 1 of W5: a hundred seconds long, however fast the server is.
    """
    from turnstile.bench.http import Server
    from turnstile.bench.serving import started
    from turnstile.bench.session import Settings
    from turnstile.bench.suite import suite as measure_all
    from turnstile.bench.suite import suite_table
    from turnstile.bench.workloads import WORKLOADS, choose

    saving = saving or Saving()
    saving.check()
    chosen = [
        choose(name, requests=num_prompts, rate=request_rate if name == "W5" else None)
        for name in workload or WORKLOADS
    ]
    repeats = [repeat if repeat is not None else REPEAT if w.rate is None else 1 for w in chosen]
    settings = Settings(repeat=min(repeats), text_seed=time.time_ns())
    with contextlib.ExitStack() as stack:
        if url is not None:
            server = Server.parse(url)
        else:
            server, server_pid = stack.enter_context(started(shlex.split(serve)))
        settings = replace(settings, server_pid=server_pid)
        result = run(measure_all(server, None, chosen, settings, tell, repeats))
    write(saving.path("suite"), without_details(result))
    print(suite_table(result))
    lost = any(r["failed"] for w in result["workloads"] for r in w["repetitions"])
    return EXIT_FAILURES if lost else 0
