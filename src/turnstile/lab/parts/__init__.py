"""The parts of the lab, by name and in the order of the book's chapter."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass

from turnstile.lab.model import LabModel
from turnstile.lab.story import Part


@dataclass(frozen=True, slots=True)
class Entry:
    """A part that can be run: ``FUNCTION`` of ``turnstile.lab.parts.MODULE``.

    ``package``: what has to be installed for it, beyond what Turnstile always needs.
    """

    name: str
    title: str
    module: str
    function: str = "run"
    package: str | None = None

    @property
    def missing(self) -> str | None:
        """The package that it needs and that is not installed."""
        if self.package is None or importlib.util.find_spec(self.package) is not None:
            return None
        return self.package

    def run(self, model: LabModel) -> Part:
        """Compute the part. What it claims is checked by the caller."""
        part = Part(self.name, self.title)
        module = importlib.import_module(f"turnstile.lab.parts.{self.module}")
        getattr(module, self.function)(model, part)
        return part


ENTRIES = (
    Entry("batching", "Static batching against continuous batching", "batching"),
    Entry("memory", "A contiguous cache against pages", "memory"),
    Entry("attention", "Attention over pages, in three forms", "attention", package="torch"),
    Entry("prefix", "A prefix that everybody shares", "prefix"),
    Entry("users", "A hundred users", "users"),
    Entry("capacity", "How many users the same memory holds", "capacity"),
    Entry("admission", "Break it: no admission control", "admission"),
    Entry("preemption", "Break it: no preemption", "admission", "run_preemption"),
    Entry("counts", "Break it: no reference counts", "counts"),
    Entry("flood", "Break it: no fairness under a flood", "flood"),
    Entry("long-prompt", "Break it: no chunks under a long prompt", "long_prompt"),
    Entry("policies", "Orca, vLLM and ours, in the same bytes", "policies"),
    Entry("forecast", "How far admission should look ahead", "policies", "run_forecast"),
)
"""Every part."""

PARTS = {entry.name: entry for entry in ENTRIES}
