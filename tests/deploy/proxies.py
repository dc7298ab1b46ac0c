"""The proxies of ``deploy/proxy`` as programs: :func:`configure` and :class:`Proxy`.

The files are used as they are but for what belongs to a place: addresses, certificates, names,
and, for who wants to see it end, the one timeout that a test cannot wait for.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

import httpx

from e2e.harness import PATIENCE, ROOT, free_port

PROXIES = ("nginx", "haproxy", "caddy")
FILES = {"nginx": "nginx.conf", "haproxy": "haproxy.cfg", "caddy": "Caddyfile"}
SECONDS = 30.0
SILENCE = 2
"""Seconds of silence a hasty proxy allows, instead of 600."""

NGINX = """
{user}
worker_processes 1;
daemon off;
pid {directory}/pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    include {site};
}}
"""
"""What stands around a site in nginx; Debian's has no more that matters here."""


def program(name: str) -> str | None:
    """Where a proxy is; Debian keeps some where only root looks."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def replaced(text: str, *pairs: tuple[str, str]) -> str:
    """The text with each of these replaced, wherever it stands; it must stand somewhere."""
    for old, new in pairs:
        assert old in text, f"{old!r} is not in it"
        text = text.replace(old, new)
    return text


def make_certificate(directory: Path) -> Path:
    """A certificate for ``llm.example.org`` with its key, both in one file."""
    path = directory / "llm.example.org.pem"
    if not path.exists():
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
             "-nodes", "-days", "2", "-subj", "/CN=llm.example.org", "-keyout", str(path),
             "-out", str(directory / "certificate")],
            check=True, capture_output=True,
        )  # fmt: skip
        path.write_text(path.read_text() + (directory / "certificate").read_text())
    return path


def configure(
    name: str, directory: Path, port: int, upstream: str, silence: int = 600
) -> tuple[Path, list[str]]:
    """Write the file for here; returns it, and the command that checks it."""
    text = (ROOT / "deploy/proxy" / FILES[name]).read_text()
    file = directory / FILES[name]
    if name == "caddy":
        text = replaced(
            text,
            ("127.0.0.1:8000", upstream),
            ("600s", f"{silence}s"),
            ("llm.example.org {", f":{port} {{"),
        )
        file.write_text("{\n\tadmin off\n\tauto_https off\n}\n" + text)
        return file, ["validate", "--adapter", "caddyfile", "--config", str(file)]
    certificate = str(make_certificate(directory))
    text = replaced(text, ("127.0.0.1:8000", upstream), ("600s", f"{silence}s"))
    if name == "haproxy":
        path = "/etc/ssl/llm.example.org.pem"
        file.write_text(replaced(text, (path, certificate), ("bind :443", f"bind :{port}")))
        return file, ["-c", "-f", str(file)]
    text = replaced(
        text,
        ("/etc/ssl/llm.example.org.pem", certificate),
        ("/etc/ssl/llm.example.org.key", certificate),
        ("listen 443", f"listen 127.0.0.1:{port}"),
    )
    site = directory / "site.conf"
    site.write_text(text)
    user = "user root;" if os.geteuid() == 0 else ""  # else its workers cannot enter the directory
    file.write_text(NGINX.format(directory=directory, site=site, user=user))
    return file, ["-t", "-e", "stderr", "-c", str(file)]


RUN = {
    "nginx": ["-e", "stderr", "-c"],
    "haproxy": ["-db", "-f"],
    "caddy": ["run", "--adapter", "caddyfile", "--config"],
}


class Proxy:
    """A proxy in front of a server, in a directory of its own, until the block ends.

    Parameters
    ----------
    name
        One of :data:`PROXIES`.
    upstream
        Host and port of the server.
    silence
        Seconds the server may be silent.
    """

    def __init__(self, name: str, directory: Path, upstream: str, silence: int = 600) -> None:
        self.port = free_port()
        binary = program(name)
        assert binary is not None
        file, _ = configure(name, directory, self.port, upstream, silence)
        self.secure = name != "caddy"
        self.url = f"http{'s' * self.secure}://127.0.0.1:{self.port}"
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - closed by __exit__
        environment = {**os.environ, "HOME": str(directory), "XDG_DATA_HOME": str(directory)}
        self._process = subprocess.Popen(
            [binary, *RUN[name], str(file)], stdout=self._log, stderr=self._log, env=environment
        )

    def __enter__(self) -> Self:
        try:
            self._await_start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _await_start(self) -> None:
        end = time.monotonic() + SECONDS
        while True:
            assert self._process.poll() is None, self.log
            assert time.monotonic() < end, self.log
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            time.sleep(0.02)

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    @property
    def log(self) -> str:
        """What it has written so far."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode("utf-8", "replace")

    def client(self, key: str | None = None) -> httpx.Client:
        """A client that speaks to it over connections of its own."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE, verify=False)
