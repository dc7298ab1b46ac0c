"""What every route needs, in one place: :class:`Service`."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING

from turnstile.core.events import Admitted, decode
from turnstile.engine.client import EngineClient, EngineState
from turnstile.engine.protocol import StepResult
from turnstile.server.answer.choices import Job
from turnstile.server.answer.grammar import check_threads
from turnstile.server.answer.passage import Outbox
from turnstile.server.answer.reader import Reader, text_threads
from turnstile.server.answer.usage import Record
from turnstile.server.config import ConfigError, ServerConfig
from turnstile.server.errors import ApiError, model_loading, shutting_down
from turnstile.server.gate import Gate, make_gate, view_of
from turnstile.server.http.auth import KeyRing
from turnstile.server.http.body import BodyLimits
from turnstile.server.http.cors import Cors
from turnstile.server.http.exchange import Exchange
from turnstile.server.http.open_files import OpenFiles
from turnstile.server.http.sse import KEEP_ALIVE
from turnstile.server.model import ServedModel
from turnstile.server.tenants import Tenant
from turnstile.server.watch.metrics import Metrics
from turnstile.server.watch.trace import Trace
from turnstile.server.watch.trails import RequestLog

if TYPE_CHECKING:
    from turnstile.server.watch.watchers import Watchers

logger = logging.getLogger("turnstile.server")

_BODIES_AT_ONCE = 16
"""Bodies of the largest size that may be read at a moment; smaller ones in proportion."""
_TICK = 0.5
"""Seconds between two looks at the live streams."""


class Phase(StrEnum):
    """The life of the server. In ``FAILED`` the engine cannot be brought (back) to life."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Service:
    """The server's state: configuration, engine, model, who is inside.

    ``model`` and ``gate`` are there from ``READY`` on; :meth:`require_model` hands them out or
    raises the 503 that says why not. ``watchers``, who look at all of it, are there once there is
    an application that lets them in.
    """

    watchers: Watchers

    def __init__(
        self,
        config: ServerConfig,
        engine: EngineClient,
        *,
        environment: dict[str, object] | None = None,
        trace: Trace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.engine = engine
        self.environment = environment or {}
        self.clock = clock
        self.keys = KeyRing.of(config)
        self.cors = Cors(config.allowed_origins)
        together = _BODIES_AT_ONCE * config.max_body_size
        # Without keys there are no others to leave room for, or nobody can tell them apart.
        each = together if self.keys.open else together // 2
        self.bodies = BodyLimits(
            one=config.max_body_size, together=together, each=each, seconds=config.body_timeout
        )
        self.texts = text_threads()
        self.checks = check_threads()
        self.phase = Phase.LOADING
        self.model: ServedModel | None = None
        self.gate: Gate | None = None
        self.live: set[Exchange] = set()
        self.jobs: dict[str, tuple[Job, Record]] = {}
        """What the engine works on, by its request id."""
        self.requests = RequestLog()
        self.requests.observer = self.trace = trace
        self.metrics = Metrics(engine, self.requests, clock)
        self.outbox = Outbox(self.metrics, clock)
        self.metrics.threads = {"text": self.texts, "grammar": self.checks}
        self.metrics.files = self.files = OpenFiles(clock=clock)
        engine.subscribe(self._on_step)
        self._seeds = random.SystemRandom() if config.seed is None else random.Random(config.seed)
        self._streams: dict[Exchange, asyncio.Task[None]] = {}
        self._writing: set[asyncio.Task[None]] = set()
        self._ticker: asyncio.Task[None] | None = None

    def ready(self, model: ServedModel) -> None:
        """The engine runs and the tokenizer is there: take requests from now on."""
        info = self.engine.info
        assert info is not None
        self.model = model
        self.gate = make_gate(self.config, info)
        self.metrics.ready(model, info, self.gate)
        if self.phase is Phase.LOADING:
            self.phase = Phase.READY

    def reload_keys(self) -> None:
        """Read the tenants' file again; where it is wrong, what was read before stays."""
        try:
            self.keys = KeyRing.of(self.config)
        except ConfigError as error:
            logger.error("The tenants stay as they are. %s", error)
        else:
            logger.info("The keys were read again: there are %d.", len(self.keys))

    def drain(self) -> None:
        """Take no new requests."""
        self.phase = Phase.DRAINING

    def require_model(self) -> tuple[ServedModel, Gate]:
        """The model and the gate. Raises :class:`ApiError` 503 when no request can be taken."""
        if self.phase is Phase.DRAINING:
            raise shutting_down()
        if self.phase is Phase.FAILED:
            raise ApiError(
                503, "The engine has failed and cannot be restarted.", code="engine_dead"
            )
        if self.phase is Phase.LOADING or self.model is None or self.gate is None:
            raise model_loading()
        return self.model, self.gate

    def reader(self, model: ServedModel, tenant: Tenant) -> Reader:
        """Who reads the texts of a request of ``tenant``."""
        return Reader(model, tenant, self.texts, self.config.max_text_size)

    @property
    def alive(self) -> bool:
        """Alive: the engine works, is on its way, or is being brought back. Whoever restarts the
        process for less would throw away the streams that survive a restart of the engine.
        """
        return self.phase is not Phase.FAILED and self.engine.state is not EngineState.DEAD

    @property
    def accepting(self) -> bool:
        """Ready for traffic."""
        return (
            self.phase is Phase.READY
            and self.engine.state is EngineState.READY
            and self.engine.healthy
        )

    def next_seed(self) -> int:
        """A seed for a request that brings none. It is drawn here and not in the engine: a
        restarted engine must draw the same tokens again.
        """
        return self._seeds.getrandbits(62)

    def _on_step(self, result: StepResult) -> None:
        """Let everybody who follows requests know what happened to them."""
        if self.gate is not None and self.engine.info is not None:
            steps = int(self.metrics.engine_total("step"))
            self.gate.learn(view_of(result.snapshot, steps, self.engine.info.page_size))
        happened = []
        for kind, fields in result.events:
            if kind == "Stepped" and self.trace is None:
                continue  # one a step, and only a trace wants it
            event = decode(kind, fields)
            if event is not None:
                happened.append(event)
        for event in happened:
            if isinstance(event, Admitted):
                self._on_admitted(event)
        self.requests.on_step(result, happened)
        if not result.members and not self.engine.healthy:
            self.requests.engine_lost()
        if self.trace is not None:
            self.trace.on_step(result, happened)

    def _on_admitted(self, event: Admitted) -> None:
        """Somebody got a slot in this step: their wait is over."""
        found = self.jobs.get(event.request_id)
        if found is not None:
            job, record = found
            if record.queued is None:
                record.queued = event.time
            if job.place is not None:
                job.place.start(event.time)

    # -- live streams -----------------------------------------------------------------------

    def stream_began(self, exchange: Exchange) -> None:
        """Look after the calling task's stream: keep it alive, end it if its reader stalls."""
        task = asyncio.current_task()
        assert task is not None
        self._streams[exchange] = task
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().create_task(self._tick())

    def stream_ended(self, exchange: Exchange) -> None:
        """The stream is complete or gone."""
        self._streams.pop(exchange, None)

    async def _tick(self) -> None:
        """One timer for all streams, so that a token costs none; it ends when the last one does."""
        try:
            while self._streams:
                await asyncio.sleep(_TICK)
                now = self.clock()
                for exchange, task in list(self._streams.items()):
                    self._look_after(exchange, task, now)
        finally:
            self._ticker = None

    def _look_after(self, exchange: Exchange, task: asyncio.Task[None], now: float) -> None:
        began = exchange.write_began
        if began is not None:
            if now - began > self.config.stalled_reader_timeout:
                exchange.notes["stalled_reader"] = True
                self._streams.pop(exchange, None)
                task.cancel()
            return
        interval = self.config.sse_keep_alive_interval
        if 0 < interval <= now - exchange.last_write:
            exchange.last_write = now
            # A write that blocks would hold up the look at all other streams: only start it.
            writing = asyncio.get_running_loop().create_task(exchange.keep_alive(KEEP_ALIVE, now))
            self._writing.add(writing)
            writing.add_done_callback(self._writing.discard)
