"""What can go wrong with text. Every message is a sentence for the person who can act on it."""

from __future__ import annotations


class TextError(Exception):
    """Base of the errors raised in :mod:`turnstile.text`."""


class TokenizerError(TextError):
    """A tokenizer's files or metadata are missing, damaged, or of a kind not supported."""


class MessageError(TextError):
    """The client's chat messages are malformed. ``param`` names the field, for the error body."""

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(message)
        self.param = param


class TemplateError(TextError):
    """The chat template refused the messages, or cannot be used.

    The text is the template's own complaint (its ``raise_exception``) or one of ours; never a
    piece of the template's source and never a traceback.
    """


CANNOT_FOLLOW = "The grammar cannot be followed: "
"""Beginning of the message of a :class:`GrammarError` that shows only with the model's own
vocabulary, in the engine. It comes to the API process as the error of a row; by this beginning it
is told apart from faults of ours, and answered with 400.
"""


class GrammarError(TextError):
    """A schema, regular expression or grammar cannot be compiled, or is too large."""


class UncheckedGrammarError(TextError):
    """Whether a grammar compiles could not be found out, which is not the grammar's fault."""
