"""The engine as a process that may die: :class:`ProcessEngine`.

It keeps the journal, restarts what died or hangs, and submits the journal to the new engine, so
that streams go on where they were. Who is submitted at once and who must wait after repeated
deaths is decided in :mod:`turnstile.engine.quarantine`. Torch-free.

A restart counts against ``max_restarts`` unless the death narrowed the circle of suspects; the
count begins anew when a request is served or a suspect cleared.

While an engine is being restarted requests are still taken: they wait in the journal with the
others. Once a restart has failed nobody knows how long it will take, and they are refused.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from turnstile.engine.accounts import Accounts
from turnstile.engine.client import EngineState, EngineUnavailableError, Generation
from turnstile.engine.config import EngineConfig
from turnstile.engine.journal import Entry, JournalError
from turnstile.engine.journaled import JournaledClient, JournaledStream
from turnstile.engine.process import EngineProcess, Spawned, spawn
from turnstile.engine.protocol import (
    Command,
    EngineInfo,
    Failed,
    Loading,
    StepResult,
    decode_message,
)
from turnstile.engine.quarantine import Member, Quarantine
from turnstile.engine.wording import counted

logger = logging.getLogger(__name__)

LOADING_TIMEOUT = 600.0
"""Seconds without a word after which an engine that loads counts as hung."""

_WATCH = 1.0
_STOPPING = 2.0
_LONGEST_PAUSE = 5.0
_LEAST_WAIT = 1.0
_SERVED = ("stop", "length", "timeout")


class ProcessEngine(JournaledClient):
    """The supervised engine process of a configuration, not yet started."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self.config = config
        self.epoch = 0
        self._told_epoch = 0
        """The engine whose snapshot is the latest."""
        self._engine: EngineProcess | None = None
        self._ahead: Spawned | None = None
        self._inside: dict[str, None] = {}
        """Requests the engine that runs now knows of."""
        self._members: list[tuple[str, int]] = []
        """Samples in the step that runs now."""
        self._quarantine = Quarantine()
        self._accounts = Accounts()
        self._restarts = 0
        self._starts_in_vain = 0
        """Engines started since one was ready."""
        self._pause = 0.0
        self._silence = 0.0
        """Seconds without a word from the engine, of those in which we could have heard one."""
        self._ready = False
        self._stopping = False
        self._why = ""
        self._started: asyncio.Future[EngineInfo] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    # -- EngineClient -----------------------------------------------------------------------------

    def prepare(self) -> None:
        """Start the process: it imports what it needs while this one does what a server does."""
        self._ahead = spawn(self.config)

    def abandon(self) -> None:
        if self._ahead is not None:
            self._ahead.end()
            self._ahead = None

    async def start(self) -> EngineInfo:
        self._started = asyncio.get_running_loop().create_future()
        self._tasks.append(asyncio.create_task(self._watch()))
        self._tasks.append(asyncio.create_task(self._launch(0.0)))
        return await self._started

    async def stop(self, grace: float) -> None:
        if self.state is not EngineState.DEAD:
            self.state = EngineState.DRAINING
            await self._wait_until_empty(grace)
        self._stopping = True
        self._end_all("abort")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._engine is not None:
            await self._engine.stop(_STOPPING if self._ready else 0.0)
        self.state = EngineState.DEAD

    @property
    def healthy(self) -> bool:
        if self._engine is None or not self._ready:
            return False
        return not self._inside or self._silence < self.config.step_timeout

    # -- requests ---------------------------------------------------------------------------------

    def submit(self, generation: Generation) -> JournaledStream:
        if self.state is EngineState.RECOVERING and self._starts_in_vain > 1:
            known = self.info.load_seconds if self.info is not None else 0.0
            raise EngineUnavailableError(
                "The engine has died and is being restarted, so far in vain.",
                self.state,
                max(_LEAST_WAIT, self._pause + known),
            )
        return super().submit(generation)

    def _enter(self, entry: Entry) -> None:
        if self._ready and self._quarantine.admits(entry.generation.request_id, entry.proven):
            self._submit(entry)

    def _submit(self, entry: Entry) -> None:
        request_id = entry.generation.request_id
        if not self._inside:
            self._silence = 0.0  # an idle engine owes us nothing: the clock starts now
        self._inside[request_id] = None
        for command in entry.submits():
            self._send(command)

    def _submit_admitted(self) -> None:
        """Submit everybody who may be in the engine and is not, in the order they came."""
        for request_id, entry in self._journal.entries.items():
            if request_id not in self._inside and self._quarantine.admits(request_id, entry.proven):
                self._submit(entry)

    def _send(self, command: Command) -> None:
        if self._ready and self._engine is not None:
            self._engine.send(command)

    def _left(self, request_id: str) -> None:
        self._inside.pop(request_id, None)
        if not self._ready:
            self._report_no_engine()
        if self._quarantine.is_suspect(request_id):
            self._quarantine.left(request_id)
            self._call_submit_admitted()

    def _call_submit_admitted(self) -> None:
        """Soon, because this may be the middle of taking a step."""
        if self._ready:
            asyncio.get_running_loop().call_soon(self._submit_if_ready)

    def _submit_if_ready(self) -> None:
        if self._ready and not self._stopping:
            self._submit_admitted()

    # -- the engine's messages --------------------------------------------------------------------

    def _on_message(self, engine: EngineProcess, payload: bytes) -> None:
        if engine is not self._engine or self._stopping:
            return
        message = decode_message(payload)
        self._silence = 0.0
        if message.epoch != engine.epoch:
            return
        match message:
            case StepResult() if self._ready:
                self._on_step(message)
            case Loading():
                self.loading = message
            case Failed():
                self._why = message.message
            case EngineInfo():
                self._on_ready(message)

    def _on_step(self, result: StepResult) -> None:
        self._told_epoch = result.epoch
        self._members = result.members
        self._accounts.hear(result.snapshot)
        try:
            self._take(result)
        except JournalError as error:
            self._distrust(str(error))
            return
        if self._restarts and any(row.finish in _SERVED for row in result.rows):
            self._restarts = 0
        if self._quarantine.active:
            self._clear_suspects(result)

    def _clear_suspects(self, result: StepResult) -> None:
        journal = self._journal
        said = [journal.entries.get(row.request_id) for row in result.rows]
        if result.draws is not None:
            said += map(journal.find, result.draws.numbers)
        cleared = False
        for entry in said:
            if entry is not None and self._quarantine.came_through(
                entry.generation.request_id, entry.steps
            ):
                cleared = True
        if cleared:
            self._restarts = 0
            self._submit_admitted()

    def _on_ready(self, info: EngineInfo) -> None:
        self.info, self.loading = info, None
        self._ready = True
        self._why = ""
        self._starts_in_vain = 0
        if self.state is not EngineState.DRAINING:
            self.state = EngineState.READY
        if self._started is not None and not self._started.done():
            self._started.set_result(info)
        else:
            going_on = counted(len(self._journal.entries), "request")
            logger.info("Engine %d is ready; going on with %s.", info.epoch, going_on)
            self._send(self._accounts.resume())
        if self._interval is not None:
            self.watch(self._interval)
        self._submit_admitted()

    # -- death and recovery -----------------------------------------------------------------------

    async def _launch(self, pause: float) -> None:
        await asyncio.sleep(pause)
        self.epoch += 1
        self._starts_in_vain += 1
        self._silence = 0.0
        self._engine = engine = EngineProcess(self.epoch, self._on_message, self._on_lost)
        try:
            ahead, self._ahead = self._ahead, None
            await engine.launch(self.config, ahead)
        except Exception as error:
            # Whatever it was, somebody waits for this engine and must hear that there is none.
            logger.debug("Starting the engine process failed", exc_info=True)
            self._why = f"The engine process cannot be started: {error}."
            engine.kill()
            self._on_lost(engine)

    def _distrust(self, why: str) -> None:
        """Kill an engine that hangs or talks nonsense; what follows is as if it had died."""
        logger.error("%s The engine is killed and restarted.", why)
        if self._engine is not None:
            self._why = why
            self._ready = False
            self._engine.kill()

    def _on_lost(self, engine: EngineProcess) -> None:
        if engine is not self._engine or self._stopping:
            return
        self._engine, self._ready = None, False
        why = self._why or f"The engine process {engine.end}."
        if self._started is not None and not self._started.done():
            self._die()
            self._started.set_exception(EngineUnavailableError(why, EngineState.DEAD))
            return
        narrowed = self._judge()
        self._journal.restart(self.snapshot.tenants)
        self._inside.clear()
        self._members = []
        self._report_no_engine()
        self._restarts += not narrowed
        if self._restarts > self.config.max_restarts:
            why += f" It was restarted {self.config.max_restarts} times in vain."
            logger.error("The engine is given up. %s", why)
            self._die()
            return
        if self.state is not EngineState.DRAINING:
            self.state = EngineState.RECOVERING
        waiting = counted(len(self._journal.entries), "request")
        logger.warning("%s Restarting the engine; waiting: %s.", why, waiting)
        again = self._restarts - 2
        self._pause = min(_LONGEST_PAUSE, 0.1 * 2**again) if again >= 0 else 0.0
        self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(asyncio.create_task(self._launch(self._pause)))

    def _report_no_engine(self) -> None:
        """Tell the listeners that nothing runs and no page is held: the pool is gone."""
        if self._stopping or not self._told_epoch:
            return
        last = self.snapshot
        self._tell(
            StepResult(
                self._told_epoch,
                last.step,
                [],
                [],
                msgspec.structs.replace(
                    last,
                    time=time.monotonic(),
                    running=0,
                    waiting=len(self._journal.entries),
                    waiting_tokens=0,
                    waiting_by_reason={},
                    pages_free=last.pages_total,
                    pages_held=0,
                    pages_cached=0,
                ),
            )
        )

    def _judge(self) -> bool:
        """Find out what the death tells about those in its step; end the guilty one, if known."""
        entries = self._journal.entries
        members = [
            Member(request_id, entries[request_id].steps, entries[request_id].proven)
            for request_id in dict.fromkeys(request_id for request_id, _ in self._members)
            if request_id in entries
        ]
        verdict = self._quarantine.died(members)
        if verdict.guilty is not None:
            logger.error("Request %s kills the engine each time: it is given up", verdict.guilty)
            message = "This request ended the engine each time it was computed, so it is given up."
            self._end(entries[verdict.guilty], "error", message)
        return verdict.narrowed

    def _die(self) -> None:
        self.state = EngineState.DEAD
        # Why is for the operator: it may name paths, and clients read this.
        self._end_all("error", "The engine has died and cannot be restarted.")

    # -- the watchdog -----------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Look every second (oftener for short timeouts) whether the engine is stuck.

        Seconds in which this process itself did not get to run, or the whole machine slept, do
        not count: what the engine said in them has not been read yet.
        """
        interval = min(_WATCH, self.config.step_timeout / 4)
        last = time.monotonic()
        while True:
            await asyncio.sleep(interval)
            now = time.monotonic()
            self._silence += min(now - last, 2 * interval)
            last = now
            silence = self._silence
            if self._ready and self._inside and silence > self.config.step_timeout:
                self._distrust(f"No step has ended for {silence:.1f} s while work waits.")
            elif self._engine is not None and not self._ready and silence > LOADING_TIMEOUT:
                self._distrust(f"Loading has not moved for {silence:.0f} s.")
            self._expire(now)

    def _expire(self, now: float) -> None:
        """Deadlines of those whom no engine looks after: held back, or between two engines."""
        for request_id, entry in list(self._journal.entries.items()):
            deadline = entry.generation.deadline
            if request_id not in self._inside and deadline is not None and deadline <= now:
                self._end(entry, "timeout")


__all__ = ["ProcessEngine"]
