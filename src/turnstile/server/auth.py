"""Who is calling: API keys to :class:`Tenant`, compared in constant time.

Without keys everyone is the tenant ``default``. With keys each key is a tenant of its own, so
that fairness and the prefix cache keep the holders of different keys apart.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass

from turnstile.server.errors import ApiError

RawHeaders = Iterable[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Tenant:
    """On whose account a request runs. ``admin`` opens the administrative routes."""

    name: str
    weight: float = 1.0
    admin: bool = False


def _digest(key: str | bytes) -> bytes:
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()


def key_name(key: str) -> str:
    """A name for the holder of ``key`` that gives the key away to nobody."""
    return f"key-{_digest(key).hex()[:8]}"


class KeyRing:
    """The keys this server knows."""

    def __init__(self, keys: Iterable[str], admin_keys: Iterable[str] = ()) -> None:
        admins = list(admin_keys)
        self._tenants: list[tuple[bytes, Tenant]] = [
            (_digest(key), Tenant(key_name(key), admin=not admins)) for key in keys
        ]
        self._tenants += [(_digest(key), Tenant(key_name(key), admin=True)) for key in admins]
        self._open = not self._tenants
        self._anyone = Tenant("default", admin=True)

    @property
    def open(self) -> bool:
        """True where no key is needed."""
        return self._open

    def identify(self, headers: RawHeaders) -> Tenant:
        """The tenant whose key the request carries.

        Every known key is compared, found or not, so that time tells nothing. Raises
        :class:`ApiError` 401.
        """
        if self._open:
            return self._anyone
        given = _key_in(headers)
        digest = _digest(given or b"")
        found: Tenant | None = None
        for known, tenant in self._tenants:
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None or given is None:
            problem = "is not valid" if given else "is missing"
            raise ApiError(
                401,
                f"The API key {problem}. Send it as 'Authorization: Bearer KEY' or 'x-api-key'.",
                code="invalid_api_key",
                headers=[(b"www-authenticate", b"Bearer")],
            )
        return found


def _key_in(headers: RawHeaders) -> bytes | None:
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer" and key.strip():
                return key.strip()
        elif name == b"x-api-key" and value.strip():
            return value.strip()
    return None


def require_admin(tenant: Tenant) -> None:
    """Raise :class:`ApiError` 403 unless ``tenant`` may administrate."""
    if not tenant.admin:
        raise ApiError(
            403, "This route needs an admin key (--admin-api-key).", code="admin_required"
        )
