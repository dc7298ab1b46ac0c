"""From a configuration to a step loop: model, backend, page pool, scheduler."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from turnstile.core.pages import PagePool
from turnstile.core.scheduler import Scheduler, SchedulerConfig
from turnstile.engine import faults
from turnstile.engine.config import EngineConfig, EngineConfigError
from turnstile.engine.loop import StepLoop
from turnstile.engine.machine import available_memory, compute_threads, cpu_flags, total_memory
from turnstile.engine.policies import admission_policy, preemption_policy, queue_policy
from turnstile.engine.protocol import EngineInfo, StepResult
from turnstile.engine.speculation import drafter_of, most_draft_tokens

if TYPE_CHECKING:
    from turnstile.models.decoder import Decoder
    from turnstile.models.source import ModelSource

MODEST_POOL = 512 << 20
"""Bytes of the default KV pool on a CPU, unless the model's context needs more."""

Emit = Callable[[StepResult], None]
Report = Callable[[str, float], None]


def build_engine(
    config: EngineConfig, epoch: int, report: Report
) -> tuple[Callable[[Emit], StepLoop], EngineInfo]:
    """Load the model and make everything a step loop needs.

    ``report(stage, fraction)`` is told how far loading has come. Returns the way to make the loop
    once its output is known, and what to tell the world about this engine.

    Raises
    ------
    ModelError, EngineConfigError, BackendError
        With a sentence that says what to change.
    """
    config.check()
    if config.model.startswith("fake:"):
        return _build_fake(config, epoch)
    return _build_real(config, epoch, report)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, its weights and the backend that computes it, as a configuration asks for them."""

    source: ModelSource
    decoder: Decoder
    weight_format: str
    threads: int


def load_model(config: EngineConfig, report: Report = lambda stage, fraction: None) -> LoadedModel:
    """Find the model, choose a backend for it and load the weights.

    Raises
    ------
    ModelError, BackendError
        With a sentence that says what to change.
    """
    from turnstile.kernels import create_backend
    from turnstile.models.decoder import Decoder
    from turnstile.models.source import resolve

    threads = config.threads or compute_threads()
    device = config.device if config.device != "auto" else _best_device()
    name = None if config.backend == "auto" else config.backend
    source = resolve(config.model, revision=config.revision)
    weight_format = _weight_format(config, device)
    backend = create_backend(
        device, weight_format, _kv_format(config), config.exact, threads, name=name
    )
    decoder = Decoder.load(
        source, backend, lambda done, total: report("weights", done / max(1, total))
    )
    return LoadedModel(source, decoder, weight_format, threads)


def _build_real(
    config: EngineConfig, epoch: int, report: Report
) -> tuple[Callable[[Emit], StepLoop], EngineInfo]:
    from turnstile.engine.batch import BatchBuilder
    from turnstile.engine.runner import Runner
    from turnstile.text.grammar import GrammarCompiler
    from turnstile.text.tokenizer import Tokenizer

    began = time.monotonic()
    model = load_model(config, report)
    source, decoder, backend = model.source, model.decoder, model.decoder.backend
    try:
        page_bytes = backend.kv_page_bytes(decoder.kv_shape(config.page_size, 1))
    except ValueError as error:
        raise EngineConfigError(f"With --page-size {config.page_size}: {error}.") from error
    max_positions = source.config.max_positions
    num_pages = pool_pages(config, page_bytes, max_positions, backend.device)
    max_model_len = _max_model_len(config, max_positions, num_pages)
    kv = backend.allocate_kv(decoder.kv_shape(config.page_size, num_pages))
    builder = BatchBuilder(
        config.max_num_batched_tokens,
        config.max_num_seqs,
        -(-max_model_len // config.page_size) + 1,
        config.page_size,
    )
    runner = faults.with_faults(
        Runner(decoder, kv, builder, lambda: GrammarCompiler(Tokenizer.from_path(source.path)))
    )
    scheduler = make_scheduler(config, num_pages, max_model_len)
    info = EngineInfo(
        **_limits(config, epoch, num_pages, max_model_len),
        model=source.name,
        architecture=source.config.family.name,
        vocab_size=source.config.vocab_size,
        kv_bytes=num_pages * page_bytes,
        kv_dtype=_kv_format(config) or model.weight_format,
        weight_format=model.weight_format,
        weight_bytes=source.config.num_parameters * _WEIGHT_BYTES[model.weight_format],
        num_parameters=source.config.num_parameters,
        backend=backend.name,
        device=backend.device,
        threads=model.threads,
        exact=backend.exact,
        load_seconds=time.monotonic() - began,
    )
    drafter = drafter_of(config)
    return lambda emit: StepLoop(scheduler, runner, epoch, emit, drafter=drafter), info


def _build_fake(config: EngineConfig, epoch: int) -> tuple[Callable[[Emit], StepLoop], EngineInfo]:
    """An engine without a model, for tests of everything around it."""
    if not faults.enabled():
        raise EngineConfigError(
            "A model named fake:… exists only for tests, with TURNSTILE_FAULTS=1 set."
        )
    fake: Any = importlib.import_module("turnstile.engine.fake")
    num_pages = config.num_pages or 4096
    max_model_len = _max_model_len(config, 8192, num_pages)
    executor = fake.make_fake(config.model)
    scheduler = make_scheduler(config, num_pages, max_model_len)
    info = EngineInfo(
        **_limits(config, epoch, num_pages, max_model_len),
        model=config.model,
        architecture="fake",
        vocab_size=executor.vocab_size,
        kv_bytes=0,
        kv_dtype="none",
        weight_format="none",
        weight_bytes=0,
        num_parameters=0,
        backend="fake",
        device="cpu",
        threads=1,
        exact=True,
        load_seconds=0.0,
    )
    drafter = drafter_of(config)
    executor = faults.with_faults(executor)
    return lambda emit: StepLoop(scheduler, executor, epoch, emit, drafter=drafter), info


def _limits(config: EngineConfig, epoch: int, num_pages: int, max_model_len: int) -> dict[str, Any]:
    """What an :class:`EngineInfo` says of any engine, whatever computes."""
    return {
        "epoch": epoch,
        "pid": os.getpid(),
        "max_model_len": max_model_len,
        "page_size": config.page_size,
        "num_pages": num_pages,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "admission": config.admission,
        "scheduling_policy": config.scheduling_policy,
        "draft_tokens": most_draft_tokens(config),
        "prefix_caching": config.enable_prefix_caching,
    }


def make_scheduler(config: EngineConfig, num_pages: int, max_model_len: int) -> Scheduler:
    """The scheduler of this configuration, with its policies by name."""
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            target_itl=config.target_itl,
            neighbour_steps=config.neighbour_steps or None,
            speculation=drafter_of(config) is not None,
        ),
        PagePool(num_pages, config.page_size),
        admission_policy(config.admission)(),
        queue_policy(config.scheduling_policy)(),
        prefix_caching=config.enable_prefix_caching,
        victim=preemption_policy(config.preemption),
    )


def pool_pages(config: EngineConfig, page_bytes: int, max_positions: int, device: str) -> int:
    """Pages of the pool: as told, or a modest share of the memory that is free here.

    Raises
    ------
    EngineConfigError
        The memory does not hold a single page, or not the pages that were asked for.
    """
    if config.num_pages is not None:
        _check_room("--num-pages", config.num_pages, config.num_pages * page_bytes, device)
        return config.num_pages
    if config.kv_cache_memory_bytes is not None:
        asked = config.kv_cache_memory_bytes
        _check_room("--kv-cache-memory-bytes", asked, asked, device)
        pages = config.kv_cache_memory_bytes // page_bytes
    elif device.startswith("cuda"):
        import torch

        free, total = torch.cuda.mem_get_info()
        pages = int(max(0, free - (1 - config.gpu_memory_utilization) * total)) // page_bytes
    else:
        context = config.max_model_len or max_positions
        wanted = max(MODEST_POOL, 2 * -(-context // config.page_size) * page_bytes)
        pages = min(wanted, available_memory() // 4) // page_bytes
    if pages < 1:
        raise EngineConfigError(
            f"The memory for the KV cache does not hold one page ({page_bytes} bytes). Set "
            "--kv-cache-memory-bytes or --num-pages."
        )
    return pages


def _check_room(flag: str, value: int, wanted: int, device: str) -> None:
    """Refuse a pool larger than all memory. Less than that may still be free when it is used."""
    if device.startswith("cuda"):
        import torch

        total = torch.cuda.mem_get_info()[1]
    else:
        total = total_memory()
    if wanted > total:
        raise EngineConfigError(
            f"{flag} {value} would take {wanted / 2**30:,.1f} GiB for the KV cache, and all the "
            f"memory there is for it is {total / 2**30:,.1f} GiB."
        )


def _max_model_len(config: EngineConfig, max_positions: int, num_pages: int) -> int:
    config.check_positions(max_positions)
    return config.max_model_len or min(max_positions, num_pages * config.page_size)


def _best_device() -> str:
    if sys.platform == "linux" and not any(map(os.path.exists, _GPU_NODES)):
        return "cpu"  # no need to ask torch, which takes a second and 200 MB to import
    try:
        import torch
    except (ImportError, OSError):
        return "cpu"  # where the native kernels need none of it
    return "cuda" if torch.cuda.is_available() else "cpu"


def _weight_format(config: EngineConfig, device: str) -> str:
    """What ``auto`` means: on a CPU int8 where the native kernels have instructions that multiply
    bytes faster than floats, bfloat16 where the processor computes with it, float32 elsewhere.
    """
    if config.dtype != "auto":
        return config.dtype
    if device.startswith("cuda"):
        return "bfloat16"
    if config.backend != "reference":
        from turnstile.kernels import native

        usable = native.refusal(device, "int8", _kv_format(config)) is None
        if usable and native.default_level() not in native.SLOW_INT8:
            return "int8"
    return "bfloat16" if "avx512_bf16" in cpu_flags() else "float32"


def _kv_format(config: EngineConfig) -> str | None:
    """The form of K and V as backends take it; None: that of the weights."""
    return None if config.kv_cache_dtype == "auto" else config.kv_cache_dtype


_GPU_NODES = ("/dev/nvidiactl", "/dev/nvhost-ctrl-gpu", "/dev/kfd", "/dev/dxg")
"""What the drivers of GPUs make on Linux: NVIDIA's, that of its small boards, AMD's, Windows's."""

_WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
