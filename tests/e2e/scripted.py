"""``turnstile`` with a scripted engine: ``python scripted.py serve MODEL …``.

For what concerns the process and not the model: signals, exit codes, sockets. The environment
says how the engine behaves: TEST_HOLD (a file; while it is there nothing is loaded and no step is
done), TEST_START (``fail``: it cannot load), TEST_DELAY (seconds a step), TEST_STOP (seconds it
takes to stop). At SIGUSR1 it dies for good.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from server.fake_engine import FakeEngine
from turnstile.cli import serve
from turnstile.cli.main import main
from turnstile.engine.client import EngineState, EngineUnavailableError
from turnstile.engine.config import EngineConfig
from turnstile.engine.protocol import EngineInfo, Loading

HOLD = Path(os.environ.get("TEST_HOLD", os.devnull + "/none"))


class ScriptedEngine(FakeEngine):
    """Says the alphabet."""

    async def start(self) -> EngineInfo:
        if os.environ.get("TEST_START") == "fail":
            raise EngineUnavailableError("The weights are damaged; fetch them again.", self.state)
        self.loading = Loading(1, "reading weights", 0.5)
        while HOLD.exists():
            await asyncio.sleep(0.005)
        self.loading = None
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self.die)
        return await super().start()

    async def stop(self, grace: float) -> None:
        await asyncio.sleep(float(os.environ.get("TEST_STOP", "0")))
        await super().stop(grace)

    def _run_step(self) -> None:
        if not HOLD.exists():
            super()._run_step()

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
