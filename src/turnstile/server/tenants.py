"""Tenants from a TOML file: whose keys they are, and what each may use. :func:`read_tenants`.

    [tenants.team-a]
    keys = ["sk-team-a-1", "sha256:2c26b46b68ff…"]
    weight = 2.0
    tokens_per_minute = 60_000

The file is checked as a whole: a wrong one changes nothing, and the error names the field.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnstile.core.limits import NO_LIMITS, TenantLimits
from turnstile.engine.params import MOST_PRIORITY
from turnstile.server.config import ConfigError

MOST_TENANTS = 10_000
SHARING = ("tenant", "all")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_HASHED = re.compile(r"sha256:[0-9a-fA-F]{64}")
_LIMITS = ("max_concurrent", "tokens_per_minute", "requests_per_minute")
_FIELDS = ("weight", "admin", "priority", "cache_sharing", *_LIMITS)


@dataclass(frozen=True, slots=True)
class Tenant:
    """On whose account a request runs.

    Attributes
    ----------
    name
        In logs, metrics and ``/v1/requests``.
    weight
        Its share of the machine beside others'.
    admin
        Opens the administrative routes.
    priority
        Of its requests that name none, and the most urgent (lowest) they may name; None: 0, and
        any.
    limits
        What it may use at once and in a minute.
    share_cache
        Its prefix-cache pages are shared with all who share theirs.
    """

    name: str
    weight: float = 1.0
    admin: bool = False
    priority: int | None = None
    limits: TenantLimits = NO_LIMITS
    share_cache: bool = False


def digest_of(key: str | bytes) -> bytes:
    """What is kept of a key: its SHA-256."""
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()


def read_tenants(path: Path) -> list[tuple[bytes, Tenant]]:
    """The digest of every key in the file, with its tenant.

    Raises
    ------
    ConfigError
        The file cannot be read, or something in it is wrong: named by its place in the file.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"Cannot read the tenants in {path}: {reason}.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from None
    except ValueError:  # the one that is left: int() of more digits than it takes
        raise ConfigError(f"{path} has a number of too many digits.") from None
    except RecursionError:
        raise ConfigError(f"{path} nests its values too deeply.") from None
    try:
        return _parse(data)
    except _FieldError as error:
        raise ConfigError(f"{path}: {error}") from None


class _FieldError(ValueError):
    """A field is wrong. The message begins with its name; it never repeats a key."""


def _parse(data: Mapping[str, Any]) -> list[tuple[bytes, Tenant]]:
    _known(data, ("defaults", "tenants"), "")
    defaults = _table(data.get("defaults", {}), "defaults")
    _known(defaults, _FIELDS, "defaults.")
    _tenant("defaults", defaults, "defaults")
    tenants = _table(data.get("tenants", {}), "tenants")
    if not tenants:
        raise _FieldError("tenants: the file names no tenant; write [tenants.NAME].")
    if len(tenants) > MOST_TENANTS:
        raise _FieldError(f"tenants: {len(tenants)} are more than {MOST_TENANTS}.")
    found: dict[bytes, Tenant] = {}
    for name, value in tenants.items():
        place = f"tenants.{name}"
        if not _NAME.fullmatch(name):
            raise _FieldError(
                f"{place:.80}: a name has 1 to 64 letters, digits, dots, dashes, underscores or @."
            )
        table = _table(value, place)
        _known(table, ("keys", *_FIELDS), f"{place}.")
        tenant = _tenant(name, {**defaults, **table}, place)
        for digest in _digests(table.get("keys"), f"{place}.keys"):
            if digest in found:
                other = found[digest].name
                raise _FieldError(f"{place}.keys: a key is listed twice (also by {other}).")
            found[digest] = tenant
    return list(found.items())


def _tenant(name: str, table: Mapping[str, Any], place: str) -> Tenant:
    def take(field: str, check: Callable[[Any, str], Any], otherwise: Any) -> Any:
        value = table.get(field)
        return otherwise if value is None else check(value, f"{place}.{field}")

    return Tenant(
        name,
        weight=take("weight", _weight, 1.0),
        admin=take("admin", _flag, False),
        priority=take("priority", _priority, 0),
        limits=TenantLimits(**{field: take(field, _limit, None) for field in _LIMITS}),
        share_cache=take("cache_sharing", _sharing, "tenant") == "all",
    )


def _table(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _FieldError(f"{place}: must be a table.")
    return value


def _known(table: Mapping[str, Any], fields: Iterable[str], prefix: str) -> None:
    for field in table:
        if field not in fields:
            raise _FieldError(f"{prefix}{field:.40}: no such field; there are {', '.join(fields)}.")


def _digests(value: Any, place: str) -> list[bytes]:
    if not isinstance(value, list) or not value:
        raise _FieldError(f"{place}: must be a list of at least one key.")
    digests = []
    for key in value:
        if not isinstance(key, str) or not key.strip():
            raise _FieldError(f"{place}: a key must be a text that is not empty.")
        if key.startswith("sha256:"):
            if not _HASHED.fullmatch(key):
                raise _FieldError(f"{place}: sha256: is followed by 64 hexadecimal digits.")
            digests.append(bytes.fromhex(key.removeprefix("sha256:")))
            continue
        if not (key.isascii() and key.isprintable()) or key != key.strip():
            raise _FieldError(f"{place}: a key has characters that no HTTP header can carry.")
        digests.append(digest_of(key))
    return digests


def _weight(value: Any, place: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _FieldError(f"{place}: must be a number.")
    if not 0.001 <= value <= 1000:  # nan is not, either
        raise _FieldError(f"{place}: must be from 0.001 to 1000, not {_shown(value)}.")
    return float(value)


def _shown(value: float) -> str:
    """A number for a message: Python does not write down an integer of thousands of digits."""
    return f"{value:g}" if abs(value) < 1e18 else "so large a number"


def _whole(value: Any, place: str, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _FieldError(f"{place}: must be a whole number from {least} to {most}.")
    return value


def _limit(value: Any, place: str) -> int:
    return _whole(value, place, 1, 10**12)


def _priority(value: Any, place: str) -> int:
    return _whole(value, place, -MOST_PRIORITY, MOST_PRIORITY)


def _flag(value: Any, place: str) -> bool:
    if not isinstance(value, bool):
        raise _FieldError(f"{place}: must be true or false.")
    return value


def _sharing(value: Any, place: str) -> str:
    if value not in SHARING:
        raise _FieldError(f"{place}: must be one of {', '.join(SHARING)}.")
    return str(value)
