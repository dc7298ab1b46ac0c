"""The ASGI application: :class:`App`.

Starlette routes; everything around a handler happens here, once: request id, CORS, the key,
errors as JSON, the access log. There is no middleware between a token and the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

from starlette.exceptions import HTTPException
from starlette.routing import Match, Route, Router

from turnstile.server.api.docs import DOCS_ROUTES
from turnstile.server.config import is_loopback
from turnstile.server.errors import ApiError, from_exception, internal_error
from turnstile.server.http.access_log import log_access
from turnstile.server.http.cors import names_loopback
from turnstile.server.http.exchange import Exchange
from turnstile.server.routes import INFERENCE_PATHS, OPEN_PATHS, PAGE_PATHS, ROUTES, Handler
from turnstile.server.service import Phase, Service
from turnstile.server.watch.dashboard import DASHBOARD_ROUTES
from turnstile.server.watch.watchers import Watchers

logger = logging.getLogger("turnstile.server")


class _Endpoint:
    """Starlette's view of a handler: a raw ASGI application."""

    def __init__(self, handler: Handler, service: Service) -> None:
        self._handler = handler
        self._service = service

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._handler(self._service, scope["turnstile.exchange"])


class App:
    """The application of one :class:`Service`."""

    def __init__(self, service: Service) -> None:
        self.service = service
        service.watchers = Watchers(service)
        config = service.config
        routes = ROUTES + (DOCS_ROUTES if config.enable_docs else ())
        routes += DASHBOARD_ROUTES if config.enable_dashboard else ()
        self._router = Router(
            routes=[
                Route(path, _Endpoint(handler, service), methods=[method])
                for method, path, handler in routes
            ],
            redirect_slashes=False,
            default=self._no_route,
        )
        self._handlers = {
            (method, path): handler for method, path, handler in routes if "{" not in path
        }
        """Those of the routes without parameters, which need no search."""
        self._open = OPEN_PATHS | (PAGE_PATHS if config.enable_dashboard else frozenset())
        self._quiet = config.quiet_paths
        self._on_loopback = config.uds is None and is_loopback(config.host)
        self._logs = not service.config.disable_access_log

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one HTTP request; other protocols are refused."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1000})
            return
        exchange = Exchange(scope, receive, send)
        service = self.service
        service.live.add(exchange)
        try:
            await self._serve(exchange)
        except asyncio.CancelledError:
            # The client went away or stopped reading, or the server's own end cut it short: all
            # three are ends of this request, and none is anybody's error.
            stalled = "stalled_reader" in exchange.notes
            if not (exchange.disconnected or stalled or service.phase is not Phase.READY):
                raise
            exchange.notes["client_gone"] = exchange.disconnected or stalled
        finally:
            exchange.unwatch()
            exchange.release_body()
            service.live.discard(exchange)
            self._finish(exchange)

    async def _serve(self, exchange: Exchange) -> None:
        service = self.service
        origin = exchange.header(b"origin")
        exchange.common_headers += service.cors.response_headers(origin)
        try:
            if exchange.method == "OPTIONS":
                await self._preflight(exchange, origin)
                return
            if exchange.path not in self._open:
                exchange.tenant = service.keys.identify(exchange.scope["headers"])
                self._refuse_rebound_page(exchange, origin)
            handler = self._handlers.get((exchange.method, exchange.path))
            if handler is not None:
                await handler(service, exchange)
                return
            exchange.scope["turnstile.exchange"] = exchange
            exchange.scope["app"] = self
            await self._router(exchange.scope, None, None)  # type: ignore[arg-type]
        except HTTPException as error:
            await self._refuse(exchange, self._from_http(exchange, error))
        except Exception as error:
            await self._refuse(exchange, self._known(exchange, error))

    def _refuse_rebound_page(self, exchange: Exchange, origin: bytes | None) -> None:
        """Refuse a page whose name was rebound to this machine (DNS rebinding), where no key would
        stop it.

        A browser sends ``Origin`` with a page's requests, except when the page reads from what the
        browser takes for its own server. So a read without ``Origin`` must have a ``Host`` that
        means this server. A POST without ``Origin`` comes from a program, and may use any name.
        """
        if len(self.service.keys) or not self._on_loopback:
            return
        host, cors = exchange.header(b"host"), self.service.cors
        if origin is None and (exchange.method not in ("GET", "HEAD") or host is None):
            return
        known = cors.knows(host or b"") if origin is None else cors.allows(origin)
        if not known and not names_loopback(host or b""):
            raise ApiError(
                403,
                "A server without keys is read under the name localhost or by its address, and so "
                "are its pages; --allowed-origins http://NAME adds a name, as that of a proxy.",
                code="origin_refused",
            )

    def _known(self, exchange: Exchange, error: Exception) -> ApiError:
        known = from_exception(error)
        if known is not None:
            return known
        logger.exception("Request %s failed", exchange.id, exc_info=error)
        return internal_error()

    async def _refuse(self, exchange: Exchange, error: ApiError) -> None:
        exchange.notes["error"] = error.code or error.kind
        if exchange.status:
            return  # too late for a status: the connection is closed with the answer incomplete
        if exchange.path in INFERENCE_PATHS and "finish_reason" not in exchange.notes:
            self.service.metrics.refused()
        await exchange.respond(error.body(), error.status, headers=error.headers())

    async def _preflight(self, exchange: Exchange, origin: bytes | None) -> None:
        """Answer OPTIONS. It needs no key: browsers send none, and it tells what the docs tell."""
        asked = exchange.header(b"access-control-request-headers")
        exchange.common_headers = exchange.common_headers[:1]
        headers = self.service.cors.preflight_headers(origin, asked)
        methods = self._methods(exchange)
        if methods:
            headers.append((b"allow", ", ".join(sorted([*methods, "OPTIONS"])).encode()))
        elif not headers:  # an allowed page is let through to the refusal, and reads it there
            await self._no_route(exchange.scope, None, None)
        await exchange.respond(b"", 204, headers=headers)

    def _methods(self, exchange: Exchange) -> list[str]:
        """The methods that the path takes; those of any path for ``*``; none for an unknown one."""
        found: set[str] = set()
        for route in self._router.routes:
            assert isinstance(route, Route)
            if exchange.path == "*" or route.matches(exchange.scope)[0] is not Match.NONE:
                found |= route.methods or set()
        return sorted(found)

    def _from_http(self, exchange: Exchange, error: HTTPException) -> ApiError:
        """Starlette's own refusals: a method the route does not know. It names one route's."""
        if error.status_code != 405:
            return ApiError(error.status_code, error.detail)
        allowed = ", ".join(self._methods(exchange))
        message = f"{exchange.method} is not allowed here; use {allowed}."
        return ApiError(405, message, headers=[(b"allow", allowed.encode())])

    def _finish(self, exchange: Exchange) -> None:
        status = exchange.status or 499
        exchange.status = status
        self.service.metrics.responses[f"{status // 100}xx"] += 1
        # A probe that is told 503 repeats itself every second, and the cause has its own line.
        if self._logs and (exchange.path not in self._quiet or status == 500):
            with contextlib.suppress(Exception):
                log_access(exchange, time.monotonic() - exchange.started)

    async def _no_route(self, scope: Any, receive: Any, send: Any) -> None:
        message = f"There is no route {scope['path'][:100]}."
        if self.service.config.enable_docs:
            message += " /docs shows those there are."
        raise ApiError(404, message, code="route_not_found")
