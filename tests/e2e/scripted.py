"""``turnstile`` with a scripted engine: ``python scripted.py serve MODEL …``.

For what concerns the process and not the model: signals, exit codes, sockets. The environment
says how the engine behaves: TEST_START (seconds to load, or ``fail``), TEST_DELAY (seconds a
step), TEST_DIE (seconds until it dies for good), TEST_STOP (seconds it takes to stop).
"""

from __future__ import annotations

import asyncio
import os
import sys

from server.fake_engine import FakeEngine
from turnstile.cli import serve
from turnstile.cli.main import main
from turnstile.engine.client import EngineState, EngineUnavailableError
from turnstile.engine.config import EngineConfig
from turnstile.engine.protocol import EngineInfo, Loading


class ScriptedEngine(FakeEngine):
    """Says the alphabet."""

    async def start(self) -> EngineInfo:
        how = os.environ.get("TEST_START", "0")
        if how == "fail":
            raise EngineUnavailableError("The weights are damaged; fetch them again.", self.state)
        for tenth in range(10):
            self.loading = Loading(1, "reading weights", tenth / 10)
            await asyncio.sleep(float(how) / 10)
        self.loading = None
        if "TEST_DIE" in os.environ:
            asyncio.get_running_loop().call_later(float(os.environ["TEST_DIE"]), self.die)
        return await super().start()

    async def stop(self, grace: float) -> None:
        await asyncio.sleep(float(os.environ.get("TEST_STOP", "0")))
        await super().stop(grace)

    def die(self) -> None:
        self.state = EngineState.DEAD
        for stream in self.streams:
            for sample in stream.samples:
                if not sample.done:
                    self._end(sample, [], finish="error", error="The engine has died.")


def make_engine(config: EngineConfig) -> FakeEngine:
    letters = list(range(68, 94))
    delay = float(os.environ.get("TEST_DELAY", "0.002"))
    return ScriptedEngine(lambda generation, sample: letters, delay=delay)


serve.make_engine = make_engine
sys.exit(main(sys.argv[1:]))
