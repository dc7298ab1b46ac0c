"""``turnstile bench``: measure a server or the engine alone, and compare measurements.

A module a verb; each is imported when it is used.
"""

from cyclopts import App

app = App(
    name="bench",
    help="Measure a server, or the engine without one.\n\n"
    "`serve` and `sweep` work with every server that speaks OpenAI's API. Workloads: W1 100 users; "
    "W2 256 requests at once; W3 100 users behind a common prefix; W4 one user; W5 Poisson "
    "arrivals.",
)

VERBS = {
    "serve": "Send a workload to a server and print what came of it.",
    "sweep": "Send the same work at one load after another and print a line for each.",
    "suite": "Measure W1 to W5, and how far each is from what the machine does at best.",
    "throughput": "Compute a workload as fast as it goes, in this process, without a server.",
    "latency": "Time one batch after another, in this process, without a server.",
    "compare": "Show two results side by side, with the ratio of the second to the first.",
}

for _verb, _summary in VERBS.items():
    app.command(f"turnstile.cli.bench.{_verb}:{_verb}", name=_verb, help=_summary)
