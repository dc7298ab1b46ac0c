"""Turnstile where torch is not installed: the native kernels need none of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.harness import ROOT
from tiny_models import make_tiny_llama
from turnstile.kernels import BackendError, create_backend, native
from turnstile.lab import session

WITH_TORCH = {
    "turnstile.kernels.paged_attention",
    "turnstile.kernels.reference",
    "turnstile.kernels.row_math",
    "turnstile.kernels.row_products",
    "turnstile.lab.attention",
    "turnstile.lab.parts.attention",
}
"""The modules that compute with torch."""

BLOCK = "import sys\nsys.modules['torch'] = None\n"


def run(code: str) -> str:
    """What a program says in a process that cannot import torch."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCK + code], capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    return done.stdout


def test_every_module_can_be_imported_but_those_that_compute_with_torch() -> None:
    failed = run(
        "import importlib, pkgutil, turnstile\n"
        "for module in pkgutil.walk_packages(turnstile.__path__, 'turnstile.'):\n"
        "    if module.name.endswith('__main__'): continue\n"
        "    try: importlib.import_module(module.name)\n"
        "    except ModuleNotFoundError as error: print(module.name, error.name)\n"
    )
    assert set(failed.splitlines()) == {f"{name} torch" for name in WITH_TORCH}


@pytest.mark.skipif(not native.available()[0], reason="the native kernels are not built")
def test_the_native_kernels_answer_without_it(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "tiny")
    said = run(
        "from turnstile import LLM, SamplingParams\n"
        f"llm = LLM({str(model)!r}, num_pages=64)\n"
        "answer = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4))[0]\n"
        "print(len(answer.outputs[0].token_ids))\n"
    )
    assert said == "4\n"


def test_who_asks_for_the_reference_is_told_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [name for name in sys.modules if name in WITH_TORCH]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(BackendError, match="reference: needs torch, which is not installed"):
        create_backend("cpu", name="reference")


def test_a_part_of_the_lab_that_needs_it_says_so_before_any_part_is_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(session, "open_model", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(session.MissingPackageError, match="'attention' needs torch"):
        session.run_parts(None)
    monkeypatch.undo()
    assert session.PARTS["attention"].missing is None
