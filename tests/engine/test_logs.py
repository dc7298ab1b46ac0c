from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from turnstile.engine.logs import configure, wants_color


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def written(form: str) -> str:
    stream = io.StringIO()
    configure("info", form, stream)  # type: ignore[arg-type]
    logger = logging.getLogger("turnstile.test")
    logger.debug("hidden")
    logger.info("hello %s", "you", extra={"fields": {"request_id": "r1", "status": 200}})
    logging.getLogger("other.library").info("hidden as well")
    try:
        raise ValueError("oh")
    except ValueError:
        logger.exception("went wrong")
    return stream.getvalue()


def test_json_lines_carry_fields_and_exceptions() -> None:
    first, second = map(json.loads, written("json").splitlines())
    assert first["message"] == "hello you"
    assert first["level"] == "info"
    assert first["status"] == 200
    assert first["time"].endswith("Z")
    assert "ValueError: oh" in second["exception"]


def test_plain_lines_have_no_escapes_and_name_the_request() -> None:
    text = written("plain")
    assert "\x1b" not in text
    assert "INFO    hello you [r1]" in text
    assert "hidden" not in text


def test_colour_is_for_terminals_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[36m" in written("color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert not wants_color(io.StringIO())
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert wants_color(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_color(io.StringIO())
