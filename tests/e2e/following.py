"""Many streams at once over real sockets, watched while they run: :class:`Followed`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from e2e.harness import PATIENCE


@dataclass
class Order:
    """A request to make: its path, and its body without ``stream``."""

    name: str
    path: str
    body: dict[str, Any]
    stream: bool = True
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def n(self) -> int:
        """The samples it asks for."""
        return int(self.body.get("n", 1))


class Followed:
    """One answer as it grows: everything a client could compare, by choice."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.status = 0
        self.text = [""] * order.n
        self.finish: list[str | None] = [None] * order.n
        self.logprobs: list[list[Any]] = [[] for _ in range(order.n)]
        self.chunks = [0] * order.n
        """Chunks with text: without speculation, at most as many as tokens."""
        self.usage: dict[str, Any] | None = None
        self.errors: list[Any] = []
        self.done = 0
        self.keep_alives = 0

    @property
    def answer(self) -> tuple[Any, ...]:
        """What must not depend on anything but the request."""
        usage = None
        if self.usage is not None:
            usage = (self.usage["prompt_tokens"], self.usage["completion_tokens"])
        return (self.status, self.text, self.finish, self.logprobs, usage, self.errors)

    async def run(self, client: httpx.AsyncClient) -> None:
        """Make the request and follow it to its end."""
        order = self.order
        body = order.body
        if order.stream:
            body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with client.stream("POST", order.path, json=body, headers=order.headers) as answer:
            self.status = answer.status_code
            if not order.stream or answer.status_code != 200:
                self._take(msgspec.json.decode(await answer.aread()))
                return
            async for line in answer.aiter_lines():
                if line.startswith(":"):
                    self.keep_alives += 1
                elif line == "data: [DONE]":
                    self.done += 1
                elif line:
                    assert line.startswith("data: "), line
                    assert not self.done, f"after [DONE]: {line}"
                    self._take(msgspec.json.decode(line[6:]))

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.errors.append(event["error"])
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            index = choice["index"]
            message = choice.get("delta") or choice.get("message") or {}
            text = choice.get("text") or message.get("content") or ""
            self.text[index] += text
            self.chunks[index] += bool(text)
            if choice["finish_reason"] is not None:
                assert self.finish[index] is None, "two finish reasons"
                self.finish[index] = choice["finish_reason"]
            if choice.get("logprobs"):
                self.logprobs[index].append(_values(choice["logprobs"]))


def _values(logprobs: dict[str, Any]) -> Any:
    """Log-probabilities of a chunk, in either endpoint's form, without text offsets."""
    if "content" in logprobs:
        return logprobs["content"]
    return [logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"]]


async def follow(
    url: str,
    orders: Sequence[Order],
    meanwhile: Callable[[list[Followed]], Any] | None = None,
) -> list[Followed]:
    """Make all requests at once; ``meanwhile(followed)`` may be a coroutine function that watches
    and disturbs. Returns when every answer has ended.
    """
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300.0, limits=limits) as client:
        followed = [Followed(order) for order in orders]
        async with asyncio.TaskGroup() as group:
            for each in followed:
                group.create_task(each.run(client))
            if meanwhile is not None:
                await meanwhile(followed)
    return followed


async def until(
    condition: Callable[[], object],
    what: str | Callable[[], str] = "it did not come",
    seconds: float = PATIENCE,
) -> None:
    """:func:`e2e.harness.until` where there is an event loop, which goes on."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what if isinstance(what, str) else what()
        await asyncio.sleep(0.005)
