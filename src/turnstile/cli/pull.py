"""``turnstile pull``: fetch a model before it is needed."""

from __future__ import annotations

import sys

from cyclopts import App

from turnstile.models.default_model import NAME

app = App(name="pull", help="Fetch a model, so that serving starts at once.")


@app.default
def pull(model: str = NAME, *, revision: str | None = None) -> None:
    """Fetch a model, or find that it is here already, and print where it lies.

    Parameters
    ----------
    model
        The default model's name or a hub id; a path is only checked.
    revision
        Branch, tag or commit of a hub id.
    """
    from turnstile.models.source import resolve

    source = resolve(model, revision=revision, report=lambda text: print(text, file=sys.stderr))
    print(source.path)
