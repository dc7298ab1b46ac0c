"""What can go wrong between a name on the command line and a model in memory."""

from __future__ import annotations


class ModelError(Exception):
    """A model cannot be used. The message is one sentence for the operator, with the way out."""


class ModelNotFoundError(ModelError):
    """The name resolves to nothing: no such file, directory, hub id, or no way to fetch it."""


class UnsupportedModelError(ModelError):
    """The model is sound, but Turnstile does not know its architecture, format or option."""


class CorruptFileError(ModelError):
    """A file contradicts itself or its format: truncated, damaged, or made to do harm."""
