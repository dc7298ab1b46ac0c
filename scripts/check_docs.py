"""Checks that the documents are true where a machine can tell.

Relative links lead somewhere, `make` targets that are named exist, and nothing that is tracked
holds an absolute path of somebody's machine or names a package registry's host.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)[^)]*\)")
TARGET = re.compile(r"`make ([a-z-]+)`")
# Spelt in pieces, so that this file does not accuse itself.
FORBIDDEN = re.compile(
    "|".join((r"(?<![\w.])/(?:wo" + r"rk|ro" + r"ot)/", "py" + r"pi\.org", r"registry\.np" + "mjs"))
)
MAX_LINES = 500


def tracked(*patterns: str) -> list[Path]:
    """Files git knows."""
    listed = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def problems() -> list[str]:
    """Everything that is wrong, as sentences."""
    found = []
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for path in tracked("*.md"):
        text = path.read_text()
        name = path.relative_to(ROOT)
        for link in LINK.findall(text):
            local = "://" not in link and not link.startswith("mailto:")
            if local and not (path.parent / link).exists():
                found.append(f"{name}: the link to {link} leads nowhere")
        found += [
            f"{name}: there is no `make {target}`"
            for target in TARGET.findall(text)
            if target not in targets
        ]
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for match in FORBIDDEN.finditer(text):
            found.append(f"{path.relative_to(ROOT)}: {match.group()!r} must not be committed")
    return found


def main() -> int:
    """Print what is wrong; 1 if anything is."""
    found = problems()
    for line in found:
        print(line)
    for path in tracked("src/*.py"):
        lines = len(path.read_text().splitlines())
        if lines > MAX_LINES:
            print(f"note: {path.relative_to(ROOT)} has {lines} lines")
    print("docs: " + (f"{len(found)} problems" if found else "ok"))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
