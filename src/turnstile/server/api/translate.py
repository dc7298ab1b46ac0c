"""Chats that come in another form: what :mod:`responses` and :mod:`anthropic` have in common."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec

from turnstile.server.answer.frames import Frames, Outline
from turnstile.server.answer.schemas import ChatRequest
from turnstile.server.answer.tools import ToolUse
from turnstile.server.api.chat import Chats
from turnstile.server.errors import from_exception


class Translated(ChatRequest, kw_only=True):
    """A chat, and what is to be known of the request that it was made of.

    Attributes
    ----------
    places
        Where in it each message comes from, for errors.
    repeated
        What the answer repeats of it.
    """

    places: list[str]
    repeated: dict[str, Any] = msgspec.field(default_factory=dict)


class TranslatedChats(Chats):
    """An endpoint that makes chats of its requests, and something else of their answers.

    Attributes
    ----------
    names
        What fields of a chat are called here, where the name is another one.
    """

    names: ClassVar[dict[str, str]]

    @abstractmethod
    def parse(self, body: bytes) -> ChatRequest:
        """Read the body, and make a :class:`Translated` of it."""

    @abstractmethod
    def make_frames(
        self, request: ChatRequest, outline: Outline, use: ToolUse | None, *, thinks: bool
    ) -> Frames:
        """Who writes the answer."""

    @contextlib.contextmanager
    def naming(self, request: ChatRequest) -> Iterator[None]:
        """Have errors name fields as the client does."""
        assert isinstance(request, Translated)
        try:
            yield
        except Exception as error:
            known = from_exception(error)
            if known is None:
                raise
            if known.param is not None:
                known.param = self._name_of(known.param, request.places)
            raise known from None

    def _name_of(self, param: str, places: list[str]) -> str:
        field, *rest = param.split(".")
        if field == "messages" and rest and rest[0].isdigit() and int(rest[0]) < len(places):
            return ".".join([places[int(rest[0])], *rest[1:]])
        # Tools are flat here: there is no function in them.
        named = (p for p in rest if (field, p) != ("tools", "function"))
        return ".".join([self.names.get(field, field), *(self.names.get(p, p) for p in named)])
