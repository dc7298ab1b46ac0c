"""The Dockerfile and the systemd unit: as far as they can be tried without Docker and systemd."""

from __future__ import annotations

import configparser
import fnmatch
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from e2e.harness import PATIENCE, ROOT, SCRIPTED, ServerProcess, free_port
from turnstile.server.config import ServerConfig

UNIT = ROOT / "deploy/turnstile.service"


# -- the Dockerfile ---------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, continued lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if line[:1] != "#"]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(line.split()[0], line.split(None, 1)[1]) for line in joined.splitlines() if line]


def left_out(path: str) -> bool:
    """Whether .dockerignore keeps a path from the build: the last pattern that fits decides."""
    ignored = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.lstrip("!")
        if not line or line[0] == "#":
            continue
        parents = ["/".join(path.split("/")[:k]) for k in range(1, path.count("/") + 2)]
        plain = pattern.removeprefix("**/")
        if plain != pattern:
            parents = [part for parent in parents for part in (parent, parent.split("/")[-1])]
        if any(fnmatch.fnmatchcase(parent, plain) for parent in parents):
            ignored = line[0] != "!"
    return ignored


def test_the_image_is_built_from_files_that_are_there_and_from_no_others() -> None:
    copied = [
        word
        for name, words in instructions()
        if name == "COPY" and not words.startswith("--from")
        for word in words.split()[:-1]
    ]
    assert {"constraints.txt", "csrc", "src", "pyproject.toml"} <= set(copied)
    for path in copied:
        assert (ROOT / path).exists(), path
        assert not left_out(path), path
    listed = subprocess.run(
        ["git", "ls-files", "src", "csrc"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert [path for path in listed.stdout.splitlines() if left_out(path)] == []
    for path in (".git", ".venv", "peers/x", "src/turnstile/__pycache__", "csrc/build", "docs"):
        assert left_out(path), path


def test_the_image_starts_the_server_itself_and_as_nobody_in_particular() -> None:
    said = dict(instructions())
    assert json.loads(said["ENTRYPOINT"]) == ["turnstile"]  # no shell that keeps SIGTERM for itself
    assert json.loads(said["CMD"]) == ["serve"]
    assert said["USER"] != "root"
    order = [name for name, _ in instructions()]
    assert order.index("USER") < order.index("VOLUME")
    environment = " ".join(words for name, words in instructions() if name == "ENV")
    known = {f"TURNSTILE_SERVE_{name.upper()}" for name in vars(ServerConfig())}
    for name in re.findall(r"\b(TURNSTILE_\w+)=", environment):
        assert name in known | {"TURNSTILE_CACHE"}, name


@pytest.mark.e2e
def test_the_health_check_says_whether_the_server_lives(tiny: Path, tmp_path: Path) -> None:
    command = json.loads(dict(instructions())["HEALTHCHECK"].partition("CMD ")[2])
    assert command[0] == "python"
    port = free_port()

    def check() -> int:
        done = subprocess.run(
            [sys.executable, *command[1:]], capture_output=True, timeout=30, check=False,
            env={"TURNSTILE_SERVE_PORT": str(port), "http_proxy": "http://127.0.0.1:9"},
        )  # fmt: skip
        return done.returncode

    assert check() != 0
    (hold := tmp_path / "hold").touch()
    env = {"TEST_HOLD": str(hold)}
    with ServerProcess(tiny, command=SCRIPTED, env=env, port=port, wait=False):
        assert check() == 0, "loading is no reason to be killed"


# -- the unit ---------------------------------------------------------------------------------


def unit() -> dict[str, list[str]]:
    """The unit's settings; a name may be given more than once."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and line[0] not in "#[":
            found.setdefault(name, []).append(value)
    return found


def test_the_unit_sets_what_the_server_knows() -> None:
    settings = unit()
    known = {f"TURNSTILE_SERVE_{name.upper()}" for name in vars(ServerConfig())}
    variables = dict(each.split("=") for line in settings["Environment"] for each in line.split())
    assert set(variables) <= known | {"TURNSTILE_CACHE", "HF_HOME"}
    cache = f"/var/cache/{settings['CacheDirectory'][0]}"
    assert variables["TURNSTILE_CACHE"] == cache
    assert variables["HF_HOME"].startswith(f"{cache}/")
    assert shlex.split(settings["ExecStart"][0])[1] == "serve"
    drain = ServerConfig().shutdown_timeout
    assert float(settings["TimeoutStopSec"][0]) > drain + 10, "streams may end"
    configparser.ConfigParser(strict=False, allow_no_value=True).read_string(UNIT.read_text())


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed here")
    path = tmp_path / "turnstile.service"
    path.write_text(UNIT.read_text().replace("/opt/turnstile/bin/turnstile", "/bin/true"))
    for command in (["verify", "--recursive-errors=no"], ["security", "--offline=yes"]):
        done = subprocess.run(
            [analyze, *command, *(["--threshold=25"] * (command[0] == "security")), str(path)],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "turnstile.service" not in done.stderr, done.stderr


@pytest.mark.e2e
def test_systemd_hears_that_it_is_ready_that_it_lives_and_that_it_stops(
    tiny: Path, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(PATIENCE)
        env = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "30000000"}
        with ServerProcess(tiny, command=SCRIPTED, env=env, canary=False) as server:
            heard = [listener.recv(100)]
            while heard[-1] != b"READY=1":
                heard.append(listener.recv(100))
            assert set(heard[:-1]) <= {b"WATCHDOG=1"}
            assert [listener.recv(100) for _ in range(2)] == [b"WATCHDOG=1"] * 2
            server.process.terminate()
            while heard[-1] != b"STOPPING=1":
                heard.append(listener.recv(100))
            assert server.wait() == 0


@pytest.mark.e2e
def test_a_watchdog_that_is_somebody_elses_hears_nothing(tiny: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(PATIENCE)
        env = {
            "NOTIFY_SOCKET": str(tmp_path / "notify"),
            "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1",
        }  # fmt: skip
        with ServerProcess(tiny, command=SCRIPTED, env=env, canary=False) as server:
            assert listener.recv(100) == b"READY=1"
            listener.settimeout(2.5)
            with pytest.raises(TimeoutError):
                listener.recv(100)
            server.process.terminate()
            assert server.wait() == 0


def test_the_first_process_of_a_container_can_be_stopped_before_it_serves() -> None:
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*unshare, "true"], check=False).returncode
    ):
        pytest.skip("namespaces cannot be made here")
    program = (
        "import os, time; from turnstile.cli import main\n"
        "def fetch(arguments):\n"
        "    print(os.getpid(), flush=True)\n"
        "    time.sleep(60)\n"
        "main.main = fetch; main.run()"
    )
    with subprocess.Popen(
        [*unshare, sys.executable, "-c", program], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    ) as outside:  # fmt: skip
        try:
            assert outside.stdout is not None
            assert outside.stdout.readline() == "1\n"
            (inside,) = psutil.Process(outside.pid).children()
            inside.terminate()
            assert outside.wait(20) == 128 + 15
        finally:
            outside.kill()
