"""Writes the Grafana dashboard and the alert rules; `--check` says whether they are current."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from monitoring.alerts import rules  # noqa: E402
from monitoring.grafana import dashboard  # noqa: E402

DASHBOARD = ROOT / "deploy/grafana/dashboard.json"
ALERTS = ROOT / "deploy/prometheus/alerts.yml"


def stale() -> list[str]:
    """What is not as the table says."""
    made = {DASHBOARD: dashboard(), ALERTS: rules()}
    return [
        f"{path.relative_to(ROOT)} is not current: run scripts/make_dashboard.py"
        for path, text in made.items()
        if not path.exists() or path.read_text() != text
    ]


def main() -> int:
    """Write the files, or check them."""
    if "--check" in sys.argv:
        found = stale()
        print("\n".join(found) or "current")
        return 1 if found else 0
    for path, text in ((DASHBOARD, dashboard()), (ALERTS, rules())):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
