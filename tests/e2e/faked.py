"""``turnstile`` with a real engine process that computes no model: ``python faked.py serve MODEL``.

Supervisor, journal, protocol, scheduler and pages are those that serve; the tokens are a hash of
all before them, so that a wrong one changes all that follow. A dead engine is back in a moment.
TEST_STEP says how long a step takes, in seconds.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from turnstile.cli import serve
from turnstile.cli.main import main
from turnstile.engine.config import EngineConfig
from turnstile.engine.supervisor import ProcessEngine

VOCABULARY = 259
"""Tokens of the tiny model that are no control tokens."""


def make_engine(config: EngineConfig) -> ProcessEngine:
    step = os.environ.get("TEST_STEP", "0.005")
    return ProcessEngine(replace(config, model=f"fake:{step}:{VOCABULARY}"))


serve.make_engine = make_engine
sys.exit(main(sys.argv[1:]))
