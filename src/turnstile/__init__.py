"""Turnstile: an LLM server built on continuous batching and paged attention."""

__version__ = "0.1.0"
