from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import ServerProcess
from tiny_models import make_tiny_llama

Launch = Callable[..., ServerProcess]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of a few hundred kilobytes, with a context of 2,048."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), max_positions=2048)


@pytest.fixture
def launch(tiny: Path) -> Iterator[Launch]:
    """Start the real server with the tiny model; the check is made at the end."""
    with ExitStack() as stack:
        servers: list[ServerProcess] = []

        def start(**settings: Any) -> ServerProcess:
            server = stack.enter_context(ServerProcess(tiny, **settings))
            servers.append(server)
            return server

        yield start
        for server in servers:
            server.check()
