"""The parts of the lab, by name and in the order of the book's chapter."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from turnstile.lab.model import LabModel
from turnstile.lab.story import Part


@dataclass(frozen=True, slots=True)
class Entry:
    """A part that can be run: ``turnstile.lab.parts.MODULE.run``."""

    name: str
    title: str
    module: str

    def run(self, model: LabModel) -> Part:
        """Compute the part. What it claims is checked by the caller."""
        part = Part(self.name, self.title)
        importlib.import_module(f"turnstile.lab.parts.{self.module}").run(model, part)
        return part


ENTRIES = (
    Entry("batching", "Static batching against continuous batching", "batching"),
    Entry("memory", "A contiguous cache against pages", "memory"),
    Entry("attention", "Attention over pages, in three forms", "attention"),
    Entry("prefix", "A prefix that everybody shares", "prefix"),
)
"""Every part."""

PARTS = {entry.name: entry for entry in ENTRIES}
