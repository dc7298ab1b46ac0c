"""The live map in a browser: ``/`` is a page of our own, ``/live`` the stream that feeds it.

The page holds no data and needs no key; it asks for one where the stream needs it. The stream
carries what :mod:`turnstile.server.watch.watchers` tells.
"""

from __future__ import annotations

import functools
from importlib import resources

from turnstile.server.api.info import refuse_foreign_page
from turnstile.server.errors import ApiError
from turnstile.server.http.exchange import EVENT_STREAM, Exchange
from turnstile.server.routes import Entry
from turnstile.server.service import Service
from turnstile.server.watch.live_view import Viewer

_KINDS = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
}
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    b"img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


async def page(service: Service, exchange: Exchange) -> None:
    """Show pages and slots, live, in a browser."""
    await _file(exchange, "dashboard.html")


async def part(service: Service, exchange: Exchange) -> None:
    """What that page is made of."""
    await _file(exchange, exchange.path.removeprefix("/"))


async def _file(exchange: Exchange, name: str) -> None:
    headers = [
        (b"content-security-policy", _POLICY),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"cache-control", b"no-cache"),
    ]
    kind = _KINDS[name.rpartition(".")[2]]
    await exchange.respond(_read(name), content_type=kind, headers=headers)


@functools.cache
def _read(name: str) -> bytes:
    return resources.files("turnstile.server").joinpath(f"static/{name}").read_bytes()


async def live(service: Service, exchange: Exchange) -> None:
    """Stream pages, slots, steps and the waiting line as they change; own ones, admins see all."""
    _refuse_strange_page(service, exchange)
    if exchange.method == "HEAD":
        await exchange.respond(b"", content_type=EVENT_STREAM)
        return
    watchers = service.watchers
    viewer = Viewer(None if exchange.tenant.admin else exchange.tenant.name)
    watchers.enter(viewer)
    try:
        exchange.watch()
        await exchange.start_stream()
        service.stream_began(exchange)
        await _tell(service, exchange, viewer)
    finally:
        service.stream_ended(exchange)
        watchers.leave(viewer)


async def _tell(service: Service, exchange: Exchange, viewer: Viewer) -> None:
    """Write what is new as long as somebody reads it. While a write waits for its reader versions
    go by: who has missed one is sent the whole map.
    """
    watchers = service.watchers
    seen = beat = -1
    while not watchers.closed:
        data = b""
        if watchers.beat != beat:
            beat = watchers.beat
            data = watchers.state(viewer)
        if watchers.version != seen:
            next_one = seen >= 0 and watchers.version == seen + 1
            seen = watchers.version
            data += watchers.change(viewer) if next_one else watchers.whole(viewer)
        if data:
            await exchange.write(data, service.clock())
        if watchers.version == seen and watchers.beat == beat:
            await watchers.news()
    await exchange.end_stream()


def _refuse_strange_page(service: Service, exchange: Exchange) -> None:
    """Only our own page, and those of ``--allowed-origins``, may watch from a browser. What a
    foreign page loads without reading it could take all the places: ``Sec-Fetch-Site`` gives that
    away.
    """
    refuse_foreign_page(service, exchange)
    origin, site = exchange.header(b"origin"), exchange.header(b"sec-fetch-site")
    if origin is not None and service.cors.allows(origin):
        return
    if site not in (None, b"same-origin", b"none"):
        raise ApiError(
            403,
            "The live map is for pages of this server; --allowed-origins names other pages.",
            code="origin_refused",
        )


DASHBOARD_ROUTES: tuple[Entry, ...] = (
    ("GET", "/", page),
    ("GET", "/dashboard", page),
    ("GET", "/dashboard.css", part),
    ("GET", "/dashboard.js", part),
    ("GET", "/dashboard_map.js", part),
    ("GET", "/live", live),
)
