"""``python -m turnstile``."""

from turnstile.cli.main import run

run()
