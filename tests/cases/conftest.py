from __future__ import annotations

from pathlib import Path

import pytest

from cases.servers import LONG_CONTEXT, LONG_POOL
from e2e.harness import ServerProcess
from e2e.pool import Srv
from tiny_models import make_tiny_llama
from turnstile.models.default_model import NAME


@pytest.fixture
def cold(srv: Srv) -> ServerProcess:
    """The usual server without a prefix cache: what it answers is right."""
    return srv(pages=512, ctx=2048, chunk=64, seqs=32, queue=1024, prefix=False)


@pytest.fixture(scope="session")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a context in which a request can run for a minute (see ``occupied``)."""
    return make_tiny_llama(tmp_path_factory.mktemp("long"), max_positions=LONG_CONTEXT)


@pytest.fixture
def single(srv: Srv, long: Path) -> ServerProcess:
    """One slot, a queue of four, and a comment in silent streams every half second. The queue is
    bounded in requests only: the endless ones in it would wait for minutes.
    """
    return srv(
        long, pages=LONG_POOL, seqs=1, queue=4, prefix=False,
        sse_keep_alive_interval=0.5, max_queue_wait=0,
    )  # fmt: skip


@pytest.fixture
def real(srv: Srv) -> ServerProcess:
    """The default model, for cases where the text must mean something."""
    return srv(NAME, pages=512, ctx=2048, seqs=8)
