"""What the tests of the server share: a server with a scripted engine, and readers of streams."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from server.fake_engine import FakeEngine
from turnstile.server.app import App
from turnstile.server.service import Service
from turnstile.text.tokenizer import Tokenizer

Serve = Callable[..., Any]


@dataclass
class Served:
    """A server with a scripted engine, and a client that speaks to it in this process."""

    service: Service
    engine: FakeEngine
    app: App
    client: httpx.AsyncClient
    tokenizer: Tokenizer

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.client.post(path, json=body)

    async def complete(self, prompt: Any = "hello", **body: Any) -> httpx.Response:
        return await self.post("/v1/completions", prompt=prompt, **body)

    async def chat(self, content: Any = "hello", **body: Any) -> httpx.Response:
        messages = body.pop("messages", [{"role": "user", "content": content}])
        return await self.post("/v1/chat/completions", messages=messages, **body)


def events(answer: httpx.Response) -> list[Any]:
    """The events of a stream, checking its framing byte by byte on the way."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.text.endswith("\n\n")
    frames = answer.text.removesuffix("\n\n").split("\n\n")
    assert frames[-1] == "data: [DONE]"
    parsed = []
    for frame in frames[:-1]:
        if frame.startswith(":"):
            continue
        assert frame.startswith("data: ")
        assert "\n" not in frame
        parsed.append(json.loads(frame.removeprefix("data: ")))
    return parsed


def joined(chunks: list[Any], index: int = 0) -> str:
    """The text of one choice of a stream."""
    text = ""
    for chunk in chunks:
        for choice in chunk.get("choices", []):
            if choice["index"] == index:
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return text
