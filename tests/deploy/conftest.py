from __future__ import annotations

from pathlib import Path

import pytest

from tiny_models import make_tiny_llama


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of a few hundred kilobytes, with a context of 2,048."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), max_positions=2048)
