"""``/openapi.json``, generated from the request structs, and ``/docs``, a page of our own."""

from __future__ import annotations

import functools
import re
from importlib import resources
from typing import Any

import msgspec

from turnstile import __version__
from turnstile.server.answer.schemas import (
    ChatRequest,
    CompletionRequest,
    CountRequest,
    DetokenizeRequest,
    MessagesRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from turnstile.server.api.requests import MAX_LIMIT, STATES
from turnstile.server.http.exchange import Exchange
from turnstile.server.routes import OPEN_PATHS, PAGE_PATHS, ROUTES, Entry
from turnstile.server.service import Service
from turnstile.server.watch.dashboard import DASHBOARD_ROUTES

_BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/chat/completions/render": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_REFUSALS = {
    "400": "The request is wrong; `param` names the field.",
    "401": "The API key is missing or not valid.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "429": "A limit of this key; see Retry-After.",
    "503": "Overloaded, loading or shutting down; see Retry-After.",
}


async def openapi(service: Service, exchange: Exchange) -> None:
    """Serve the OpenAPI 3.1 document."""
    await exchange.respond(_document())


async def page(service: Service, exchange: Exchange) -> None:
    """A page that shows the document and tries the routes; it loads nothing from elsewhere."""
    html = resources.files("turnstile.server").joinpath("static/docs.html").read_bytes()
    policy = b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    headers = [(b"content-security-policy", policy + b"connect-src 'self'; frame-ancestors 'none'")]
    await exchange.respond(html, content_type=b"text/html; charset=utf-8", headers=headers)


DOCS_ROUTES: tuple[Entry, ...] = (
    ("GET", "/openapi.json", openapi),
    ("GET", "/docs", page),
)


@functools.cache
def _document() -> bytes:
    return msgspec.json.encode(build_document())


def build_document() -> dict[str, Any]:
    """Build the OpenAPI document as plain values."""
    kinds = list(dict.fromkeys(_BODIES.values()))
    schemas, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    by_kind = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for method, path, handler in ROUTES + DASHBOARD_ROUTES + DOCS_ROUTES:
        shown = path.replace(":path}", "}")
        operation: dict[str, Any] = {
            "summary": (handler.__doc__ or "").strip().split("\n")[0],
            "operationId": re.sub(r"\W", "", f"{method.lower()}{shown.replace('/', '_')}"),
            "responses": _responses(path, has_body=path in _BODIES),
        }
        if path in _BODIES:
            content = {"application/json": {"schema": by_kind[_BODIES[path]]}}
            operation["requestBody"] = {"required": True, "content": content}
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"{(\w+)}", shown)
        ] + _QUERIES.get(path, [])
        if path in OPEN_PATHS | PAGE_PATHS:
            operation["security"] = []
        paths.setdefault(shown, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Turnstile", "version": __version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


_QUERIES: dict[str, list[dict[str, Any]]] = {
    "/v1/requests": [
        {"name": "state", "in": "query", "schema": {"type": "string", "enum": list(STATES)}},
        {"name": "limit", "in": "query", "schema": {"type": "integer", "maximum": MAX_LIMIT}},
    ]
}
_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _responses(path: str, *, has_body: bool) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    answers: dict[str, Any] = {"200": {"description": "OK"}}
    for status, text in _REFUSALS.items():
        if has_body or status in ("401", "503"):
            answers[status] = {"description": text, "content": error}
    if "{" in path:
        answers["404"] = {"description": "There is nothing of this name.", "content": error}
    return answers
