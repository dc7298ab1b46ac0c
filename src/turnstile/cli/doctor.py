"""``turnstile doctor``: what would keep Turnstile from serving well here, and what to do."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Literal

from cyclopts import App

from turnstile import __version__
from turnstile.engine import machine
from turnstile.models.default_model import NAME, cache_directory, is_present

app = App(name="doctor", help="Check this machine, and say what would keep Turnstile from it.")

Verdict = Literal["ok", "note", "bad"]

_VECTOR = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "asimddp")
_DISK = 2 * 2**30
_MEMORY = 2 * 2**30
_PACKAGES = ("numpy", "starlette", "uvicorn", "uvloop", "msgspec", "tokenizers")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. ``bad`` keeps Turnstile from serving; ``advice`` says what helps."""

    subject: str
    verdict: Verdict
    text: str
    advice: str = ""


@app.default
def doctor(*, model: str = NAME, host: str = "127.0.0.1", port: int = 8000) -> int:
    """Look at everything that serving needs; the exit code is 1 if something is missing.

    Parameters
    ----------
    model
        The model that would be served.
    host
        The address that would be listened on.
    port
        The port that would be listened on.
    """
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    marks = {"ok": "[green]ok  [/green]", "note": "[yellow]note[/yellow]", "bad": "[red]bad [/red]"}
    checks: list[Callable[[], Finding]] = [
        check_python, check_packages, check_torch, check_kernels, check_cpus, check_vectors,
        check_memory, check_disk, lambda: check_port(host, port), lambda: check_model(model),
    ]  # fmt: skip
    failed = False
    console.print(f"Turnstile {__version__} on {platform.platform()}")
    for check in checks:
        finding = check()
        failed = failed or finding.verdict == "bad"
        line = f"{marks[finding.verdict]} {finding.subject:<10} {escape(finding.text)}"
        console.print(
            line + (f"\n                → {escape(finding.advice)}" * bool(finding.advice))
        )
    return 1 if failed else 0


def check_python() -> Finding:
    """Look at the interpreter."""
    return Finding("python", "ok", f"{platform.python_version()} ({sys.executable})")


def check_packages() -> Finding:
    """Look for the packages."""
    versions, missing = [], []
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            missing.append(package)
    if missing:
        return Finding(
            "packages", "bad", f"missing: {', '.join(missing)}",
            "In the source tree: make install (or pip install -c constraints.txt -e .)",
        )  # fmt: skip
    return Finding("packages", "ok", ", ".join(versions))


def check_torch() -> Finding:
    """Load torch and look for a GPU."""
    # The native kernels serve without it.
    without: Verdict = "bad" if find_spec("turnstile_kernels") is None else "note"
    try:
        import torch
    except ModuleNotFoundError:
        advice = "pip install torch, for a GPU or the reference kernels."
        return Finding("torch", without, "not installed", advice)
    except (ImportError, OSError) as error:
        advice = "Reinstall torch for this CPU."
        return Finding("torch", without, f"cannot be loaded: {error}", advice)
    if torch.cuda.is_available():
        return Finding("torch", "ok", f"{torch.__version__}, GPU {torch.cuda.get_device_name(0)}")
    return Finding("torch", "ok", f"{torch.__version__}, no GPU: serving on the CPU")


def check_kernels() -> Finding:
    """Look for the native kernels."""
    if find_spec("turnstile_kernels") is None:
        return Finding(
            "kernels", "note", "the native kernels are not installed: several times slower",
            "In the source tree: pip install ./csrc (needs a C++20 compiler and Python's headers, "
            "on Debian g++ and python3-dev).",
        )  # fmt: skip
    return Finding("kernels", "ok", "native kernels are installed")


def check_cpus() -> Finding:
    """Count the CPUs that may be used, and see whether the environment disagrees."""
    usable, quota = machine.usable_cpus(), machine.cpu_quota()
    text = f"{usable} of {os.cpu_count()} usable"
    if quota is not None:
        text += f" (quota {quota:g})"
    preset = os.environ.get("OMP_NUM_THREADS", "")
    if preset.isdigit() and int(preset) > usable:
        return Finding(
            "cpus", "note", f"{text}, but OMP_NUM_THREADS is {preset}",
            f"Unset it, or use --threads {usable}: more threads than CPUs wait for each other.",
        )  # fmt: skip
    return Finding("cpus", "ok", text)


def check_vectors() -> Finding:
    """Look for vector instructions."""
    found = [flag for flag in _VECTOR if flag in machine.cpu_flags()]
    if not found:
        return Finding("vectors", "note", "neither AVX2 nor better", "Expect it to be slow.")
    return Finding("vectors", "ok", ", ".join(found))


def check_memory() -> Finding:
    """See whether there is memory for a small model and its KV pool."""
    available = machine.available_memory()
    limit = machine.memory_limit()
    text = f"{available / 2**30:.1f} GiB available"
    if limit is not None:
        text += f", container limit {limit / 2**30:.1f} GiB"
    if available < _MEMORY:
        return Finding(
            "memory", "note", text, "Use a small model, and --kv-cache-memory-bytes 128M."
        )
    return Finding("memory", "ok", text)


def check_disk() -> Finding:
    """See whether there is room in the cache directory."""
    directory = cache_directory()
    there = next(path for path in (directory, *directory.parents) if path.exists())
    if not os.access(there, os.W_OK):
        return Finding("disk", "bad", f"{there} cannot be written to", "Set TURNSTILE_CACHE.")
    free = shutil.disk_usage(there).free
    text = f"{free / 2**30:.1f} GiB free in {directory}"
    if free < _DISK:
        return Finding("disk", "note", text, "Set TURNSTILE_CACHE to a larger disk.")
    return Finding("disk", "ok", text)


def check_port(host: str, port: int) -> Finding:
    """Try to listen there."""
    from turnstile.server.config import ConfigError, ServerConfig
    from turnstile.server.http.binding import BindError, bind

    # Who may call is settled by flags that this verb is not given.
    config = ServerConfig(host=host, port=port, allow_unauthenticated=True)
    try:
        config.check()
        with bind(config) as listener:
            family = "IPv6" if listener.family == socket.AF_INET6 else "IPv4"
    except (ConfigError, BindError) as error:
        return Finding("port", "bad", f"{host}:{port} cannot be had", str(error))
    return Finding("port", "ok", f"{host}:{port} is free ({family})")


def check_model(model: str) -> Finding:
    """See whether the model is here and readable."""
    from turnstile.models.errors import ModelError
    from turnstile.models.source import resolve

    if model == NAME and not is_present():
        return Finding("model", "note", f"{NAME} is not fetched yet", "turnstile pull")
    try:
        source = resolve(model)
        size = source.open_tensors().num_bytes
    except ModelError as error:
        return Finding("model", "bad", f"{model} cannot be served", str(error))
    parameters = source.config.num_parameters / 1e6
    return Finding("model", "ok", f"{source.name}, {parameters:.0f} M, {size / 2**20:.0f} MiB")
