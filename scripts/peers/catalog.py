"""The servers that are compared, how each is started, and what has to be there for it.

Settings are those with which each was fastest on two cores; PORT, MODELS and the like are filled in
by the script. A peer whose files are missing is left out, with a word.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Peer:
    """One server, or one engine that is driven in process.

    Parameters
    ----------
    name
        For tables; ours begin with "turnstile".
    precision
        Of its weights, as far as ratios go by precision.
    command
        What starts it.
    in_process
        Whether it takes plans from standard input (``openvino_driver.py``), and no HTTP.
    needs
        Files without which it cannot run.
    """

    name: str
    precision: str
    command: tuple[str, ...]
    in_process: bool = False
    needs: tuple[Path, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        """Whether it is Turnstile."""
        return self.name.startswith("turnstile")

    @property
    def missing(self) -> list[Path]:
        """The files it lacks."""
        return [path for path in self.needs if not path.exists()]


NGRAM = (
    '{"method": "ngram", "num_speculative_tokens": 4,'
    ' "prompt_lookup_min": 3, "prompt_lookup_max": 4}'
)
"""Guesses from the text itself, as vLLM makes them; of a fixed length, so a short one."""


def catalog(directory: Path, model: Path, port: int) -> dict[str, Peer]:
    """All peers by name, whether installed or not.

    Parameters
    ----------
    directory
        Where ``install.py`` puts environments and models.
    model
        The GGUF file that Turnstile serves.
    """
    peers = (
        _turnstile("turnstile-int8", "int8", "int8", port),
        _turnstile("turnstile-bf16", "bf16", "bfloat16", port),
        _llama("llama-bf16", "bf16", directory, directory / "model-bf16.gguf", port),
        _turnstile("turnstile-bf16-kv8", "bf16", "bfloat16", port, "--kv-cache-dtype", "int8"),
        _turnstile("turnstile-int8-ngram", "int8", "int8", port, "--spec-method", "ngram"),
        _turnstile("turnstile-bf16-ngram", "bf16", "bfloat16", port, "--spec-method", "ngram"),
        # Its AMX products for Q4_1 end in an illegal instruction (tiles that nobody configured).
        _llama("llama-q4_1", "int4", directory, model, port, "--no-repack"),
        _openvino("openvino-bf16", "bf16", directory, "model-openvino-bf16"),
        _openvino("openvino-int8", "int8", directory, "model-openvino-int8"),
        _vllm("vllm-bf16", directory, port),
        _vllm("vllm-bf16-ngram", directory, port, "--speculative-config", NGRAM),
    )
    return {peer.name: peer for peer in peers}


def _turnstile(name: str, precision: str, dtype: str, port: int, *more: str) -> Peer:
    flags = ("--dtype", dtype, "--port", str(port), "--log-level", "warning", *more)
    return Peer(
        name,
        precision,
        (sys.executable, "-m", "turnstile", "serve", *flags),
        environment={"PYTHONPATH": str(ROOT / "src")},
    )


def _llama(name: str, precision: str, directory: Path, model: Path, port: int, *more: str) -> Peer:
    binary = directory / "llama" / "llama-server"
    # 32 slots of 1,280 tokens: enough for the longest request of W1. More slots make it slower.
    flags = ("-np", "32", "-c", str(32 * 1280), "-t", str(_cores()), "--port", str(port))
    return Peer(
        name,
        precision,
        (str(binary), "-m", str(model), *flags, *more),
        needs=(binary, model),
    )


def _openvino(name: str, precision: str, directory: Path, model: str) -> Peer:
    python = directory / "openvino" / "bin" / "python"
    driver = Path(__file__).with_name("openvino_driver.py")
    path = directory / model
    return Peer(
        name,
        precision,
        (str(python), str(driver), str(path), "--precision", "bf16"),
        in_process=True,
        needs=(python, path / "openvino_model.xml"),
    )


def _vllm(name: str, directory: Path, port: int, *more: str) -> Peer:
    binary = directory / "vllm" / "bin" / "vllm"
    model = directory / "model-bf16"
    flags = ("--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "256", *more)
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        # Its default leaves a core of two to the API process; shared, it is faster.
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{_cores() - 1}",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    preloads = [str(path) for path in _preloads(directory)]
    if preloads:
        environment["LD_PRELOAD"] = ":".join(preloads)
    return Peer(
        name,
        "bf16",
        (str(binary), "serve", str(model), "--port", str(port), *flags),
        needs=(binary, model / "model.safetensors"),
        environment=environment,
    )


def _preloads(directory: Path) -> list[Path]:
    """The allocator and the OpenMP that vLLM's own guide asks to preload, where they are."""
    site = directory / "vllm" / "lib"
    found = sorted(site.glob("**/libiomp5.so"))[:1]
    system = Path("/usr/lib/x86_64-linux-gnu")
    return sorted(system.glob("libtcmalloc_minimal.so.4"))[:1] + found


def _cores() -> int:
    return len(os.sched_getaffinity(0))
