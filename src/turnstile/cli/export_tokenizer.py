"""``turnstile export-tokenizer``: a tokenizer directory for tools that want one."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App

app = App(name="export-tokenizer", help="Write a model's tokenizer as a Hugging Face directory.")


@app.default
def export_tokenizer(model: str, directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template of a model.

    Parameters
    ----------
    model
        Path, hub id or the default model's name.
    directory
        Where to write; it is made if it is not there.
    """
    from turnstile.models.source import resolve
    from turnstile.text.export import export_tokenizer as export
    from turnstile.text.tokenizer import Tokenizer

    source = resolve(model)
    tokenizer = Tokenizer.from_path(source.tokenizer_path)
    for path in export(tokenizer, directory, max_length=source.config.max_positions):
        print(path)
