from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cases.servers import LONG_CONTEXT, LONG_POOL, ServerPool, check_after, engine_pid, flags
from e2e.harness import ServerProcess
from tiny_models import make_tiny_llama
from turnstile.models.default_model import NAME

Srv = Callable[..., ServerProcess]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of a few hundred kilobytes, with a context of 2,048."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), max_positions=2048)


@pytest.fixture(scope="session")
def server_pool() -> Iterator[ServerPool]:
    pool = ServerPool()
    yield pool
    pool.close()


@pytest.fixture
def srv(server_pool: ServerPool, tiny: Path) -> Iterator[Srv]:
    """``srv(pages=64, …)``: a server with these flags, shared with the other cases that ask for
    the same. After the case each one it used is checked.
    """
    used: dict[ServerProcess, int] = {}

    def get(model: str | Path | None = None, **words: Any) -> ServerProcess:
        server = server_pool.get(model or tiny, flags(**words))
        used.setdefault(server, engine_pid(server))
        return server

    yield get
    for server, pid in used.items():
        try:
            check_after(server, pid)
        except BaseException:
            server_pool.drop(server)
            raise


@pytest.fixture
def server(srv: Srv) -> ServerProcess:
    """The server for cases that want nothing special."""
    return srv(pages=512, ctx=2048, chunk=64, seqs=32, queue=1024)


@pytest.fixture
def cold(srv: Srv) -> ServerProcess:
    """The same without a prefix cache: what it answers is right."""
    return srv(pages=512, ctx=2048, chunk=64, seqs=32, queue=1024, prefix=False)


@pytest.fixture(scope="session")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a context in which a request can run for a minute (see ``occupied``)."""
    return make_tiny_llama(tmp_path_factory.mktemp("long"), max_positions=LONG_CONTEXT)


@pytest.fixture
def single(srv: Srv, long: Path) -> ServerProcess:
    """One slot, a queue of four, and a comment in silent streams every half second."""
    return srv(long, pages=LONG_POOL, seqs=1, queue=4, prefix=False, sse_keep_alive_interval=0.5)


@pytest.fixture
def real(srv: Srv) -> ServerProcess:
    """The default model, for cases where the text must mean something."""
    return srv(NAME, pages=512, ctx=2048, seqs=8)
