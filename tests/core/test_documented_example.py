"""The example in the documents runs, and prints what it is said to print."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "core-without-a-model.md"


def test_the_core_batches_what_is_no_language_model() -> None:
    text = PAGE.read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    assert len(code.splitlines()) <= 80
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(code, str(PAGE), "exec"), {"__name__": "example"})
    assert printed.getvalue() == shown
