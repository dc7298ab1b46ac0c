"""``turnstile bench serve``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from cyclopts import Parameter

from turnstile.cli.bench.options import Load, Measuring, Reporting, Target
from turnstile.cli.bench.running import EXIT_FAILURES, publish, run, tell, write
from turnstile.cli.bench.work import Work


def serve(
    *,
    target: Annotated[Target, Parameter(name="*", group="Server")] | None = None,
    work: Annotated[Work, Parameter(name="*", group="Work")] | None = None,
    load: Annotated[Load, Parameter(name="*", group="Load")] | None = None,
    measuring: Annotated[Measuring, Parameter(name="*", group="Measuring")] | None = None,
    saving: Annotated[Reporting, Parameter(name="*", group="Result")] | None = None,
) -> int:
    """Send a workload to a server and print what came of it.

    Exits with 1 if any request failed.
    """
    from turnstile.bench.plots import check, plot
    from turnstile.bench.report import table
    from turnstile.bench.session import FORMAT, ServerError, bench

    target, saving = target or Target(), saving or Reporting()
    chosen = (load or Load()).applied_to((work or Work()).chosen("W1"))
    settings = (measuring or Measuring()).settings(target)
    what = chosen.name.rstrip("*")
    saving.check()
    if saving.plot is not None:
        check(saving.plot)
    try:
        result = run(bench(target.server(), target.model, chosen, settings, tell))
    except ServerError as error:
        write(
            saving.path(what), {"format": FORMAT, "workload": asdict(chosen), "error": str(error)}
        )
        raise
    publish(result, saving, what, plot)
    print(table(result))
    lost = any(r["failed"] or not r["completed"] for r in result["repetitions"])
    return EXIT_FAILURES if lost else 0
