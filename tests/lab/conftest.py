from __future__ import annotations

import pytest

from turnstile.kernels import create_backend
from turnstile.lab.model import LabModel, open_model
from turnstile.lab.tiny import make_tiny


@pytest.fixture(scope="session")
def tiny() -> LabModel:
    return open_model("tiny")


@pytest.fixture(scope="session")
def tiny_reference() -> LabModel:
    """On the kernels that every machine has."""
    backend = create_backend("cpu", "float32", None, True, 1, name="reference")
    return LabModel("tiny", make_tiny(backend))
