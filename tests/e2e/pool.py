"""Servers that cases share: started once for each set of flags, checked after every case.

What the words of ``srv`` mean is in :func:`flags`, what is checked after a case in
:func:`check_after`. A case that harms its server, or needs one of which it knows all that ever
happened to it, starts its own (:class:`e2e.harness.ServerProcess`).
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from e2e.harness import ServerProcess

Srv = Callable[..., ServerProcess]
MOST_ALIVE = 8
"""Servers that are kept for the next case; the one used longest ago goes first."""


def flags(
    *,
    pages: int = 64,
    ctx: int | None = None,
    chunk: int = 128,
    seqs: int = 8,
    queue: int = 32,
    prefix: bool = True,
    **more: Any,
) -> dict[str, Any]:
    """Flags of ``turnstile serve`` for the reports' words. Without ``ctx``: what the pool holds."""
    return {
        "num_pages": pages,
        "max_model_len": ctx,
        "max_num_batched_tokens": chunk,
        "max_num_seqs": seqs,
        "max_num_queued_reqs": queue,
        "enable_prefix_caching": prefix,
        **more,
    }


class ServerPool:
    """Servers by model and flags."""

    def __init__(self) -> None:
        self._alive: OrderedDict[str, ServerProcess] = OrderedDict()

    def get(self, model: str | Path, settings: dict[str, Any]) -> ServerProcess:
        """The server with these flags, started if need be."""
        key = json.dumps([str(model), settings], sort_keys=True, default=str)
        server = self._alive.pop(key, None)
        if server is None:
            while len(self._alive) >= MOST_ALIVE:
                self._alive.popitem(last=False)[1].kill()
            server = ServerProcess(model, **settings).__enter__()
        self._alive[key] = server
        return server

    def close(self) -> None:
        """End them all."""
        while self._alive:
            self._alive.popitem()[1].kill()

    def drop(self, server: ServerProcess) -> None:
        """End one that a case has spoilt, so that the next case starts its own."""
        for key, alive in list(self._alive.items()):
            if alive is server:
                del self._alive[key]
        server.kill()


def check_after(server: ServerProcess, pid: int) -> None:
    """What must hold after every case: healthy, the canary as before and soon, nobody runs or
    waits, no page held, free and cached are all there are, no traceback, the same processes.
    """
    server.check()
    assert server.engine_pid == pid, "the engine was restarted"
