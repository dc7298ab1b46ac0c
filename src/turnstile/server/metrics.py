"""What the server counts: :class:`Metrics`, fed by the routes and by the engine's steps.

Two sources are kept apart. What clients were given (tokens, outcomes, latencies) is counted here,
where it is given. What the engine did (steps, pages, preemptions) comes in its snapshots; their
counters begin anew with every engine process, so what earlier ones counted is added.
"""

from __future__ import annotations

from collections import Counter

from turnstile.engine.client import EngineClient
from turnstile.engine.protocol import EngineInfo, Snapshot, StepResult
from turnstile.server.choices import Job
from turnstile.server.gate import Gate
from turnstile.server.histogram import (
    ITL_BOUNDS,
    LATENCY_BOUNDS,
    TTFT_BOUNDS,
    Histogram,
    token_bounds,
)
from turnstile.server.usage import Record

OUTCOMES = ("stop", "length", "timeout", "abort", "error", "refused")
ENGINE_COUNTERS = (
    "step",
    "busy_seconds",
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
    "recomputed_tokens",
    "preemptions",
    "evictions",
    "prefix_queries",
    "prefix_hits",
    "bad_rows",
)
_MAX_TOKENS_BOUND = 100_000


class Metrics:
    """Counters and histograms of one server."""

    def __init__(self, engine: EngineClient) -> None:
        self.engine = engine
        self.model_name = ""
        self.info: EngineInfo | None = None
        self.gate: Gate | None = None
        self.outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self.responses: Counter[str] = Counter()
        self.in_flight = 0
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.generated_tokens = 0
        self.ttft = Histogram(TTFT_BOUNDS)
        self.itl = Histogram(ITL_BOUNDS)
        self.tpot = Histogram(ITL_BOUNDS)
        self.e2e = Histogram(LATENCY_BOUNDS)
        self.queue_time = Histogram(LATENCY_BOUNDS)
        self.prefill_time = Histogram(LATENCY_BOUNDS)
        self.decode_time = Histogram(LATENCY_BOUNDS)
        self.request_prompt_tokens = Histogram(token_bounds(_MAX_TOKENS_BOUND))
        self.request_output_tokens = Histogram(token_bounds(_MAX_TOKENS_BOUND))
        self.iteration_tokens = Histogram([1, *(8 << k for k in range(12))])
        self.snapshot = Snapshot()
        self._earlier: dict[str, float] = dict.fromkeys(ENGINE_COUNTERS, 0)
        self._epoch: int | None = None
        self.engine_starts = 0
        engine.subscribe(self.on_step)

    def ready(self, model_name: str, info: EngineInfo, gate: Gate) -> None:
        """The model is known: label the series with its name."""
        self.model_name, self.info, self.gate = model_name, info, gate

    # -- the engine ---------------------------------------------------------------------------

    def on_step(self, result: StepResult) -> None:
        """Take a step's snapshot."""
        if result.epoch != self._epoch:
            for name in ENGINE_COUNTERS:
                self._earlier[name] += getattr(self.snapshot, name)
            self._epoch = result.epoch
            self.engine_starts += 1
        self.snapshot = result.snapshot
        if result.snapshot.step_tokens:
            self.iteration_tokens.observe(result.snapshot.step_tokens)

    def engine_total(self, name: str) -> float:
        """A counter of the engine over all its processes."""
        return self._earlier[name] + float(getattr(self.snapshot, name))

    # -- requests -----------------------------------------------------------------------------

    def request_began(self) -> None:
        """A request knocks at the gate."""
        self.in_flight += 1

    def refused(self) -> None:
        """A request was turned away before it came to the gate."""
        self.outcomes["refused"] += 1

    def prompt_computed(self, job: Job) -> None:
        """A prompt went through the model."""
        self.prompt_tokens += job.num_prompt
        self.cached_prompt_tokens += job.cached_tokens

    def first_token(self, seconds: float) -> None:
        """A request's first token came out, ``seconds`` after the request came in."""
        self.ttft.observe(seconds)

    def next_tokens(self, gap: float, count: int) -> None:
        """A sample got ``count`` more tokens, ``gap`` seconds after the one before."""
        self.itl.observe(gap / count, count)

    def request_ended(self, record: Record, outcome: str) -> None:
        """A request that had knocked is done; whatever its ``n``, it counts once."""
        self.in_flight -= 1
        self.outcomes[outcome] += 1
        if record.accepted is None:
            return
        if record.queued is not None:
            self.queue_time.observe(max(0.0, record.queued - record.arrived))
        first, last = record.first_token, record.last_token
        if first is None or last is None:
            return
        self.prefill_time.observe(first - (record.queued or record.accepted))
        self.decode_time.observe(last - first)
        if record.gaps:
            self.tpot.observe(record.gap_sum / record.gaps)
        if outcome in ("stop", "length", "timeout"):
            self.e2e.observe(last - record.arrived)
            self.request_prompt_tokens.observe(record.num_prompt)
            self.request_output_tokens.observe(record.num_output)
