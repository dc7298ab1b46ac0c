"""``turnstile chat``: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from cyclopts import App

from turnstile.cli.client import DEFAULT_URL, Client, ClientError

app = App(name="chat", help="Talk to a running server in the terminal.")

_HELP = "/reset begins anew, /undo takes back the last turn, /quit ends. Ctrl-C stops an answer."


@app.default
def chat(
    message: str | None = None,
    *,
    url: str = DEFAULT_URL,
    api_key: str | None = None,
    model: str | None = None,
    system: str | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
) -> None:
    """Talk to the model; with a message, ask that one thing and leave.

    Parameters
    ----------
    message
        What to say. Default: a conversation, line by line.
    url
        Where the server listens.
    api_key
        The key, if it wants one. Default: TURNSTILE_API_KEY.
    model
        The model's name. Default: the one that is served.
    system
        What the model is told before the conversation.
    max_tokens
        Most tokens of an answer.
    temperature
        0 is greedy. Default: the model's own.
    seed
        For the same answers again.
    """
    client = Client(url, api_key)
    fields = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    settings: dict[str, Any] = {name: v for name, v in fields.items() if v is not None}
    settings["model"] = model or client.model()
    conversation = Conversation(client, settings, system)
    if message is not None:
        conversation.say(message)
        return
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() its line editing and history
        print(f"{settings['model']} at {url}. {_HELP}")
    conversation.loop()


class Conversation:
    """The turns so far."""

    def __init__(self, client: Client, settings: dict[str, Any], system: str | None) -> None:
        self._client = client
        self._settings = settings
        self._opening = [{"role": "system", "content": system}] if system else []
        self._turns: list[dict[str, str]] = list(self._opening)

    def loop(self) -> None:
        """Read lines until there are no more."""
        prompt = "> " if sys.stdin.isatty() else ""
        while True:
            try:
                line = input(prompt).strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return
            if line in ("/quit", "/exit"):
                return
            if line == "/reset":
                self._turns = list(self._opening)
            elif line == "/undo":
                del self._turns[max(len(self._opening), len(self._turns) - 2) :]
            elif line == "/help":
                print(_HELP)
            elif line:
                self._try(line)

    def _try(self, line: str) -> None:
        try:
            self.say(line)
        except ClientError as error:
            del self._turns[-1]
            print(f"turnstile: {error}", file=sys.stderr)

    def say(self, text: str) -> None:
        """Say something and print the answer as it comes; Ctrl-C keeps what there is.

        Raises :class:`ClientError`, on a line of its own, where the server refuses or is lost.
        """
        self._turns.append({"role": "user", "content": text})
        answer = ""
        body = {"messages": self._turns, **self._settings}
        chunks = self._client.stream("/v1/chat/completions", body)
        try:
            for chunk in chunks:
                for choice in chunk["choices"]:
                    piece = choice["delta"].get("content") or ""
                    answer += piece
                    sys.stdout.write(piece)
                    sys.stdout.flush()
        except KeyboardInterrupt:
            chunks.close()  # type: ignore[attr-defined]
        except ClientError:
            if answer:
                print()
            raise
        print()
        self._turns.append({"role": "assistant", "content": answer})
