"""``turnstile`` with a real engine process that computes no model: ``python faked.py serve MODEL``.

Supervisor, journal, protocol, scheduler and pages are those that serve; the tokens are a hash of
all before them, so that a wrong one changes all that follow. A dead engine is back in a moment, or
when the test wants it: the environment says how long a step takes (TEST_STEP, in seconds), and
names a file while which is there no engine is started (TEST_HOLD).
"""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path

from turnstile.cli import serve
from turnstile.cli.main import main
from turnstile.engine.config import EngineConfig
from turnstile.engine.supervisor import ProcessEngine

VOCABULARY = 259
"""Tokens of the tiny model that are no control tokens."""
HOLD = Path(os.environ.get("TEST_HOLD", os.devnull + "/none"))


class FakedEngine(ProcessEngine):
    """It waits between two engines for as long as a test wants to look."""

    async def _launch(self, pause: float) -> None:
        while HOLD.exists():
            await asyncio.sleep(0.005)
        await super()._launch(pause)


def make_engine(config: EngineConfig) -> ProcessEngine:
    step = os.environ.get("TEST_STEP", "0.005")
    return FakedEngine(replace(config, model=f"fake:{step}:{VOCABULARY}"))


os.environ["TURNSTILE_FAULTS"] = "1"  # or no engine takes a model named fake:…
serve.make_engine = make_engine
sys.exit(main(sys.argv[1:]))
