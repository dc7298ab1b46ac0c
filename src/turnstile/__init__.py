"""Turnstile: an LLM server built on continuous batching and paged attention."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from turnstile.engine.params import SamplingParams
    from turnstile.llm import LLM, AsyncLLM
    from turnstile.outputs import CompletionOutput, RequestOutput

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "turnstile.llm",
    "AsyncLLM": "turnstile.llm",
    "CompletionOutput": "turnstile.outputs",
    "RequestOutput": "turnstile.outputs",
    "SamplingParams": "turnstile.engine.params",
}


def __dir__() -> list[str]:
    """What there is to import, without importing it."""
    return sorted({*globals(), *__all__} - {"TYPE_CHECKING"})


def __getattr__(name: str) -> object:
    """Import the Python API when it is asked for: the server and the CLI do without it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
