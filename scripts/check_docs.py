"""Checks that the documents are true where a machine can tell.

Relative links and their anchors lead somewhere; the `make` targets, `turnstile` verbs,
`turnstile serve` flags, files and tests that are named exist; every page is in the index, and every
module of `server` and `text` in the table of its page; nothing that is tracked holds an absolute
path of somebody's machine or names a package registry's host; what is generated (the page of
metrics, the dashboard, the alert rules) is current, and every alert has its section. Files and
functions over the size gate are reported, and fail nothing.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import case_table

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)[^)]*\)")
HEADING = re.compile(r"^#+ +(.+)$", re.M)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"(?:\./)?((?:[\w.-]+/)+[\w-]+\.(?:py|md|h|cpp|toml|service))")
# Spelt in pieces, so that this file does not accuse itself.
FORBIDDEN = re.compile(
    "|".join(
        (
            r"(?<![\w.])/(?:wo" + r"rk|ro" + r"ot)/",
            "py" + r"pi\.org",
            "python" + r"hosted\.org",
            r"registry\.np" + "mjs",
            "download\\.py" + r"torch\.org",
        )
    )
)
MAX_FILE, MAX_FUNCTION = 500, 60
MODULES_OF = {"server": "http.md", "text": "text.md"}
"""Packages whose modules are each named on a page."""


def tracked(*patterns: str) -> list[Path]:
    """Files git knows."""
    listed = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def anchors(path: Path) -> set[str]:
    """The names a heading can be linked by."""
    text = FENCE.sub("", path.read_text())
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(text))
    return {name.strip().replace(" ", "-") for name in plain}


def broken_links(path: Path, text: str) -> Iterator[str]:
    """Relative links that lead nowhere."""
    for link in LINK.findall(FENCE.sub("", text)):
        if "://" in link or link.startswith("mailto:"):
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        if not target.exists():
            yield f"the link to {link} leads nowhere"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield f"{link}: there is no such heading"


def commands(text: str) -> Iterator[str]:
    """Shell commands: lines of shell blocks, and code within a line."""
    for language, body in FENCE.findall(text):
        if language in ("sh", "bash", "console"):
            yield from body.replace("\\\n", " ").splitlines()
    yield from CODE.findall(FENCE.sub("", text))


def unknown_commands(text: str, targets: set[str], flags: set[str]) -> Iterator[str]:
    """Commands that name what does not exist."""
    from turnstile.cli.main import VERBS

    for command in commands(text):
        words = command.split("#")[0].split()
        if len(words) < 2:
            continue
        if words[0] == "make" and words[1] not in targets:
            yield f"there is no `make {words[1]}`"
        if words[0].endswith("turnstile") and words[1].isalpha() and words[1] not in VERBS:
            yield f"there is no `turnstile {words[1]}`"
        if words[0].endswith("turnstile") and words[1] == "serve":
            for word in words[2:]:
                flag = word.partition("=")[0]
                if flag.startswith("--") and flag.removeprefix("--no-") not in flags:
                    yield f"`turnstile serve` has no {flag}"


def unknown_tests(text: str, tests: set[str]) -> Iterator[str]:
    """Tests that are named as proof and do not exist."""
    for code in CODE.findall(FENCE.sub("", text)):
        if re.fullmatch(r"test_[a-z0-9_]+", code) and code not in tests:
            yield f"there is no {code}"


def unknown_files(text: str, files: set[str]) -> Iterator[str]:
    """Files of the tree that are named and are not there.

    Documents name them from wherever is shortest (`core/gate.py`), so the end has to match.
    """
    for word in " ".join(CODE.findall(FENCE.sub("", text))).split():
        named = FILE.fullmatch(word)
        if named and not any(f"/{file}".endswith(f"/{named.group(1)}") for file in files):
            yield f"there is no file {word}"


def test_names() -> set[str]:
    """The names of all tests, and of their files."""
    names = {path.stem for path in tracked("tests/*.py")}
    for path in tracked("tests/*.py"):
        names |= set(re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.M))
    return names


def serve_flags() -> set[str]:
    """Flags of ``turnstile serve``, each with and without its dashes in front."""
    from dataclasses import fields

    from turnstile.cli.settings import ALIASES
    from turnstile.engine.config import EngineConfig
    from turnstile.server.config import ServerConfig

    names = [f.name.replace("_", "-") for c in (EngineConfig, ServerConfig) for f in fields(c)]
    names += [*ALIASES, "config", "debug", "help"]
    return {name for plain in names for name in (plain, f"--{plain}")}


@cache
def known() -> tuple[set[str], set[str], set[str], set[str]]:
    """What there is to name: make targets, flags of ``turnstile serve``, tests, files."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    return targets, serve_flags(), test_names(), {str(p.relative_to(ROOT)) for p in tracked()}


def wrong_in(path: Path) -> Iterator[str]:
    """What a document names and is not there."""
    text = path.read_text()
    targets, flags, tests, files = known()
    yield from broken_links(path, text)
    yield from unknown_commands(text, targets, flags)
    yield from unknown_tests(text, tests)
    yield from unknown_files(text, files)


def unlisted() -> Iterator[str]:
    """Pages and modules that nobody finds."""
    docs = ROOT / "docs"
    index = (docs / "README.md").read_text()
    for page in tracked("docs/*.md"):
        link = page.relative_to(docs)
        if page.name != "README.md" and f"({link})" not in index:
            yield f"docs/README.md has no link to {link}"
    for package, name in MODULES_OF.items():
        page = docs / name
        for module in tracked(f"src/turnstile/{package}/*.py"):
            if module.stem != "__init__" and f"`{module.stem}`" not in page.read_text():
                yield f"docs/{page.name} does not say what {package}/{module.name} is"


def problems() -> list[str]:
    """Everything that is wrong, as sentences."""
    found = list(unlisted())
    for path in tracked("*.md"):
        found += [f"{path.relative_to(ROOT)}: {each}" for each in wrong_in(path)]
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for match in FORBIDDEN.finditer(text):
            found.append(f"{path.relative_to(ROOT)}: {match.group()!r} must not be committed")
    return found


def stale() -> list[str]:
    """What is made from the table of metrics, and is not as the table says."""
    import make_dashboard
    import make_metrics_docs
    from monitoring.alerts import RUNBOOK, alerts

    runbook = anchors(ROOT / RUNBOOK)
    missing = [
        f"{RUNBOOK}: there is no section for the alert {alert.name}"
        for alert in alerts()
        if alert.name.lower() not in runbook
    ]
    return [*make_metrics_docs.stale(), *make_dashboard.stale(), *missing]


def oversized() -> Iterator[str]:
    """Files and functions over the gate."""
    for path in tracked("src/*.py", "tests/*.py", "scripts/*.py"):
        name = path.relative_to(ROOT)
        text = path.read_text()
        lines = len(text.splitlines())
        if lines > MAX_FILE:
            yield f"{name} has {lines} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION:
                    yield f"{name}:{node.lineno}: {node.name} has {length} lines"


def main() -> int:
    """Print what is wrong; 1 if anything is."""
    sys.path.insert(0, str(ROOT / "src"))
    found = problems() + stale() + list(case_table.problems())
    for line in found:
        print(line)
    for line in oversized():
        print(f"note: {line}")
    print("documents: " + (f"{len(found)} problems" if found else "ok"))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
