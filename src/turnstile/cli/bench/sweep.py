"""``turnstile bench sweep``."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from turnstile.cli.bench.options import Measuring, Reporting, Target, UsageError
from turnstile.cli.bench.running import EXIT_FAILURES, publish, run, tell
from turnstile.cli.bench.work import Work


def sweep(
    *,
    request_rate: Annotated[list[float] | None, Parameter(consume_multiple=True)] = None,
    max_concurrency: Annotated[list[int] | None, Parameter(consume_multiple=True)] = None,
    target: Annotated[Target, Parameter(name="*", group="Server")] | None = None,
    work: Annotated[Work, Parameter(name="*", group="Work")] | None = None,
    measuring: Annotated[Measuring, Parameter(name="*", group="Measuring")] | None = None,
    saving: Annotated[Reporting, Parameter(name="*", group="Result")] | None = None,
) -> int:
    """Send the same work at one load after another and print a line for each.

    With --goodput the last load before the first that breaks the limits is named: the capacity.

    Parameters
    ----------
    request_rate
        Rates of open loops to try, in requests per second.
    max_concurrency
        Or numbers of users of closed loops to try.
    """
    from turnstile.bench.plots import check, plot_sweep
    from turnstile.bench.sweep import sweep as measure_all
    from turnstile.bench.sweep import sweep_table
    from turnstile.bench.workloads import load

    if (request_rate is None) == (max_concurrency is None):
        raise UsageError("give the loads to try, either --request-rate or --max-concurrency")
    target, saving = target or Target(), saving or Reporting()
    base = (work or Work()).chosen("W1")
    points = [(f"{rate:g}/s", load(base, rate=rate)) for rate in request_rate or ()]
    points += [(_users(users), load(base, users=users)) for users in max_concurrency or ()]
    saving.check()
    if saving.plot is not None:
        check(saving.plot)
    settings = (measuring or Measuring()).settings(target)
    result = run(measure_all(target.server(), target.model, points, settings, tell))
    publish(result, saving, "sweep", plot_sweep)
    print(sweep_table(result))
    return 0 if all(p["median"]["completed"] for p in result["points"]) else EXIT_FAILURES


def _users(number: int) -> str:
    return "1 user" if number == 1 else f"{number} users"
