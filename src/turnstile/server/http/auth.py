"""Who is calling: API keys to :class:`Tenant`.

Without keys everyone is the tenant ``default``. Keys come from ``--api-key`` (each key is a tenant
of its own, so that fairness and the prefix cache keep the holders apart) and from the file of
``--tenants``.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable
from pathlib import Path

from turnstile.server.config import ServerConfig
from turnstile.server.errors import ApiError
from turnstile.server.tenants import Tenant, digest_of, read_tenants

RawHeaders = Iterable[tuple[bytes, bytes]]


def key_name(key: str) -> str:
    """A name for the holder of ``key`` that gives the key away to nobody."""
    return f"key-{digest_of(key).hex()[:8]}"


class KeyRing:
    """The keys this server knows.

    Keys are found by a keyed hash (the secret is drawn at start and never leaves the process), so
    that the time of a look-up tells nothing about any key, and does not grow with their number.
    """

    def __init__(
        self,
        keys: Iterable[str] = (),
        admin_keys: Iterable[str] = (),
        tenants: Iterable[tuple[bytes, Tenant]] = (),
    ) -> None:
        self._secret = secrets.token_bytes(32)
        admins = list(admin_keys)
        known = [(digest_of(key), Tenant(key_name(key), admin=not admins)) for key in keys]
        known += [(digest_of(key), Tenant(key_name(key), admin=True)) for key in admins]
        known += tenants
        self._tenants = {self._keyed(digest): tenant for digest, tenant in known}
        self._anyone = Tenant("default", admin=True)

    @classmethod
    def of(cls, config: ServerConfig) -> KeyRing:
        """The keys of a configuration; raises :class:`ConfigError` where its file is wrong."""
        path = config.tenants
        tenants = read_tenants(Path(path).expanduser()) if path is not None else []
        return cls(config.api_key, config.admin_api_key, tenants)

    def _keyed(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")

    def __len__(self) -> int:
        return len(self._tenants)

    @property
    def open(self) -> bool:
        """True where no key is needed."""
        return not self._tenants

    def identify(self, headers: RawHeaders) -> Tenant:
        """The tenant whose key the request carries. Raises :class:`ApiError` 401."""
        if self.open:
            return self._anyone
        given = _key_in(headers)
        found = self._tenants.get(self._keyed(digest_of(given or b"")))
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
            403,
            "This route needs an admin key (--admin-api-key, or admin = true in --tenants).",
            code="admin_required",
        )
