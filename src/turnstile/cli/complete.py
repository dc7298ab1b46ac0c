"""``turnstile complete``: one prompt, one answer, for pipes and scripts."""

from __future__ import annotations

import sys

from cyclopts import App

from turnstile.cli.client import DEFAULT_URL, Client

app = App(name="complete", help="Send one prompt to a running server and print what comes.")


@app.default
def complete(
    prompt: str = "-",
    *,
    url: str = DEFAULT_URL,
    api_key: str | None = None,
    model: str | None = None,
    max_tokens: int = 128,
    temperature: float | None = None,
    seed: int | None = None,
    stop: list[str] | None = None,
) -> None:
    """Complete a prompt; the text is printed as it comes.

    Parameters
    ----------
    prompt
        The text to go on from; `-` reads standard input.
    url
        Where the server listens.
    api_key
        The key, if it wants one. Default: TURNSTILE_API_KEY.
    model
        The model's name. Default: the one that is served.
    max_tokens
        Most tokens to print.
    temperature
        0 is greedy. Default: the model's own.
    seed
        For the same answer again.
    stop
        Text at which to stop (repeatable).
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    fields = {"temperature": temperature, "seed": seed, "stop": stop, "model": model}
    body = {"prompt": text, "max_tokens": max_tokens}
    body |= {name: value for name, value in fields.items() if value is not None}
    for chunk in Client(url, api_key).stream("/v1/completions", body):
        for choice in chunk["choices"]:
            sys.stdout.write(choice["text"])
            sys.stdout.flush()
    sys.stdout.write("\n")
