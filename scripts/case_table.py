"""The table of reported cases in tests/cases/README.md: which tests try which case.

``python scripts/case_table.py`` rewrites the column of tests; ``make lint`` says when it is stale.
A test names its cases in its function name (``test_b35_…``), in its docstring, or in the comment
right above it.
"""

from __future__ import annotations

import ast
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
TABLE = TESTS / "cases" / "README.md"

_IN_NAME = re.compile(r"(?<=_)b(\d+)(?=_)")
_IN_TEXT = re.compile(r"\bB(\d+)\b")
_ROW = re.compile(r"^\| B(\d+) \|([^|]*)\|([^|]*)\|([^|]*)\|([^|]*)\|$")


def cases_of(test: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> set[int]:
    """The cases a test says it tries."""
    said = {int(number) for number in _IN_NAME.findall(test.name)}
    texts = [ast.get_docstring(test) or ""]
    above = min([test.lineno, *(d.lineno for d in test.decorator_list)]) - 2
    while above >= 0 and lines[above].startswith("#"):
        texts.append(lines[above])
        above -= 1
    return said | {int(number) for text in texts for number in _IN_TEXT.findall(text)}


def tests_by_case() -> dict[int, set[Path]]:
    """For each case the files with tests of it."""
    found: dict[int, set[Path]] = defaultdict(set)
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text()
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if not node.name.startswith("test_"):
                    continue
                for case in cases_of(node, lines):
                    found[case].add(path)
    return found


def cell(files: set[Path]) -> str:
    """A case's column: its own directory's tests first."""
    own = TABLE.parent
    order = sorted(files, key=lambda path: (path.parent != own, path))
    links = []
    for path in order:
        link = os.path.relpath(path, own)
        label = path.name if path.parent == own else str(path.relative_to(TESTS))
        links.append(f"[{label}]({link})")
    return ", ".join(links)


def rewritten() -> str:
    """The page with its column as it should be."""
    found = tests_by_case()
    lines = []
    for line in TABLE.read_text().splitlines():
        row = _ROW.match(line)
        if row:
            number, kind, wrong, _, choice = row.groups()
            line = f"| B{number} |{kind}|{wrong}| {cell(found[int(number)])} |{choice}|"
        lines.append(line)
    return "\n".join(lines) + "\n"


def problems() -> Iterator[str]:
    """What is wrong with the table, as sentences."""
    text = TABLE.read_text()
    rows = [int(row.group(1)) for row in map(_ROW.match, text.splitlines()) if row]
    found = tests_by_case()
    name = TABLE.relative_to(ROOT)
    for case in sorted(set(found) - set(rows)):
        files = ", ".join(sorted(path.name for path in found[case]))
        yield f"{name}: {files} names the case B{case}, which the table does not have"
    for case in rows:
        if not found[case]:
            yield f"{name}: no test names the case B{case}"
    if rewritten() != text:
        yield f"{name} is stale: run scripts/case_table.py"


if __name__ == "__main__":
    TABLE.write_text(rewritten())
