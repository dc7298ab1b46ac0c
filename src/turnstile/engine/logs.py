"""How log lines look, in both processes alike: plain, in colour, or one JSON object each."""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Literal, TextIO

import msgspec

Format = Literal["auto", "color", "plain", "json"]

ENGINE = "engine"
"""What lines of the engine process are marked with."""

_COLORS = {"DEBUG": "2", "INFO": "36", "WARNING": "33", "ERROR": "31", "CRITICAL": "1;31"}


class TextFormatter(logging.Formatter):
    """``12:30:01 INFO  message``, the level in colour where that is wanted."""

    def __init__(self, *, color: bool, process: str = "") -> None:
        super().__init__()
        self.color = color
        self._process = f"{process}: " if process else ""

    def format(self, record: logging.LogRecord) -> str:
        """Write one record; an exception follows on lines of its own."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = f"{record.levelname:<7}"
        if self.color:
            level = f"\x1b[{_COLORS.get(record.levelname, '0')}m{level}\x1b[0m"
            clock = f"\x1b[2m{clock}\x1b[0m"
        line = f"{clock} {level} {self._process}{record.getMessage()}"
        request = getattr(record, "fields", {}).get("request_id")
        if request:
            line += f" [{request}]"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the record's ``fields``."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = {"process": process} if process else {}

    def format(self, record: logging.LogRecord) -> str:
        """Write one record."""
        entry: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._process,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry, enc_hook=str).decode()


def configure(level: str, form: Format, stream: TextIO | None = None, *, process: str = "") -> None:
    """Send all of Turnstile's logging to ``stream`` (standard error) in the form asked for.

    Lines are marked with ``process`` where it is given.
    """
    target = stream or sys.stderr
    if form == "auto":
        form = "color" if wants_color(target) else "plain"
    handler = logging.StreamHandler(target)
    if form == "json":
        handler.setFormatter(JsonFormatter(process))
    else:
        handler.setFormatter(TextFormatter(color=form == "color", process=process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("turnstile").setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def current_format() -> Format:
    """The form that :func:`configure` was told, for a process that is to write the same."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonFormatter):
            return "json"
        if isinstance(handler.formatter, TextFormatter):
            return "color" if handler.formatter.color else "plain"
    return "auto"


def wants_color(stream: TextIO) -> bool:
    """Colour on a terminal, as NO_COLOR and FORCE_COLOR allow."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"
