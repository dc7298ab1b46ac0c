"""What ``serve`` shows when it is ready: the model, the memory, and how many users that is."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from turnstile import __version__
from turnstile.server.config import ServerConfig
from turnstile.server.service import Service

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from turnstile.engine.protocol import EngineInfo, Loading

logger = logging.getLogger("turnstile.server")


def capacity_line(info: EngineInfo) -> str:
    """The size of the KV pool, in vLLM's words."""
    device = "GPU" if info.device.startswith("cuda") else "CPU"
    concurrency = info.kv_tokens / info.max_model_len
    return (
        f"{device} KV cache size: {info.kv_tokens:,} tokens, Maximum concurrency for "
        f"{info.max_model_len:,} tokens per request: {concurrency:.2f}x"
    )


def on_terminal(config: ServerConfig) -> bool:
    """Whether somebody watches who likes bars and panels."""
    return sys.stderr.isatty() and config.log_format in ("auto", "color")


def warnings_about(info: EngineInfo) -> Iterator[str]:
    """What an operator should know of an engine before its users do."""
    if info.kv_tokens < info.max_model_len:
        yield (
            f"The KV pool holds {info.kv_tokens:,} tokens, less than --max-model-len "
            f"({info.max_model_len:,}): requests that need more are refused. Give it more memory "
            "(--kv-cache-memory-bytes, --num-pages), or lower --max-model-len."
        )
    if info.admission == "unchecked":
        yield (
            "With --admission unchecked nobody is preempted, and requests fail when the KV pool is "
            "full. It is there to show what admission is for."
        )


class LoadingBar:
    """How far loading has come: a bar on a terminal, one log line a stage elsewhere."""

    def __init__(self, config: ServerConfig) -> None:
        self._bar = on_terminal(config)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._stage = ""

    def show(self, loading: Loading) -> None:
        """Take the latest news."""
        if not self._bar:
            if loading.stage != self._stage:
                self._stage = loading.stage
                logger.info("Loading: %s", loading.stage)
            return
        if self._progress is None or self._task is None:
            from rich.console import Console
            from rich.progress import Progress

            self._progress = Progress(console=Console(stderr=True), transient=True)
            self._progress.start()
            self._task = self._progress.add_task(loading.stage, total=1.0)
        self._progress.update(self._task, description=loading.stage, completed=loading.fraction)

    def close(self) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def announce(service: Service, url: str, seconds: float) -> None:
    """Say that the server is ready: a panel on a terminal, log lines elsewhere."""
    info = service.engine.info
    assert info is not None
    assert service.model is not None
    for warning in warnings_about(info):
        logger.warning("%s", warning)
    if on_terminal(service.config):
        _show_panel(service, info, url, seconds)
        return
    names = ", ".join(service.model.names)
    logger.info(
        "Model %s: %s, %.1f M parameters, %s weights, %s on %s with %d threads",
        names, info.architecture, info.num_parameters / 1e6, info.weight_format, info.backend,
        info.device, info.threads,
    )  # fmt: skip
    logger.info("%s", capacity_line(info))
    logger.info("Ready in %.1f s at %s", seconds, url)


def _show_panel(service: Service, info: EngineInfo, url: str, seconds: float) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.panel import Panel
    from rich.table import Table

    assert service.model is not None
    kv_mib = info.kv_bytes / 2**20
    rows = {
        "model": ", ".join(service.model.names),
        "kind": f"{info.architecture}, {info.num_parameters / 1e6:.1f} M parameters",
        "weights": f"{info.weight_format}, {info.weight_bytes / 2**20:.0f} MiB",
        "compute": f"{info.backend} on {info.device}, {info.threads} threads"
        + (", exact" if info.exact else ""),
        "KV pool": f"{info.kv_tokens:,} tokens in {info.num_pages:,} pages of {info.page_size}, "
        f"{info.kv_dtype}, {kv_mib:.0f} MiB",
        "batch": f"{info.max_num_seqs} sequences, {info.max_num_batched_tokens} tokens a step, "
        f"admission {info.admission}",
        "context": f"{info.max_model_len:,} tokens",
        "API": f"{url}/v1",
        "live map": f"{url}/" if service.config.enable_dashboard else "off",
        "docs": f"{url}/docs" if service.config.enable_docs else "off",
        "metrics": f"{url}/metrics",
    }
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, escape(value))
    console = Console(stderr=True, highlight=False)
    title = f"Turnstile {__version__}, ready in {seconds:.1f} s"
    console.print(Panel(table, title=title, title_align="left", expand=False))
    console.print(capacity_line(info), soft_wrap=True)
    if service.keys.open:
        console.print("[dim]No API key: whoever reaches this address may use it.[/dim]")
