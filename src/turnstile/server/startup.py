"""Bringing a model up: the engine and the tokenizer at the same time. :func:`load_model`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from turnstile.engine.client import EngineClient
from turnstile.engine.protocol import Loading
from turnstile.models.source import ModelSource
from turnstile.server.config import ConfigError, ServerConfig
from turnstile.server.model import ServedModel
from turnstile.text.chat import ChatEncoder
from turnstile.text.tokenizer import Tokenizer

Progress = Callable[[Loading], None]
_LOOK = 0.1


async def load_model(
    engine: EngineClient,
    source: ModelSource,
    config: ServerConfig,
    progress: Progress = lambda loading: None,
) -> ServedModel:
    """Start the engine while the tokenizer is read in a thread; returns what is served.

    ``progress`` hears how far the engine has come, whenever that changes.

    Raises :class:`EngineUnavailableError`, :class:`TokenizerError` or :class:`ConfigError`.
    """
    reading = asyncio.create_task(asyncio.to_thread(_read_text_side, source, config))
    watching = asyncio.create_task(_report(engine, progress))
    try:
        info = await engine.start()
        tokenizer, chat = await reading
    finally:
        reading.cancel()
        watching.cancel()
    return ServedModel(
        names=config.served_model_name or [source.name],
        tokenizer=tokenizer,
        chat=chat,
        defaults=source.generation,
        info=info,
    )


async def _report(engine: EngineClient, progress: Progress) -> None:
    last: Loading | None = None
    while True:
        await asyncio.sleep(_LOOK)
        if engine.loading is not None and engine.loading != last:
            last = engine.loading
            progress(last)


def _read_text_side(source: ModelSource, config: ServerConfig) -> tuple[Tokenizer, ChatEncoder]:
    tokenizer = Tokenizer.from_path(source.tokenizer_path)
    template = None
    if config.chat_template is not None:
        path = Path(config.chat_template).expanduser()
        try:
            template = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"Cannot read the chat template {path}: {reason}.") from None
    chat = ChatEncoder(tokenizer, template)
    chat.check()
    return tokenizer, chat
