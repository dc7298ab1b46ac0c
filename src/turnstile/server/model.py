"""What is served, as the HTTP side knows it: :class:`ServedModel`."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from functools import cached_property

from turnstile import __version__
from turnstile.engine.protocol import EngineInfo
from turnstile.models.generation import GenerationDefaults
from turnstile.server.errors import ApiError
from turnstile.text.chat import ChatEncoder
from turnstile.text.sections import SectionCache
from turnstile.text.tokenizer import Tokenizer

_SHOWN_NAME = 100


@dataclass(kw_only=True)
class ServedModel:
    """The model's names, its tokenizer and template, and the limits that requests meet.

    ``names[0]`` is the one reported; all of them are understood. ``defaults`` fill in
    what a request leaves out.
    """

    names: list[str]
    tokenizer: Tokenizer
    chat: ChatEncoder
    defaults: GenerationDefaults
    info: EngineInfo
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        """The name reported to clients."""
        return self.names[0]

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its output together."""
        return self.info.max_model_len

    @property
    def vocab_size(self) -> int:
        """Ids below this are valid in prompts."""
        return self.info.vocab_size

    @cached_property
    def fingerprint(self) -> str:
        """Changes when answers may: a name, a version, and the build of the engine."""
        made_of = (self.name, self.info.weight_format, self.info.backend, self.info.kv_dtype)
        digest = hashlib.sha256(repr(made_of).encode()).hexdigest()
        return f"turnstile-{__version__}-{digest[:8]}"

    @cached_property
    def sections(self) -> SectionCache | None:
        """Long sections of chats that were tokenized before; None where nothing of a prompt is to
        be remembered.
        """
        return SectionCache(self.tokenizer) if self.info.prefix_caching else None

    def check_name(self, name: str | None) -> None:
        """Raise :class:`ApiError` 404 for a model that is not this one. None is this one."""
        if name is not None and name not in self.names:
            shown = name if len(name) <= _SHOWN_NAME else name[:_SHOWN_NAME] + "…"
            raise ApiError(
                404,
                f"The model {shown!r} is not served here; there is {', '.join(self.names)}.",
                param="model",
                code="model_not_found",
            )

    def card(self, name: str) -> dict[str, object]:
        """One item of ``/v1/models``."""
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "turnstile",
            "root": self.name,
            "parent": None,
            "max_model_len": self.max_model_len,
            "permission": [],
        }
