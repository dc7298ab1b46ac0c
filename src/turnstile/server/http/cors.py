"""Which web pages may call this server. By default none: no CORS header is ever sent.

A preflight is answered without a key (browsers send none), and a refusal carries the headers
too, or the page could not read why it was refused. Credentials are never allowed, so ``*`` is safe.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from turnstile.server.errors import Headers

_ALLOWED_METHODS = b"GET, POST, DELETE, OPTIONS"
_DEFAULT_HEADERS = b"authorization, content-type, x-api-key, x-request-id"
_EXPOSED = b"x-request-id, retry-after, retry-after-ms, openai-processing-ms"
_MAX_AGE = b"600"


class Cors:
    """The origins an operator allowed."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._any = "*" in origins
        self._origins = frozenset(origin.rstrip("/").encode() for origin in origins)

    def allows(self, origin: bytes) -> bool:
        """Whether pages of ``origin`` may call."""
        return self._any or origin in self._origins

    def knows(self, host: bytes) -> bool:
        """Whether ``host``, as a ``Host`` names it, is that of an allowed origin."""
        return any(self.allows(scheme + host.lower()) for scheme in (b"http://", b"https://"))

    def response_headers(self, origin: bytes | None) -> Headers:
        """What to add to any answer to a page of ``origin``."""
        if origin is None or not self.allows(origin):
            return []
        return [
            (b"access-control-allow-origin", b"*" if self._any else origin),
            (b"access-control-expose-headers", _EXPOSED),
            (b"vary", b"Origin"),
        ]

    def preflight_headers(self, origin: bytes | None, asked: bytes | None) -> Headers:
        """What to answer to OPTIONS; ``asked`` is Access-Control-Request-Headers."""
        if origin is None or not self.allows(origin):
            return []
        return [
            *self.response_headers(origin),
            (b"access-control-allow-methods", _ALLOWED_METHODS),
            (b"access-control-allow-headers", asked or _DEFAULT_HEADERS),
            (b"access-control-max-age", _MAX_AGE),
        ]


def names_loopback(host: bytes) -> bool:
    """Whether a ``Host`` means this machine wherever it is resolved: an address, or localhost.

    Any other name may belong to an attacker who points it at 127.0.0.1 after a browser has loaded a
    page from it: the browser then takes this server for the one the page came from (DNS rebinding).
    """
    name = host.decode("latin-1").lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
