"""Build it: from a static batch to a paged engine, part by part, each with its figures.

    python build.py --tiny            a tiny random model, made in memory
    python build.py                   the default model
    python build.py --tiny --html report.html

The code is in ``src/turnstile/lab``; this is ``turnstile lab`` with its building parts.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from turnstile.cli.main import main

PARTS = ("batching", "memory", "attention", "users", "prefix", "capacity")

if __name__ == "__main__":
    sys.exit(main(["lab", *PARTS, *sys.argv[1:]]))
