"""Every metric, as data: :data:`GROUPS`, and :data:`SERIES`, the same in a row.

The exposition, docs/metrics.md, the dashboard and the alert rules are all made from this table.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from turnstile.core.events import WaitReason
from turnstile.engine.client import EngineState
from turnstile.engine.protocol import FittedCost
from turnstile.server.gate import REASONS, Gate
from turnstile.server.watch.ended import Use
from turnstile.server.watch.histogram import Histogram
from turnstile.server.watch.metrics import OUTCOMES, Metrics
from turnstile.server.watch.trails import Part
from turnstile.text.sections import SectionCache

Labelled = Mapping[str, float]
Kind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One metric family.

    Attributes
    ----------
    kind, name, help
        As in Prometheus; the name is without ``turnstile_`` and without ``_total``.
    read
        Its value now: a number, a histogram, or numbers by the value of ``label``.
    label, values
        The label, and what it can say; empty where that is not known before (tenants).
    vllm, vllm_label
        Its name in vLLM, without ``vllm:``; None where vLLM has no such series.
    """

    kind: Kind
    name: str
    help: str
    read: Callable[[Metrics], float | Labelled | Histogram]
    label: str | None = None
    values: tuple[str, ...] = ()
    vllm: str | None = None
    vllm_label: str | None = None

    @property
    def family(self) -> str:
        """The name it is scraped under, up to the suffixes of a histogram."""
        suffix = "_total" if self.kind == "counter" else ""
        return f"turnstile_{self.name}{suffix}"


# -- how values are read ----------------------------------------------------------------------


def _total(counter: str) -> Callable[[Metrics], float]:
    return lambda metrics: metrics.engine_total(counter)


def _now(field: str) -> Callable[[Metrics], float]:
    return lambda metrics: float(getattr(metrics.snapshot, field))


def _histogram(field: str) -> Callable[[Metrics], Histogram]:
    def read(metrics: Metrics) -> Histogram:
        histogram: Histogram = getattr(metrics, field)
        return histogram

    return read


def _of_ended(field: str) -> Callable[[Metrics], Histogram]:
    def read(metrics: Metrics) -> Histogram:
        histogram: Histogram = getattr(metrics.ended, field)
        return histogram

    return read


def _pages(metrics: Metrics) -> Labelled:
    now = metrics.snapshot
    return {"free": now.pages_free, "held": now.pages_held, "cached": now.pages_cached}


def _kv_usage(metrics: Metrics) -> float:
    now = metrics.snapshot
    return now.pages_held / now.pages_total if now.pages_total else 0.0


def _cost(field: str) -> Callable[[Metrics], Labelled]:
    def read(metrics: Metrics) -> Labelled:
        fit: FittedCost = getattr(metrics.snapshot, field)
        decoding = fit.gamma if fit.epsilon is None else fit.epsilon
        shared = decoding if fit.zeta is None else fit.zeta
        values = (fit.alpha, fit.beta, fit.gamma, fit.delta, decoding, shared)
        return dict(zip(_COSTS, values, strict=True))

    return read


def _sections(read: Callable[[SectionCache], float]) -> Callable[[Metrics], float]:
    return lambda metrics: 0.0 if metrics.sections is None else read(metrics.sections)


def _rejections(metrics: Metrics) -> Labelled:
    if metrics.gate is None:
        return dict.fromkeys(REASONS, 0)
    return metrics.gate.rejections


def _gate(read: Callable[[Gate], float]) -> Callable[[Metrics], float]:
    return lambda metrics: 0.0 if metrics.gate is None else read(metrics.gate)


def _calibration(field: str) -> Callable[[Metrics], Labelled]:
    def read(metrics: Metrics) -> Labelled:
        gate = metrics.gate
        if gate is None:
            return dict.fromkeys(_QUANTITIES, 0.0)
        return {"wait": getattr(gate.wait, field), "ttft": getattr(gate.ttft, field)}

    return read


def _reading(field: str) -> Callable[[Metrics], Labelled]:
    def read(metrics: Metrics) -> Labelled:
        return {
            work: float(getattr(metrics.threads[work], field)) if metrics.threads else 0.0
            for work in _WORK
        }

    return read


def _engine_states(metrics: Metrics) -> Labelled:
    return {state.value: float(metrics.engine.state is state) for state in EngineState}


def _successes(metrics: Metrics) -> Labelled:
    return {outcome: metrics.outcomes[outcome] for outcome in OUTCOMES if outcome != "refused"}


def _responses(metrics: Metrics) -> Labelled:
    return {status: metrics.responses[status] for status in _STATUSES}


def _parts(metrics: Metrics) -> Labelled:
    return {str(part): seconds for part, seconds in metrics.ended.part_seconds.items()}


def _by_tenant(use: Use) -> Callable[[Metrics], Labelled]:
    return lambda metrics: metrics.by_tenant(use)


def _engine_memory(metrics: Metrics) -> float:
    """Resident bytes of the engine process; 0 while there is none, or where nobody can say."""
    info = metrics.info
    if info is None or info.pid == os.getpid():
        return 0.0
    try:
        pages = Path(f"/proc/{info.pid}/statm").read_text().split()[1]
    except (OSError, IndexError):
        return 0.0
    return float(int(pages) * os.sysconf("SC_PAGE_SIZE"))


def _tasks() -> float:
    """Tasks of the running event loop; 0 outside of one (in tools that read the table)."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0


_COSTS = ("step", "token", "query_key_pair", "sequence", "decode_read", "shared_read")
_STATUSES = ("2xx", "3xx", "4xx", "5xx")
_STATES = tuple(state.value for state in EngineState)
_REASONS = tuple(reason.value for reason in WaitReason)
_QUANTITIES = ("wait", "ttft")
_WORK = ("text", "grammar")

# -- the table --------------------------------------------------------------------------------

GROUPS: dict[str, tuple[Series, ...]] = {
    "Who is inside": (
        Series(kind="gauge", name="requests_running", help="Sequences in the batch.",
               read=_now("running"), vllm="num_requests_running"),
        Series(kind="gauge", name="requests_waiting", help="Sequences that wait for a slot.",
               read=_now("waiting"), vllm="num_requests_waiting"),
        Series(kind="gauge", name="waiting_by_reason",
               help="Waiting sequences by what they wait for; `queued` was not looked at yet.",
               read=lambda metrics: metrics.waiting_by_reason(), label="reason", values=_REASONS),
        Series(kind="gauge", name="waiting_by_kind",
               help="The same in vLLM's words: for room, or put off by a rule.",
               read=lambda metrics: metrics.waiting_by_kind(), label="reason",
               values=("capacity", "deferred"), vllm="num_requests_waiting_by_reason"),
        Series(kind="gauge", name="waiting_tokens", help="Prompt tokens that wait to be computed.",
               read=_now("waiting_tokens")),
        Series(kind="gauge", name="reading_waiting",
               help="Texts to tokenize, and new grammars to check, that wait for a thread.",
               read=_reading("waiting"), label="work", values=_WORK),
        Series(kind="counter", name="reading_refused",
               help="Those that were refused because too many waited.",
               read=_reading("refused"), label="work", values=_WORK),
        Series(kind="gauge", name="requests_in_flight", help="HTTP requests being answered.",
               read=lambda metrics: metrics.in_flight),
        Series(kind="counter", name="connections_refused",
               help="Connections answered 503 because too many files were open.",
               read=lambda metrics: metrics.files.refused),
        Series(kind="gauge", name="api_tasks",
               help="Tasks of the API process: some for each request, a few beside.",
               read=lambda _: _tasks()),
    ),
    "Memory": (
        Series(kind="gauge", name="pages", help="Pages of the KV pool by state.",
               read=_pages, label="state", values=("free", "held", "cached")),
        Series(kind="gauge", name="kv_usage_ratio", help="Held pages over all pages, 0 to 1.",
               read=_kv_usage, vllm="kv_cache_usage_perc"),
        Series(kind="gauge", name="unused_token_slots",
               help="Waste: room for tokens in held pages that nothing was written to yet.",
               read=_now("unused_tokens")),
        Series(kind="gauge", name="headroom_steps",
               help="Steps that all who run can go on before the pool is full, if none ends.",
               read=lambda metrics: metrics.headroom_steps()),
        Series(kind="counter", name="preemptions", help="Sequences that lost slot and pages.",
               read=_total("preemptions"), vllm="num_preemptions"),
        Series(kind="counter", name="recomputed_tokens",
               help="Computed tokens that were lost to preemptions, to be computed again.",
               read=_total("recomputed_tokens")),
        Series(kind="counter", name="evictions", help="Cached pages given to somebody else.",
               read=_total("evictions")),
        Series(kind="counter", name="prefix_query_tokens",
               help="Tokens looked up in the prefix cache.",
               read=_total("prefix_queries"), vllm="prefix_cache_queries"),
        Series(kind="counter", name="prefix_hit_tokens", help="Tokens found in the prefix cache.",
               read=_total("prefix_hits"), vllm="prefix_cache_hits"),
        Series(kind="gauge", name="kept_text_tokens",
               help="Tokens of long messages in chats that are kept in the API process.",
               read=_sections(lambda sections: sections.num_tokens)),
        Series(kind="counter", name="kept_texts_found",
               help="Long messages that were among those kept, and not tokenized again.",
               read=_sections(lambda sections: sections.hits)),
    ),
    "The engine": (
        Series(kind="gauge", name="engine_state", help="1 for the state the engine is in.",
               read=_engine_states, label="state", values=_STATES),
        Series(kind="gauge", name="engine_epoch",
               help="Number of the newest engine process; 0 before the first.",
               read=lambda metrics: metrics.epoch),
        Series(kind="counter", name="engine_starts", help="Engine processes that served.",
               read=lambda metrics: metrics.engine_starts),
        Series(kind="counter", name="engine_restarts", help="Processes that replaced a dead one.",
               read=lambda metrics: max(0, metrics.epoch - 1)),
        Series(kind="gauge", name="engine_resident_bytes", help="Memory of the engine process.",
               read=_engine_memory),
        Series(kind="counter", name="steps", help="Forward passes.", read=_total("step")),
        Series(kind="counter", name="drafts", help="Rows that came with drafts to be verified.",
               read=_total("drafts"), vllm="spec_decode_num_drafts"),
        Series(kind="counter", name="draft_tokens", help="Tokens of those drafts.",
               read=_total("draft_tokens"), vllm="spec_decode_num_draft_tokens"),
        Series(kind="counter", name="accepted_draft_tokens",
               help="Tokens of those drafts that were right.",
               read=_total("accepted_tokens"), vllm="spec_decode_num_accepted_tokens"),
        Series(kind="counter", name="accepted_draft_tokens_by_position",
               help="Those by their place in the draft, from 0. Over all drafts, the share of them"
               " in which the tokens up to that place were right.",
               read=lambda metrics: metrics.accepted_by_place(), label="position",
               vllm="spec_decode_num_accepted_tokens_per_pos"),
        Series(kind="counter", name="step_busy_seconds", help="Time spent in forward passes.",
               read=_total("busy_seconds")),
        Series(kind="gauge", name="step_busy_ratio",
               help="Share of the last minute spent inside steps: the use the machine is put to.",
               read=lambda metrics: metrics.busy_ratio()),
        Series(kind="histogram", name="step_tokens", help="Tokens a forward pass.",
               read=_histogram("iteration_tokens"), vllm="iteration_tokens_total"),
        Series(kind="counter", name="bad_rows", help="Rows that ended in an error, such as NaN.",
               read=_total("bad_rows")),
        Series(kind="counter", name="pool_repairs",
               help="Times the books of the pool did not balance and were written anew.",
               read=_total("repairs")),
        Series(kind="gauge", name="step_cost_seconds",
               help="Fitted cost of a forward pass: per step, token, query-key pair, sequence, "
               "token of K and V that decoding sequences read, and one that another has read.",
               read=_cost("cost"), label="per", values=_COSTS),
        Series(kind="gauge", name="turn_cost_seconds",
               help="The same of whole turns of the loop, with planning and messages.",
               read=_cost("turn"), label="per", values=_COSTS),
        Series(kind="gauge", name="turn_cost_knee_tokens",
               help="Tokens up to which a turn costs the same: it waits for the weights.",
               read=lambda metrics: metrics.snapshot.turn.knee),
        Series(kind="gauge", name="cost_samples", help="Steps the fit of turns was made from.",
               read=lambda metrics: metrics.snapshot.turn.samples),
        Series(kind="gauge", name="cost_largest_batch",
               help="Most sequences in one of those steps; what larger ones cost is extrapolated.",
               read=lambda metrics: metrics.snapshot.turn.largest_batch),
    ),
    "The gate": (
        Series(kind="counter", name="rejections", help="Requests the gate refused, by reason.",
               read=_rejections, label="reason", values=REASONS, vllm="admission_rejections"),
        Series(kind="counter", name="gate_accepted", help="Prompts let in.",
               read=_gate(lambda gate: gate.accepted)),
        Series(kind="gauge", name="gate_waiting", help="Prompts let in that have no slot yet.",
               read=_gate(lambda gate: gate.waiting)),
        Series(kind="gauge", name="gate_waiting_tokens", help="Their tokens.",
               read=_gate(lambda gate: gate.waiting_tokens)),
        Series(kind="counter", name="gate_predictions",
               help="Predictions of the wait for a slot, and of TTFT, that could be compared.",
               read=_calibration("count"), label="quantity", values=_QUANTITIES),
        Series(kind="counter", name="gate_covered_predictions",
               help="Those whose actual value was within the predicted 90th percentile.",
               read=_calibration("covered"), label="quantity", values=_QUANTITIES),
        Series(kind="counter", name="gate_predicted_seconds", help="Sum of the predicted medians.",
               read=_calibration("predicted_seconds"), label="quantity", values=_QUANTITIES),
        Series(kind="counter", name="gate_actual_seconds", help="Sum of what came instead.",
               read=_calibration("actual_seconds"), label="quantity", values=_QUANTITIES),
    ),
    "Tokens": (
        Series(kind="counter", name="prompt_tokens", help="Prompt tokens of requests that ran.",
               read=lambda metrics: metrics.prompt_tokens, vllm="prompt_tokens"),
        Series(kind="counter", name="cached_prompt_tokens",
               help="Those taken from the prefix cache.",
               read=lambda metrics: metrics.cached_prompt_tokens, vllm="prompt_tokens_cached"),
        Series(kind="counter", name="generated_tokens", help="Tokens given to clients.",
               read=lambda metrics: metrics.generated_tokens, vllm="generation_tokens"),
    ),
    "Tenants": (
        Series(kind="counter", name="tenant_requests",
               help="Requests let in, by tenant; beyond 100 tenants the rest are `_other`.",
               read=_by_tenant("requests"), label="tenant"),
        Series(kind="counter", name="tenant_prompt_tokens", help="Their prompt tokens.",
               read=_by_tenant("prompt_tokens"), label="tenant"),
        Series(kind="counter", name="tenant_generated_tokens", help="Tokens given to them.",
               read=_by_tenant("output_tokens"), label="tenant"),
        Series(kind="counter", name="tenant_queue_seconds",
               help="Time that their requests, once ended, had waited for a first slot.",
               read=_by_tenant("queue_seconds"), label="tenant"),
    ),
    "Requests": (
        Series(kind="counter", name="requests",
               help="Requests by how they ended; one whatever n is.",
               read=lambda metrics: metrics.outcomes, label="outcome", values=OUTCOMES),
        Series(kind="counter", name="request_success",
               help="Requests that ran, by how they ended.", read=_successes, label="reason",
               values=tuple(outcome for outcome in OUTCOMES if outcome != "refused"),
               vllm="request_success", vllm_label="finished_reason"),
        Series(kind="counter", name="http_responses", help="Answers by status class.",
               read=_responses, label="status", values=_STATUSES),
        Series(kind="counter", name="recovered_requests",
               help="Requests that ended after they had outlived an engine.",
               read=lambda metrics: metrics.ended.recoveries),
        Series(kind="histogram", name="request_prompt_tokens", help="Prompt tokens a request.",
               read=_of_ended("prompt_tokens"), vllm="request_prompt_tokens"),
        Series(kind="histogram", name="request_output_tokens", help="Output tokens a request.",
               read=_of_ended("output_tokens"), vllm="request_generation_tokens"),
        Series(kind="histogram", name="request_largest_output_tokens",
               help="Output tokens of the longest sample of a request.",
               read=_of_ended("largest_output"),
               vllm="request_max_num_generation_tokens"),
        Series(kind="histogram", name="request_max_tokens",
               help="The most a sample might have grown.",
               read=_of_ended("max_tokens"), vllm="request_params_max_tokens"),
        Series(kind="histogram", name="request_samples", help="Samples asked for.",
               read=_of_ended("samples"), vllm="request_params_n"),
        Series(kind="histogram", name="request_computed_tokens",
               help="Prompt tokens a request had to compute, the cached ones left out.",
               read=_of_ended("computed_tokens"),
               vllm="request_prefill_kv_computed_tokens"),
        Series(kind="histogram", name="request_preemptions",
               help="Times a request was preempted.",
               read=_of_ended("preemptions"), vllm="request_num_preemptions"),
    ),
    "Latency": (
        Series(kind="histogram", name="ttft_seconds", help="Arrival to first token.",
               read=_histogram("ttft"), vllm="time_to_first_token_seconds"),
        Series(kind="histogram", name="itl_seconds", help="Gaps between the tokens of a sample.",
               read=_histogram("itl"), vllm="inter_token_latency_seconds"),
        Series(kind="histogram", name="tpot_seconds", help="Mean gap of each request.",
               read=_of_ended("tpot"), vllm="request_time_per_output_token_seconds"),
        Series(kind="histogram", name="e2e_seconds", help="Arrival to last token.",
               read=_of_ended("e2e"), vllm="e2e_request_latency_seconds"),
        Series(kind="histogram", name="queue_seconds", help="Arrival to a slot.",
               read=_of_ended("queue_time"), vllm="request_queue_time_seconds"),
        Series(kind="histogram", name="prefill_seconds", help="Slot to first token.",
               read=_of_ended("prefill_time"), vllm="request_prefill_time_seconds"),
        Series(kind="histogram", name="decode_seconds", help="First token to last.",
               read=_of_ended("decode_time"), vllm="request_decode_time_seconds"),
        Series(kind="histogram", name="inference_seconds",
               help="Time with a slot: prefill, decode and recomputation.",
               read=_of_ended("inference_time"), vllm="request_inference_time_seconds"),
        Series(kind="counter", name="request_part_seconds",
               help="Time of requests that ended, by what it was spent on.",
               read=_parts, label="part", values=tuple(str(part) for part in Part)),
    ),
}  # fmt: skip

SERIES: tuple[Series, ...] = tuple(series for group in GROUPS.values() for series in group)
