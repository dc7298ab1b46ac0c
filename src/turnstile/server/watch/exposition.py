"""``/metrics``: the table of :mod:`turnstile.server.watch.series` as Prometheus reads it, under our
names and under vLLM's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from turnstile import __version__
from turnstile.server.watch.histogram import Histogram
from turnstile.server.watch.metrics import Metrics
from turnstile.server.watch.series import SERIES, Labelled, Series

if TYPE_CHECKING:
    from prometheus_client.core import Metric


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

        build = GaugeMetricFamily("turnstile_build_info", "What serves.", labels=["version"])
        build.add_metric([__version__], 1)
        yield build
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


async def render(metrics: Metrics, *, vllm: bool, accept: str) -> tuple[bytes, str]:
    """The exposition text and its content type, as the scraper's ``Accept`` header likes it.

    The values are taken at once; they are written down in a thread, so that streams go on.
    """
    families = list(Collector(metrics, vllm=vllm).collect())
    return await asyncio.to_thread(_encode, families, accept)


class _Collected:
    """Families as a collector of themselves."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """Hand them out."""
        return iter(self._families)


def _encode(families: list[Metric], accept: str) -> tuple[bytes, str]:
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.process_collector import ProcessCollector

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(families))
    ProcessCollector(registry=registry)
    encoder, content_type = choose_encoder(accept)
    return encoder(registry), content_type
