"""``/metrics``: every series in one table, under our names and under vLLM's.

The table is data so that dashboards and alert rules can be generated from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from turnstile.core.events import WaitReason
from turnstile.engine.client import EngineState
from turnstile.engine.protocol import CostModel
from turnstile.server.gate import REASONS, Gate
from turnstile.server.histogram import Histogram
from turnstile.server.metrics import OUTCOMES, Metrics

if TYPE_CHECKING:
    from prometheus_client.core import Metric

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
    vllm
        Its name in vLLM, without ``vllm:``; None where vLLM has no such series.
    """

    kind: Kind
    name: str
    help: str
    read: Callable[[Metrics], float | Labelled | Histogram]
    label: str | None = None
    vllm: str | None = None
    vllm_label: str | None = None


def _total(counter: str) -> Callable[[Metrics], float]:
    return lambda metrics: metrics.engine_total(counter)


def _now(field: str) -> Callable[[Metrics], float]:
    return lambda metrics: float(getattr(metrics.snapshot, field))


def _histogram(field: str) -> Callable[[Metrics], Histogram]:
    def read(metrics: Metrics) -> Histogram:
        histogram: Histogram = getattr(metrics, field)
        return histogram

    return read


def _pages(metrics: Metrics) -> Labelled:
    now = metrics.snapshot
    return {"free": now.pages_free, "held": now.pages_held, "cached": now.pages_cached}


def _kv_usage(metrics: Metrics) -> float:
    now = metrics.snapshot
    return now.pages_held / now.pages_total if now.pages_total else 0.0


def _waiting_by_reason(metrics: Metrics) -> Labelled:
    return {reason.value: 0 for reason in WaitReason} | dict(metrics.snapshot.waiting_by_reason)


def _cost(field: str) -> Callable[[Metrics], Labelled]:
    def read(metrics: Metrics) -> Labelled:
        fit: CostModel = getattr(metrics.snapshot, field)
        return {
            "step": fit.alpha,
            "token": fit.beta,
            "query_key_pair": fit.gamma,
            "sequence": fit.delta,
        }

    return read


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
            return {"wait": 0.0, "ttft": 0.0}
        return {"wait": getattr(gate.wait, field), "ttft": getattr(gate.ttft, field)}

    return read


def _engine_states(metrics: Metrics) -> Labelled:
    return {state.value: float(metrics.engine.state is state) for state in EngineState}


def _successes(metrics: Metrics) -> Labelled:
    return {outcome: metrics.outcomes[outcome] for outcome in OUTCOMES if outcome != "refused"}


SERIES: tuple[Series, ...] = (
    Series(kind="gauge", name="requests_running", help="Sequences in the batch.",
           read=_now("running"), vllm="num_requests_running"),
    Series(kind="gauge", name="requests_waiting", help="Sequences that wait for a slot.",
           read=_now("waiting"), vllm="num_requests_waiting"),
    Series(kind="gauge", name="waiting_by_reason", help="Waiting sequences by what they wait for.",
           read=_waiting_by_reason, label="reason", vllm="num_requests_waiting_by_reason"),
    Series(kind="gauge", name="waiting_tokens", help="Prompt tokens that wait to be computed.",
           read=_now("waiting_tokens")),
    Series(kind="gauge", name="requests_in_flight", help="HTTP requests being answered.",
           read=lambda metrics: metrics.in_flight),
    Series(kind="gauge", name="pages", help="Pages of the KV pool by state.",
           read=_pages, label="state"),
    Series(kind="gauge", name="kv_usage_ratio", help="Held pages over all pages, 0 to 1.",
           read=_kv_usage, vllm="kv_cache_usage_perc"),
    Series(kind="gauge", name="engine_state", help="1 for the state the engine is in.",
           read=_engine_states, label="state"),
    Series(kind="counter", name="engine_starts", help="Engine processes that served.",
           read=lambda metrics: metrics.engine_starts),
    Series(kind="counter", name="steps", help="Forward passes.", read=_total("step")),
    Series(kind="counter", name="step_busy_seconds", help="Time spent in forward passes.",
           read=_total("busy_seconds")),
    Series(kind="gauge", name="step_cost_seconds",
           help="Fitted cost of a forward pass: per step, token, query-key pair and sequence.",
           read=_cost("cost"), label="per"),
    Series(kind="gauge", name="turn_cost_seconds",
           help="The same of whole turns of the loop, with planning and messages.",
           read=_cost("turn"), label="per"),
    Series(kind="gauge", name="cost_samples", help="Steps the fit of turns was made from.",
           read=lambda metrics: metrics.snapshot.turn.samples),
    Series(kind="counter", name="preemptions", help="Sequences that lost slot and pages.",
           read=_total("preemptions"), vllm="num_preemptions"),
    Series(kind="counter", name="evictions", help="Cached pages given to somebody else.",
           read=_total("evictions")),
    Series(kind="counter", name="recomputed_tokens", help="Tokens computed again.",
           read=_total("recomputed_tokens")),
    Series(kind="counter", name="bad_rows", help="Rows that ended in an error, such as NaN.",
           read=_total("bad_rows")),
    Series(kind="counter", name="prefix_query_tokens", help="Tokens looked up in the prefix cache.",
           read=_total("prefix_queries"), vllm="prefix_cache_queries"),
    Series(kind="counter", name="prefix_hit_tokens", help="Tokens found in the prefix cache.",
           read=_total("prefix_hits"), vllm="prefix_cache_hits"),
    Series(kind="counter", name="prompt_tokens", help="Prompt tokens of requests that ran.",
           read=lambda metrics: metrics.prompt_tokens, vllm="prompt_tokens"),
    Series(kind="counter", name="cached_prompt_tokens", help="Those taken from the prefix cache.",
           read=lambda metrics: metrics.cached_prompt_tokens, vllm="prompt_tokens_cached"),
    Series(kind="counter", name="generated_tokens", help="Tokens given to clients.",
           read=lambda metrics: metrics.generated_tokens, vllm="generation_tokens"),
    Series(kind="counter", name="requests", help="Requests by how they ended; one whatever n is.",
           read=lambda metrics: metrics.outcomes, label="outcome"),
    Series(kind="counter", name="request_success", help="Requests that ran, by how they ended.",
           read=_successes, label="reason", vllm="request_success", vllm_label="finished_reason"),
    Series(kind="counter", name="rejections", help="Requests the gate refused, by reason.",
           read=_rejections, label="reason", vllm="admission_rejections"),
    Series(kind="gauge", name="gate_waiting", help="Prompts let in that have no slot yet.",
           read=_gate(lambda gate: gate.waiting)),
    Series(kind="gauge", name="gate_waiting_tokens", help="Their tokens.",
           read=_gate(lambda gate: gate.waiting_tokens)),
    Series(kind="counter", name="gate_accepted", help="Prompts let in.",
           read=_gate(lambda gate: gate.accepted)),
    Series(kind="counter", name="gate_predictions",
           help="Predictions of the wait for a slot, and of TTFT, that could be compared.",
           read=_calibration("count"), label="quantity"),
    Series(kind="counter", name="gate_covered_predictions",
           help="Those whose actual value was within the predicted 90th percentile.",
           read=_calibration("covered"), label="quantity"),
    Series(kind="counter", name="gate_predicted_seconds", help="Sum of the predicted medians.",
           read=_calibration("predicted_seconds"), label="quantity"),
    Series(kind="counter", name="gate_actual_seconds", help="Sum of what came instead.",
           read=_calibration("actual_seconds"), label="quantity"),
    Series(kind="counter", name="http_responses", help="Answers by status class.",
           read=lambda metrics: {f"{k}xx": metrics.responses[f"{k}xx"] for k in (2, 3, 4, 5)},
           label="status"),
    Series(kind="histogram", name="ttft_seconds", help="Arrival to first token.",
           read=_histogram("ttft"), vllm="time_to_first_token_seconds"),
    Series(kind="histogram", name="itl_seconds", help="Gaps between the tokens of a sample.",
           read=_histogram("itl"), vllm="inter_token_latency_seconds"),
    Series(kind="histogram", name="tpot_seconds", help="Mean gap of each request.",
           read=_histogram("tpot"), vllm="request_time_per_output_token_seconds"),
    Series(kind="histogram", name="e2e_seconds", help="Arrival to last token.",
           read=_histogram("e2e"), vllm="e2e_request_latency_seconds"),
    Series(kind="histogram", name="queue_seconds", help="Arrival to a slot.",
           read=_histogram("queue_time"), vllm="request_queue_time_seconds"),
    Series(kind="histogram", name="prefill_seconds", help="Slot to first token.",
           read=_histogram("prefill_time"), vllm="request_prefill_time_seconds"),
    Series(kind="histogram", name="decode_seconds", help="First token to last.",
           read=_histogram("decode_time"), vllm="request_decode_time_seconds"),
    Series(kind="histogram", name="request_prompt_tokens", help="Prompt tokens a request.",
           read=_histogram("request_prompt_tokens"), vllm="request_prompt_tokens"),
    Series(kind="histogram", name="request_output_tokens", help="Output tokens a request.",
           read=_histogram("request_output_tokens"), vllm="request_generation_tokens"),
    Series(kind="histogram", name="step_tokens", help="Tokens a forward pass.",
           read=_histogram("iteration_tokens"), vllm="iteration_tokens_total"),
)  # fmt: skip


class Collector:
    """Turns :data:`SERIES` into Prometheus families at every scrape."""

    def __init__(self, metrics: Metrics, *, vllm: bool) -> None:
        self._metrics = metrics
        self._vllm = vllm

    def collect(self) -> Iterator[Metric]:
        """All families, every one of them from the first scrape on."""
        model = self._metrics.model_name
        for series in SERIES:
            value = series.read(self._metrics)
            yield _family(series, f"turnstile_{series.name}", value, {}, series.label)
            if self._vllm and series.vllm:
                labels = {"model_name": model, "engine": "0"}
                label = series.vllm_label or series.label
                yield _family(series, f"vllm:{series.vllm}", value, labels, label)
        yield from self._infos(model)

    def _infos(self, model: str) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        info = self._metrics.info
        if info is None:
            return
        facts = {
            "model_name": model,
            "architecture": info.architecture,
            "backend": info.backend,
            "device": info.device,
            "weight_format": info.weight_format,
            "kv_dtype": info.kv_dtype,
            "admission": info.admission,
        }
        family = GaugeMetricFamily("turnstile_engine_info", "What is served.", labels=list(facts))
        family.add_metric(list(facts.values()), 1)
        yield family
        if self._vllm:
            pool = {"engine": "0", "block_size": info.page_size, "num_gpu_blocks": info.num_pages}
            family = GaugeMetricFamily("vllm:cache_config_info", "KV cache.", labels=list(pool))
            family.add_metric([str(value) for value in pool.values()], 1)
            yield family


def _family(
    series: Series,
    name: str,
    value: float | Labelled | Histogram,
    labels: dict[str, str],
    label: str | None,
) -> Metric:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

    names, values = list(labels), list(labels.values())
    if isinstance(value, Histogram):
        histogram = HistogramMetricFamily(name, series.help, labels=names)
        histogram.add_metric(values, buckets=value.buckets(), sum_value=value.total)
        return histogram
    kind = CounterMetricFamily if series.kind == "counter" else GaugeMetricFamily
    if isinstance(value, Mapping):
        assert label is not None
        family = kind(name, series.help, labels=[*names, label])
        for key, number in value.items():
            family.add_metric([*values, key], number)
        return family
    family = kind(name, series.help, labels=names)
    family.add_metric(values, value)
    return family


def render(metrics: Metrics, *, vllm: bool, accept: str) -> tuple[bytes, str]:
    """The exposition text and its content type, as the scraper's ``Accept`` header likes it."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.process_collector import ProcessCollector

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(metrics, vllm=vllm))
    ProcessCollector(registry=registry)
    encoder, content_type = choose_encoder(accept)
    return encoder(registry), content_type
