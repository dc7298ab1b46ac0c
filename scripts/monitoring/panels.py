"""What the dashboard shows, row by row."""

from __future__ import annotations

from dataclasses import dataclass, field

from monitoring.queries import BY_NAME, HERE, WINDOW, mean, now, per, quantile, total


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A picture: its lines are (expression, legend)."""

    title: str
    text: str
    lines: list[tuple[str, str]]
    unit: str = "short"
    kind: str = "timeseries"
    stack: bool = False
    most: float | None = None
    thresholds: list[tuple[float | None, str]] = field(default_factory=list)


def latency(title: str, name: str, text: str) -> Panel:
    """Quantiles of a histogram of seconds."""
    lines = [(quantile(name, q), label) for q, label in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))]
    return Panel(title=title, text=text, lines=[*lines, (mean(name), "mean")], unit="s")


def heat(title: str, name: str, text: str) -> Panel:
    """How a histogram's values are spread over time."""
    family = BY_NAME[name].family
    expression = f"sum by (le) (increase({family}_bucket{HERE}[{WINDOW}]))"
    return Panel(title=title, text=text, lines=[(expression, "{{le}}")], kind="heatmap")


def at_a_glance() -> list[Panel]:
    """What somebody who passes by should see."""
    return [
        Panel(
            title="Ready", kind="stat", text="1 while the engine takes work.",
            lines=[(now("engine_state", '{instance=~"$instance", state="ready"}'), "ready")],
            thresholds=[(None, "red"), (1, "green")],
        ),
        Panel(
            title="Busy", kind="stat", unit="percentunit", most=1,
            text="Share of the last minute spent inside steps: what the machine is paid for.",
            lines=[(now("step_busy_ratio"), "busy")],
        ),
        Panel(
            title="KV cache in use", kind="stat", unit="percentunit", most=1,
            text="Held pages over all pages. Cached pages do not count: they can be taken.",
            lines=[(now("kv_usage_ratio"), "held")],
            thresholds=[(None, "green"), (0.85, "orange"), (0.97, "red")],
        ),
        Panel(
            title="Engine restarts", kind="stat", text="Engines that replaced a dead one.",
            lines=[(f"increase({BY_NAME['engine_restarts'].family}{HERE}[1h])", "last hour")],
            thresholds=[(None, "green"), (1, "orange"), (3, "red")],
        ),
    ]  # fmt: skip


def what_clients_feel() -> list[Panel]:
    """Latencies, and how requests end."""
    return [
        latency("Time to first token", "ttft_seconds", "Arrival to first token."),
        latency("Inter-token latency", "itl_seconds", "Gaps between tokens of a sample."),
        latency("Time per output token", "tpot_seconds", "Mean gap of each request."),
        latency("End to end", "e2e_seconds", "Arrival to last token."),
        latency("Queue time", "queue_seconds", "Arrival to a slot."),
        Panel(
            title="How requests end", stack=True, unit="reqps",
            text="`refused`: by the gate or as wrong. `abort`: the client left.",
            lines=[(f"sum by (outcome) ({total('requests')})", "{{outcome}}")],
        ),
    ]  # fmt: skip


def load() -> list[Panel]:
    """What is asked of the server, and what waits."""
    return [
        Panel(
            title="Token throughput", unit="short", text="Tokens a second.",
            lines=[
                (f"sum({total('prompt_tokens')})", "prompt"),
                (f"sum({total('cached_prompt_tokens')})", "prompt, from the cache"),
                (f"sum({total('generated_tokens')})", "generated"),
            ],
        ),
        Panel(
            title="Scheduler state", text="Sequences with and without a slot.",
            lines=[(now("requests_running"), "running"), (now("requests_waiting"), "waiting")],
        ),
        Panel(
            title="Why they wait", stack=True,
            text="`/v1/requests` says it of each request.",
            lines=[(now("waiting_by_reason"), "{{reason}}")],
        ),
        Panel(
            title="Refusals", stack=True, unit="reqps", text="By the bound that was met.",
            lines=[(f"sum by (reason) ({total('rejections')})", "{{reason}}")],
        ),
        Panel(
            title="Where the time of requests goes", stack=True, unit="s",
            text="Seconds of ended requests a second, by what they were spent on.",
            lines=[(f"sum by (part) ({total('request_part_seconds')})", "{{part}}")],
        ),
        Panel(
            title="Prefill and decode time", unit="s", text="Means.",
            lines=[(mean("prefill_seconds"), "prefill"), (mean("decode_seconds"), "decode")],
        ),
        heat("Prompt lengths", "request_prompt_tokens", "Tokens."),
        heat("Output lengths", "request_output_tokens", "Tokens."),
        heat("Longest sample", "request_largest_output_tokens", "Tokens, of each request."),
    ]  # fmt: skip


def the_gate() -> list[Panel]:
    """What was promised at the door, and what came."""
    return [
        Panel(
            title="Predicted and actual wait", unit="s",
            text="Means over those let in. Where the lines part the gate refuses wrongly.",
            lines=[
                (per(f"gate_{kind}_seconds", "gate_predictions", "wait"), kind)
                for kind in ("predicted", "actual")
            ],
        ),
        Panel(
            title="Predicted and actual TTFT", unit="s", text="The same to the first token.",
            lines=[
                (per(f"gate_{kind}_seconds", "gate_predictions", "ttft"), kind)
                for kind in ("predicted", "actual")
            ],
        ),
        Panel(
            title="Coverage of the predicted p90", unit="percentunit", most=1,
            text="Share of the actual values within the predicted 90th percentile.",
            lines=[
                (per("gate_covered_predictions", "gate_predictions", quantity), quantity)
                for quantity in ("wait", "ttft")
            ],
            thresholds=[(None, "red"), (0.8, "green")],
        ),
    ]  # fmt: skip


def memory() -> list[Panel]:
    """Pages, and what they save or cost."""
    return [
        Panel(
            title="Pages", stack=True, text="Of the KV pool, by state.",
            lines=[(now("pages"), "{{state}}")],
        ),
        Panel(
            title="Waste and headroom",
            text="Unused room in held pages, and steps until the pool is full if nobody ends.",
            lines=[
                (now("unused_token_slots"), "unused token slots"),
                (now("headroom_steps"), "headroom, steps"),
            ],
        ),
        Panel(
            title="Preemption", text="A second.",
            lines=[
                (f"sum({total('preemptions')})", "preemptions"),
                (f"sum({total('recomputed_tokens')})", "tokens to recompute"),
                (f"sum({total('evictions')})", "cached pages evicted"),
            ],
        ),
        Panel(
            title="Prefix cache hit rate", unit="percentunit", most=1,
            text="Tokens found over tokens looked up.",
            lines=[
                (f"sum({total('prefix_hit_tokens')}) / sum({total('prefix_query_tokens')})",
                 "hits"),
            ],
        ),
    ]  # fmt: skip


def the_engine() -> list[Panel]:
    """Steps: how many, how long, what failed."""
    return [
        Panel(
            title="Busy share", unit="percentunit", most=1, text="Time inside steps.",
            lines=[
                (f"sum({total('step_busy_seconds')})", "now"),
                (now("step_busy_ratio"), "last minute"),
            ],
        ),
        heat("Tokens a step", "step_tokens", "Tokens of a forward pass."),
        Panel(
            title="Step time", unit="s", text="Mean seconds of a forward pass.",
            lines=[(f"sum({total('step_busy_seconds')}) / sum({total('steps')})", "mean")],
        ),
        Panel(
            title="Fitted cost of a step", unit="s",
            text="What the gate predicts with: per step, token, query-key pair, sequence.",
            lines=[(now("step_cost_seconds"), "{{per}}")],
        ),
        Panel(
            title="Faults", text="A second.",
            lines=[
                (f"sum({total('bad_rows')})", "rows that failed"),
                (f"sum({total('pool_repairs')})", "repairs of the page pool"),
                (f"sum({total('recovered_requests')})", "requests that outlived an engine"),
            ],
        ),
        Panel(
            title="Memory of the processes", unit="bytes", text="Resident.",
            lines=[
                (now("engine_resident_bytes"), "engine"),
                (f"process_resident_memory_bytes{HERE}", "API"),
            ],
        ),
    ]  # fmt: skip


def tenants() -> list[Panel]:
    """Who gets what."""
    return [
        Panel(
            title="Tokens given", stack=True, text="A second, by tenant.",
            lines=[(f"sum by (tenant) ({total('tenant_generated_tokens')})", "{{tenant}}")],
        ),
        Panel(
            title="Prompt tokens", stack=True, text="A second, by tenant.",
            lines=[(f"sum by (tenant) ({total('tenant_prompt_tokens')})", "{{tenant}}")],
        ),
        Panel(
            title="Mean wait for a slot", unit="s", text="Of requests that ended, by tenant.",
            lines=[
                (
                    f"sum by (tenant) ({total('tenant_queue_seconds')})"
                    f" / sum by (tenant) ({total('tenant_requests')})",
                    "{{tenant}}",
                )
            ],
        ),
        Panel(
            title="Requests", stack=True, unit="reqps", text="Let in, by tenant.",
            lines=[(f"sum by (tenant) ({total('tenant_requests')})", "{{tenant}}")],
        ),
    ]  # fmt: skip


ROWS: dict[str, list[Panel]] = {
    "At a glance": at_a_glance(),
    "What clients feel": what_clients_feel(),
    "Load": load(),
    "The gate": the_gate(),
    "Memory": memory(),
    "The engine": the_engine(),
    "Tenants": tenants(),
}
"""By title, in the order of the dashboard."""
