"""The table of routes: which module answers what. ``docs.py`` adds its own two."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from turnstile.server.api import anthropic, chat, completions, info, requests, responses, tokenize
from turnstile.server.http.exchange import Exchange
from turnstile.server.service import Service

Handler = Callable[[Service, Exchange], Awaitable[None]]
Entry = tuple[str, str, Handler]
"""Method, path, and who answers."""

OPEN_PATHS = frozenset({"/health", "/livez", "/readyz", "/ping"})
"""Paths that need no key: probes carry none, and they tell nothing."""
PAGE_PATHS = frozenset({"/", "/dashboard", "/dashboard.css", "/dashboard.js", "/dashboard_map.js"})
"""Nor do those of a page that holds no data: a browser has no key before it has the page."""
INFERENCE_PATHS = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"}
)

ROUTES: tuple[Entry, ...] = (
    ("POST", "/v1/completions", completions.completions),
    ("POST", "/v1/chat/completions", chat.chat_completions),
    ("POST", "/v1/chat/completions/render", chat.render),
    ("POST", "/v1/responses", responses.responses),
    ("POST", "/v1/messages", anthropic.messages),
    ("POST", "/v1/messages/count_tokens", anthropic.count_tokens),
    ("GET", "/v1/models", info.models),
    ("GET", "/v1/models/{name:path}", info.model_card),
    ("GET", "/v1/requests", requests.requests),
    ("GET", "/v1/requests/{id:path}", requests.request),
    ("DELETE", "/v1/requests/{id:path}", requests.cancel),
    ("POST", "/tokenize", tokenize.tokenize),
    ("POST", "/detokenize", tokenize.detokenize),
    ("GET", "/tokenizer_info", info.tokenizer_info),
    ("GET", "/health", info.health),
    ("GET", "/livez", info.livez),
    ("GET", "/readyz", info.readyz),
    ("GET", "/ping", info.health),
    ("GET", "/version", info.version),
    ("GET", "/metrics", info.metrics),
    ("GET", "/load", info.load),
    ("GET", "/server_info", info.server_info),
    ("POST", "/reset_prefix_cache", info.reset_prefix_cache),
)
