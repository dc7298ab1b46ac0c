"""The book's two commands, as a reader runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DIRECTORY = next(Path(__file__).parents[2].glob("projects/17_*"))


@pytest.mark.parametrize("script", ["build.py", "break_it.py"])
def test_the_tiny_story_is_told_and_every_claim_holds(script: str, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(DIRECTORY / script), "--tiny"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "claims hold" in done.stdout
    assert "FAILS" not in done.stdout
    assert done.stdout.count("┏") >= 3, "tables"


def test_a_claim_that_fails_is_told_by_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from turnstile.lab import parts, session
    from turnstile.lab.story import Part

    class Broken:
        missing = None

        def run(self, model: object) -> Part:
            part = Part("broken", "Broken")
            part.claim("one is two", False)
            return part

    monkeypatch.setitem(parts.PARTS, "broken", Broken())
    assert session.run_parts(["broken"], model="tiny") == 1
    assert "FAILS  one is two" in capsys.readouterr().out


def test_an_unknown_part_is_refused_with_the_names_there_are() -> None:
    from turnstile.lab.session import UnknownPartError, run_parts

    with pytest.raises(UnknownPartError, match="no part 'nothing'; it has batching"):
        run_parts(["nothing"], model="tiny")


def test_the_document_names_every_part() -> None:
    from turnstile.lab.parts import PARTS

    text = (DIRECTORY.parents[1] / "docs" / "lab.md").read_text()
    assert [name for name in PARTS if f"`{name}`" not in text] == []
