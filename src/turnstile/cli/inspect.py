"""``turnstile inspect``: what a model is, without loading it."""

from __future__ import annotations

from collections import Counter

from cyclopts import App

from turnstile.models.default_model import NAME

app = App(name="inspect", help="Say what is in a model, and what serving it takes.")


@app.default
def inspect(model: str = NAME, *, revision: str | None = None, tensors: bool = False) -> None:
    """Read a model's metadata and say what it is.

    Parameters
    ----------
    model
        Path, hub id or the default model's name.
    revision
        Branch, tag or commit of a hub id.
    tensors
        List every tensor.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from turnstile.models.source import resolve
    from turnstile.text.tokenizer import Tokenizer

    source = resolve(model, revision=revision)
    config, files = source.config, source.open_tensors()
    kinds = Counter[str]()
    for name in files.names():
        kinds[files.info(name).dtype] += files.info(name).num_bytes
    kv_bytes = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    tokenizer = Tokenizer.from_path(source.tokenizer_path)
    stored = ", ".join(f"{kind} {size / 1e6:.1f} MB" for kind, size in kinds.most_common())
    heads = f"{config.num_heads} query, {config.num_kv_heads} KV, {config.head_dim} wide"
    facts = {
        "name": source.name,
        "path": str(source.path),
        "architecture": config.family.name,
        "parameters": f"{config.num_parameters / 1e6:.1f} M",
        "weights": stored,
        "layers": f"{config.num_layers}, {config.hidden_size} wide, "
        f"MLP {config.intermediate_size} wide",
        "heads": heads,
        "context": f"{config.max_positions} tokens",
        "vocabulary": f"{config.vocab_size} ids, {tokenizer.vocab_size} in the tokenizer",
        "end of text": ", ".join(tokenizer.token_text(i) for i in sorted(tokenizer.stop_ids)),
        "chat template": "yes" if "default" in tokenizer.chat_templates else "no",
        "KV cache": f"{kv_bytes} bytes a token in 16 bits; "
        f"{kv_bytes * config.max_positions / 2**20:.0f} MiB for one full context",
    }
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(f"[bold]{name}[/bold]", escape(value))
    console = Console(highlight=False)
    console.print(table)
    if tensors:
        for name in files.names():
            info = files.info(name)
            console.print(f"{name}  {info.dtype}  {'×'.join(map(str, info.shape))}", markup=False)
