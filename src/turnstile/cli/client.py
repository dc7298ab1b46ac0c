"""What ``chat`` and ``complete`` share: speaking to a running server."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import httpx

DEFAULT_URL = "http://127.0.0.1:8000"
_CONNECT_SECONDS = 5.0


class ClientError(RuntimeError):
    """The server is not there, or said no; the message is for people."""


def connection(url: str, key: str | None = None) -> tuple[str, dict[str, Any]]:
    """Where a server is, and what a client of httpx needs beside that: the key, and patience.

    Raises :class:`ClientError` for a URL or a key that no request could carry.
    """
    base = url.rstrip("/").removesuffix("/v1")
    secret = key or next(iter(os.environ.get("TURNSTILE_API_KEY", "").split()), None)
    if secret is not None and not (secret.isascii() and secret.isprintable()):
        raise ClientError("The API key has characters that no HTTP header can carry.")
    if not base.startswith(("http://", "https://")):
        raise ClientError(f"--url {base} must begin with http:// or https://.")
    try:
        httpx.URL(base)
    except httpx.InvalidURL as error:
        raise ClientError(f"--url {base} is no URL: {error}.") from None
    headers = {"authorization": f"Bearer {secret}"} if secret else {}
    return base, {"headers": headers, "timeout": httpx.Timeout(None, connect=_CONNECT_SECONDS)}


class Client:
    """A connection to one server.

    Parameters
    ----------
    url
        Where it listens, with or without ``/v1``.
    key
        The API key; TURNSTILE_API_KEY otherwise.

    Raises :class:`ClientError` for a URL or a key that no request could carry.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self._url, settings = connection(url, key)
        self._http = httpx.Client(base_url=self._url, **settings)

    def model(self) -> str:
        """The name of the model that is served. Raises :class:`ClientError`."""
        answer = self._send("GET", "/v1/models")
        names = [card["id"] for card in answer.json()["data"]]
        if not names:
            raise ClientError(f"The server at {self._url} is still loading its model.")
        return str(names[0])

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Send a streaming request and yield its chunks. Raises :class:`ClientError`."""
        try:
            with self._http.stream("POST", path, json={**body, "stream": True}) as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise ClientError(_refusal(answer))
                for line in answer.iter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    chunk = json.loads(line.removeprefix("data: "))
                    if chunk.get("error"):
                        raise ClientError(chunk["error"]["message"])
                    yield chunk
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _send(self, method: str, path: str) -> httpx.Response:
        try:
            answer = self._http.request(method, path)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if answer.status_code != 200:
            raise ClientError(_refusal(answer))
        return answer

    def _unreachable(self, error: httpx.HTTPError) -> ClientError:
        if isinstance(error, httpx.ConnectError):
            return ClientError(
                f"Nothing listens at {self._url}. Start a server with 'turnstile serve', or say "
                "where it is with --url."
            )
        return ClientError(f"The connection to {self._url} broke: {error or type(error).__name__}.")


def _refusal(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"The server answered {answer.status_code}."
