"""Settings and servers for the whole suite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from e2e.harness import ServerProcess
from e2e.pool import ServerPool, Srv, check_after, flags
from hostile import pytest_addoption as pytest_addoption
from hostile import pytest_configure as pytest_configure
from tiny_models import make_tiny_llama

# How long an example takes is the machine's business: timing is benchmarked, not tested. A run of
# the suite says the same as the one before it; `--hypothesis-profile=thorough` looks for news.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile("suite")


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
        used.setdefault(server, server.engine_pid)
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
