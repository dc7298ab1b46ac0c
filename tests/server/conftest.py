from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from server.fake_engine import FakeEngine
from server.served import Serve, Served
from tiny_models import make_tiny_llama
from turnstile.models.generation import GenerationDefaults
from turnstile.server.app import App
from turnstile.server.config import ServerConfig
from turnstile.server.model import ServedModel
from turnstile.server.service import Service
from turnstile.text.chat import ChatEncoder
from turnstile.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_directory(make_tiny_llama(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def serve(tokenizer: Tokenizer) -> Serve:
    """``async with serve("what the model says", max_num_seqs=1, config={…}) as served:``."""

    @asynccontextmanager
    async def start(
        says: str | Callable[..., list[int]] = "hello world",
        *,
        config: dict[str, Any] | None = None,
        ready: bool = True,
        defaults: GenerationDefaults | None = None,
        **engine_settings: Any,
    ) -> AsyncIterator[Served]:
        script: Callable[..., list[int]]
        if isinstance(says, str):
            ids = tokenizer.encode(says, add_special_tokens=False)
            script = lambda generation, sample: ids  # noqa: E731
        else:
            script = says
        engine = FakeEngine(script, **engine_settings)
        service = Service(ServerConfig(**(config or {})), engine)
        model = None
        if ready:
            info = await engine.start()
            model = ServedModel(
                names=["tiny", "alias"],
                tokenizer=tokenizer,
                chat=ChatEncoder(tokenizer),
                defaults=defaults or GenerationDefaults(),
                info=info,
            )
            service.ready(model)
        app = App(service)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield Served(service, engine, app, client, tokenizer)
        for stream in engine.streams:
            stream.cancel()
        await asyncio.sleep(0)

    return start
