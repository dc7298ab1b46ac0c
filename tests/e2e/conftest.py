from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import ServerProcess

Launch = Callable[..., ServerProcess]


@pytest.fixture
def launch(tiny: Path) -> Iterator[Launch]:
    """Start a server of the case's own with the tiny model; the check is made at the end."""
    with ExitStack() as stack:
        servers: list[ServerProcess] = []

        def start(**settings: Any) -> ServerProcess:
            server = stack.enter_context(ServerProcess(tiny, **settings))
            servers.append(server)
            return server

        yield start
        for server in servers:
            server.check()
