"""Break it: one mechanism after another taken away, the same load with it and without it.

    python break_it.py --tiny         a tiny random model, made in memory
    python break_it.py                the default model
    python break_it.py --tiny --html report.html

The code is in ``src/turnstile/lab``; this is ``turnstile lab`` with its breaking parts.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from turnstile.cli.main import main

PARTS = (
    "admission",
    "preemption",
    "counts",
    "flood",
    "long-prompt",
    "batching",
    "policies",
    "forecast",
)

if __name__ == "__main__":
    sys.exit(main(["lab", *PARTS, *sys.argv[1:]]))
