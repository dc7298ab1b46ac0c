"""Taking the address before anything slow begins, so that a taken port is known at once."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

from turnstile.server.config import ServerConfig

_BACKLOG = 2048
_UNSENT = 64 << 10
"""Bytes the kernel takes from us beyond what the reader has room for. Its default grows to
megabytes a connection: a thousand stalled readers would cost gigabytes, and be noticed late."""


class BindError(RuntimeError):
    """The address cannot be listened on; the message says why and what to do."""


def bind(config: ServerConfig) -> socket.socket:
    """Listen on the configured address. Connections queue up until the server takes them.

    Raises :class:`BindError`.
    """
    listener = _bind_uds(config.uds) if config.uds is not None else _bind_tcp(config)
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def _bind_tcp(config: ServerConfig) -> socket.socket:
    host, port = config.host, config.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError:
        raise BindError(f"--host {host} is no address of this machine.") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # connections inherit it
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise BindError(_tcp_problem(error, host, port)) from None
    return listener


def _tcp_problem(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"Port {port} on {host} is in use. Stop what listens there (ss -ltnp 'sport = {port}' "
            "shows it), or choose another with --port; --port 0 takes any free one."
        )
    if error.errno == errno.EACCES:
        return f"Port {port} needs privileges. Choose one above 1023 with --port."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is no address of this machine."
    return f"Cannot listen on {host}:{port}: {error.strerror}."


def _bind_uds(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        listener.bind(path)
        # Who may call is then a question of the directory's and the group's permissions.
        Path(path).chmod(0o660)
    except OSError as error:
        listener.close()
        raise BindError(f"Cannot listen on {path}: {error.strerror or error}.") from None
    return listener


def _remove_stale(path: str) -> None:
    """Remove a socket nobody listens on any more. Raises :class:`BindError` if somebody does."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise BindError(f"--uds {path} exists and is no socket.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            Path(path).unlink()
            return
    raise BindError(f"Somebody listens on {path} already.")


def url_of(listener: socket.socket) -> str:
    """Where clients find it."""
    address = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{address}"
    host, port = address[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
