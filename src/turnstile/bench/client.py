"""Asking a server about itself: its models, and its tokenizer."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import msgspec

from turnstile.bench.http import BrokenResponseError, Pool, Response, Server

LOOK_S = 10.0  # a server that is alive lists its models within these


class ServerError(Exception):
    """The server cannot be measured; the message says why."""


class RefusalError(ServerError):
    """The server answers a question with an HTTP status that is no success."""

    def __init__(self, question: str, status: int, body: bytes) -> None:
        self.status = status
        self.words = _words_of(body)
        super().__init__(f"{question} answers HTTP {status}: {self.words}")


class Tokenizer(Protocol):
    """Text to ids and back."""

    async def __call__(self, text: str) -> list[int]:
        """The ids of a text, without control tokens."""
        ...

    async def decode(self, ids: list[int]) -> str:
        """The text of these ids."""
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...


class RemoteTokenizer:
    """The server's own tokenizer, through ``POST /tokenize`` and ``/detokenize``.

    Sends what both vLLM (``prompt``) and llama-server (``content``) ask for.
    """

    def __init__(self, server: Server, model: str) -> None:
        self._pool = Pool(server)
        self._model = model

    async def __call__(self, text: str) -> list[int]:
        body = {
            "model": self._model,
            "prompt": text,
            "content": text,
            "add_special_tokens": False,
            "add_special": False,
        }
        tokens = (await self._post("/tokenize", body)).get("tokens")
        if not isinstance(tokens, list) or (text and not tokens):
            raise ServerError("the server's /tokenize answers without tokens")
        return tokens

    async def decode(self, ids: list[int]) -> str:
        answer = await self._post("/detokenize", {"model": self._model, "tokens": ids})
        text = answer.get("prompt", answer.get("content"))
        if not isinstance(text, str):
            raise ServerError("the server's /detokenize answers without text")
        return text

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            return await ask(self._pool, "POST", path, msgspec.json.encode(body))
        except RefusalError as error:
            if error.status not in (404, 405) or self._model in error.words:
                raise
            raise ServerError(
                f"the server has no {path}: name its tokenizer with --tokenizer DIRECTORY"
            ) from None

    def close(self) -> None:
        self._pool.close()


class LocalTokenizer:
    """The tokenizer of a model's directory or GGUF file on this machine."""

    def __init__(self, path: str) -> None:
        from turnstile.models.source import resolve
        from turnstile.text.tokenizer import Tokenizer as TextTokenizer

        self._tokenizer = TextTokenizer.from_path(resolve(path).tokenizer_path)

    async def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    async def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)

    def close(self) -> None:
        pass


async def first_model(server: Server) -> str:
    """The name of the first model the server lists. Raises :class:`ServerError`."""
    pool = Pool(server)
    try:
        answer = await ask(pool, "GET", "/v1/models")
    finally:
        pool.close()
    models = answer.get("data")
    if not models:
        raise ServerError("the server lists no model in /v1/models: name one with --model")
    return str(models[0]["id"])


async def wait_until_ready(server: Server, seconds: float) -> str:
    """Wait for the server to list a model, and return its name.

    Raises
    ------
    ServerError
        The last reason, if it does not within so many seconds.
    """
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        try:
            return await asyncio.wait_for(first_model(server), LOOK_S)
        except TimeoutError:
            why = ServerError(f"the server does not answer within {LOOK_S:.0f} s")
        except ServerError as error:
            why = error
        if asyncio.get_running_loop().time() >= deadline:
            raise why
        await asyncio.sleep(0.1)


async def ask(pool: Pool, method: str, path: str, body: bytes = b"") -> dict[str, Any]:
    """Send a request and return the JSON object of its answer. Raises :class:`ServerError`."""
    try:
        answer = msgspec.json.decode(await _send(pool, method, path, body))
    except msgspec.DecodeError as error:
        raise ServerError(f"{method} {path}: {error}") from None
    return answer if isinstance(answer, dict) else {}


async def ask_text(pool: Pool, path: str) -> str:
    """Get a page of text. Raises :class:`ServerError`."""
    return (await _send(pool, "GET", path)).decode("utf-8", "replace")


async def _send(pool: Pool, method: str, path: str, body: bytes = b"") -> bytes:
    response = Response()
    try:
        await pool.send(pool.server.request(method, path, body), response)
    except OSError as error:
        where = f"{pool.server.host}:{pool.server.port}"
        raise ServerError(f"Nobody answers at {where} ({error.strerror or error}).") from None
    except BrokenResponseError as error:
        raise ServerError(f"{method} {path}: {error}") from None
    if response.status != 200:
        raise RefusalError(f"{method} {path}", response.status, response.body)
    return response.body


def _words_of(body: bytes) -> str:
    """What a server says of an error: OpenAI's ``error.message``, or as much of it as fits."""
    try:
        answer = msgspec.json.decode(body)
    except msgspec.DecodeError:
        answer = None
    error = answer.get("error") if isinstance(answer, dict) else None
    told = error.get("message") if isinstance(error, dict) else None
    return told if isinstance(told, str) else body[:200].decode("utf-8", "replace")
