"""Tokenizer, incremental detokenizer, stop strings and chat templates. Never imports torch."""

from turnstile.text.chat import ChatEncoder, ChatInput, ChatPrompt
from turnstile.text.detokenizer import Detokenizer
from turnstile.text.errors import (
    GrammarError,
    MessageError,
    TemplateError,
    TextError,
    TokenizerError,
)
from turnstile.text.output import Delta, TextOptions, TextStream
from turnstile.text.tokenizer import Tokenizer

__all__ = [
    "ChatEncoder",
    "ChatInput",
    "ChatPrompt",
    "Delta",
    "Detokenizer",
    "GrammarError",
    "MessageError",
    "TemplateError",
    "TextError",
    "TextOptions",
    "TextStream",
    "Tokenizer",
    "TokenizerError",
]
