"""What the reported cases do with servers. The files of this directory follow the letters of the
reports; the servers themselves come from :mod:`e2e.pool`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from e2e.harness import ServerProcess, text_of, until
from e2e.raw import Raw


def teach_short_outputs(server: ServerProcess, key: str | None = None) -> None:
    """Let admission learn that outputs are one token long: it will then let in more than fits
    when they are not, and pages run out. Without this hardly anybody is ever preempted.
    """
    headers = {"authorization": f"Bearer {key}"} if key else None
    for _ in range(8):
        prompts = [[3 + k] for k in range(32)]
        body = {"prompt": prompts, "max_tokens": 1, "temperature": 0}
        answer = server.http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text


def preemptions(server: ServerProcess) -> float:
    """Sequences that lost their pages so far."""
    return server.metric("turnstile_preemptions_total")


LONG_CONTEXT = 32_768
LONG_POOL = 6_400


@contextlib.contextmanager
def occupied(server: ServerProcess, slots: int, **body: Any) -> Iterator[list[Raw]]:
    """Slots taken by requests that would run for a minute; they leave when the block ends.

    They are not streamed: reading them would be more work than computing them. The server must
    have a context of :data:`LONG_CONTEXT` (the fixture ``long``).
    """
    with _endless(server, slots, body) as holders:
        until(lambda: server.metric("turnstile_requests_running") >= slots)
        yield holders


@contextlib.contextmanager
def queued(server: ServerProcess, count: int, **body: Any) -> Iterator[list[Raw]]:
    """The same without a slot: requests that wait behind those of :func:`occupied`."""
    with _endless(server, count, body) as waiters:
        until(lambda: server.metric("turnstile_requests_waiting") >= count)
        yield waiters


@contextlib.contextmanager
def _endless(server: ServerProcess, count: int, body: dict[str, Any]) -> Iterator[list[Raw]]:
    body = {"temperature": 0, "ignore_eos": True, "max_tokens": 30_000, **body}
    requests = [
        Raw(server, "/v1/completions", prompt=server.tokens(8, seed=500 + k), **body)
        for k in range(count)
    ]
    try:
        yield requests
    finally:
        for request in requests:
            request.reset()


def text(answer: tuple[int, dict[str, Any]], index: int = 0) -> str:
    """The text of one choice of a whole answer, which must be 200."""
    status, body = answer
    assert status == 200, body
    choice = body["choices"][index]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def four_ways(
    server: ServerProcess, messages: list[dict[str, Any]] | None = None, **fields: Any
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Text, finish reason and usage of the same greedy request on both endpoints, streamed and
    not. The completion is given the very ids that the chat becomes.
    """
    messages = messages or [{"role": "user", "content": "abc"}]
    rendered = server.post("/v1/chat/completions/render", messages=messages).json()
    body = {"temperature": 0, "ignore_eos": True} | fields
    for path, prompt in (
        ("/v1/completions", {"prompt": rendered["prompt_token_ids"]}),
        ("/v1/chat/completions", {"messages": messages}),
    ):
        answer = server.post(path, **prompt, **body)
        assert answer.status_code == 200, answer.text
        whole = answer.json()
        usage = {**whole["usage"], "prompt_tokens_details": None}
        yield text((200, whole)), whole["choices"][0]["finish_reason"], usage
        options = {"include_usage": True}
        events = list(server.stream(path, **prompt, **body, stream_options=options))
        reasons = [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]]
        assert len(reasons) == 1
        yield text_of(events), reasons[0], {**events[-1]["usage"], "prompt_tokens_details": None}
