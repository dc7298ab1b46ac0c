"""``make soak`` for a quarter of a minute with a tiny model: the run, its checks, its verdict."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.harness import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_a_short_soak_finds_nothing_left_and_nobody_unanswered(tiny: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "turnstile.bench.soak", "--minutes", "0.25", "--users", "10",
            "--model", str(tiny),
        ],
        capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "violation" not in done.stdout
    assert "| NO |" not in done.stdout
