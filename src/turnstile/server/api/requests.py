"""``/v1/requests`` and ``/v1/requests/{id}``: why a request waits, where its time went, and a way
to end it.
"""

from __future__ import annotations

import logging
from urllib.parse import parse_qs

from turnstile.server.api.info import refuse_foreign_page
from turnstile.server.errors import ApiError, bad_request
from turnstile.server.http.exchange import Exchange
from turnstile.server.service import Service
from turnstile.server.watch.request_view import View
from turnstile.server.watch.trails import RequestTrail

logger = logging.getLogger("turnstile.server")

STATES = ("alive", "waiting", "running", "ended", "all")
DEFAULT_LIMIT, MAX_LIMIT = 100, 1000


async def requests(service: Service, exchange: Exchange) -> None:
    """List requests: those alive, then the last ones that ended. Own ones; admins see all."""
    state, limit = _query(exchange)
    view = View(service)
    trails = [
        trail
        for trail in (*view.log.alive(), *view.log.ended())
        if view.may_see(exchange, trail) and _matches(trail, state)
    ]
    await exchange.respond_json(
        {
            "object": "list",
            "data": [view.summary(trail) for trail in trails[:limit]],
            "has_more": len(trails) > limit,
        }
    )


async def request(service: Service, exchange: Exchange) -> None:
    """Tell of one request: by its `x-request-id`, or the `id` in its answer."""
    view = View(service)
    await exchange.respond_json(view.detail(_find(view, exchange)))


async def cancel(service: Service, exchange: Exchange) -> None:
    """End a request, one's own or, for an admin, any. Its answer ends with what there is."""
    refuse_foreign_page(service, exchange)
    view = View(service)
    found = _find(view, exchange)
    if found.record is not None:
        found.note(service.clock(), "cancelled")
        logger.info("Request %s is cancelled by %s", found.id, exchange.tenant.name)
        for job in found.record.jobs:
            if job.stream is not None:
                job.stream.abort()
    await exchange.respond_json(view.detail(found))


def _find(view: View, exchange: Exchange) -> RequestTrail:
    """The newest of that name that the caller may know of, one that is alive before others."""
    name = exchange.scope["path_params"]["id"]
    seen = [trail for trail in view.log.find(name) if view.may_see(exchange, trail)]
    if not seen:
        raise ApiError(
            404,
            "There is no such request, or it ended too long ago.",
            code="request_not_found",
        )
    return next((trail for trail in seen if trail.ended is None), seen[0])


def _query(exchange: Exchange) -> tuple[str, int]:
    given = parse_qs(exchange.scope.get("query_string", b"").decode("latin-1"))
    state = given.get("state", ["all"])[-1]
    if state not in STATES:
        raise bad_request(f"state must be one of {', '.join(STATES)}.", "state")
    text = given.get("limit", [str(DEFAULT_LIMIT)])[-1]
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MAX_LIMIT):
        raise bad_request(f"limit must be a number from 1 to {MAX_LIMIT}.", "limit")
    return state, int(text)


def _matches(trail: RequestTrail, state: str) -> bool:
    if state == "all":
        return True
    if trail.ended is not None:
        return state == "ended"
    waits = trail.leading().waits
    return state == "alive" or (waits if state == "waiting" else not waits and state == "running")
