"""One line per request, never with a word of anybody's prompt."""

from __future__ import annotations

import logging

from turnstile.server.http.exchange import Exchange

logger = logging.getLogger("turnstile.access")

_MAX_PATH = 200


def log_access(exchange: Exchange, seconds: float) -> None:
    """Log a finished request. The fields go to the JSON form; the text form shows the main ones."""
    if not logger.isEnabledFor(logging.INFO):
        return
    client = exchange.scope.get("client")
    fields: dict[str, object] = {
        "request_id": exchange.id,
        "client": client[0] if client else "local",
        "tenant": exchange.tenant.name,
        "method": exchange.method,
        "path": printable(exchange.path),
        "status": exchange.status,
        "duration_ms": round(seconds * 1000, 1),
        **exchange.notes,
    }
    logger.info(
        "%s %s %d %.1f ms%s",
        fields["method"],
        fields["path"],
        exchange.status,
        seconds * 1000,
        _tokens(exchange.notes),
        extra={"fields": fields},
    )


def _tokens(notes: dict[str, object]) -> str:
    if "prompt_tokens" not in notes:
        return f" {notes['error']}" if "error" in notes else ""
    text = f" {notes['prompt_tokens']}+{notes['completion_tokens']} tokens"
    return f"{text} {notes.get('error', notes.get('finish_reason'))}"


def printable(text: str) -> str:
    """``text`` without anything that could forge or garble a log line."""
    clean = "".join(c if c.isprintable() else "?" for c in text[:_MAX_PATH])
    return clean + ("…" if len(text) > _MAX_PATH else "")
