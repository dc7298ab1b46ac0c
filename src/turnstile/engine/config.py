"""How the engine is set up: :class:`EngineConfig`. Its docstrings are the command line's help.

Torch-free: the command line, the API process and the engine process all read it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from turnstile.models.default_model import NAME as DEFAULT_MODEL

MOST_THREADS = 1024
"""Compute threads that may be asked for: a number no machine has, and every machine can start."""


class EngineConfigError(ValueError):
    """The configuration cannot work; the message says what to change."""


@dataclass(kw_only=True)
class EngineConfig:
    """The model, the memory and the scheduler of one engine."""

    model: str = DEFAULT_MODEL
    """Path of a .gguf file or a Hugging Face directory, a hub id, or the default model's name."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    """Form of the weights in memory (alias --quantization). `auto` takes what is fastest here and
    exact."""
    device: str = "auto"
    """Where to compute: `cpu`, `cuda`, `cuda:1`; `auto` takes a GPU if there is one."""
    backend: Literal["auto", "native", "reference"] = "auto"
    """Kernels: `native` is fast, `reference` is plain torch and the definition of right."""
    exact: bool = True
    """Give the same tokens alone and in a crowd."""
    threads: int | None = None
    """Compute threads. Default: the CPUs that affinity and the container allow, less one from 3."""
    max_model_len: int | None = None
    """Most tokens of a prompt and its output. Default: the model's, if the pool holds it."""
    max_num_seqs: int = 128
    """Sequences computed at once (slots)."""
    max_num_batched_tokens: int = 768
    """Tokens of a step, prompts and outputs together."""
    target_itl: float | None = None
    """Seconds a step should take while others stream; long prompts then get smaller chunks."""
    neighbour_steps: float = 2.0
    """Bound on steps in which one tenant streams and another's prompts are computed, in steps with
    a token in every slot. 0: none."""
    page_size: int = 16
    """Tokens of a KV page (alias --block-size)."""
    num_pages: int | None = None
    """Pages of the pool, exactly. Default: from the memory."""
    kv_cache_memory_bytes: int | None = None
    """Bytes of the KV pool. Default: a modest share of the memory that is free here."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory to use, weights included."""
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    """Form of K and V in the pages. `auto`: that of the weights."""
    enable_prefix_caching: bool = True
    """Keep the pages of finished prompts for requests that begin alike, and the ids of chats."""
    admission: str = "expected"
    """When a sequence may start: by its `expected` length, only if it surely fits (`guaranteed`),
    or always (`unchecked`), to see requests fail of it; or your own, as module:Class."""
    scheduling_policy: str = "fair"
    """Whose turn it is: tenants share by tokens (`fair`), first come first served (`fcfs`), or by
    `priority` alone; or your own, as module:Class."""
    preemption: str = "fair"
    """Who must go when the pages run out: the latest priority, then the tenant served most, then
    the least work lost (`fair`), or the `newest`; or your own, as module:function."""
    speculative_config: str | None = None
    """Drafts, as JSON: {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 3,
    "prompt_lookup_max": 12} (these are the defaults). Answers stay the same, token for token."""
    spec_method: Literal["none", "ngram"] = "none"
    """`ngram`: guess that text goes on as it did where the same tokens stood before."""
    spec_tokens: int | None = None
    """Most tokens of a draft. Default: 8."""
    step_timeout: float = 60.0
    """Seconds after which a step counts as hung and the engine is restarted."""
    max_restarts: int = 8
    """Engine restarts without a served request in between before the server gives up."""

    def check(self) -> None:
        """Raise :class:`EngineConfigError` for values no engine could start with."""
        for name in ("max_num_seqs", "max_num_batched_tokens", "page_size"):
            if getattr(self, name) < 1:
                raise EngineConfigError(f"--{name.replace('_', '-')} must be at least 1.")
        if not 0 <= self.neighbour_steps < math.inf:
            raise EngineConfigError("--neighbour-steps must be a number that is not negative.")
        for name in ("target_itl", "step_timeout"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds < math.inf:
                flag = name.replace("_", "-")
                raise EngineConfigError(f"--{flag} must be above 0 seconds, not {seconds:g}.")
        if self.max_restarts < 0:
            raise EngineConfigError("--max-restarts must not be negative; 0 restarts nothing.")
        for name in ("threads", "max_model_len", "num_pages", "kv_cache_memory_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise EngineConfigError(f"--{name.replace('_', '-')} must be at least 1.")
        if self.threads is not None and self.threads > MOST_THREADS:
            raise EngineConfigError(
                f"--threads {self.threads} is more than {MOST_THREADS}. More than the machine has "
                "processors only makes it slower."
            )
        if self.max_model_len == 1:
            raise EngineConfigError("--max-model-len 1 leaves no room for a prompt and an output.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise EngineConfigError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least "
                f"--max-num-seqs ({self.max_num_seqs}): every sequence gets one token a step."
            )
        self._check_speculation()
        self._check_policies()
        if not 0 < self.gpu_memory_utilization <= 1:
            raise EngineConfigError("--gpu-memory-utilization must be above 0 and at most 1.")

    def check_positions(self, most: int) -> None:
        """Raise :class:`EngineConfigError` for a context longer than the model's positions."""
        if self.max_model_len is not None and self.max_model_len > most:
            raise EngineConfigError(
                f"--max-model-len {self.max_model_len} is more than the {most} positions this "
                "model knows."
            )

    def _check_policies(self) -> None:
        # Here, so that --help need not wait for numpy.
        from turnstile.engine import policies

        try:
            policies.admission_policy(self.admission)
            policies.queue_policy(self.scheduling_policy)
            policies.preemption_policy(self.preemption)
        except policies.PolicyError as error:
            raise EngineConfigError(str(error)) from error

    def _check_speculation(self) -> None:
        # Here, so that --help need not wait for what drafts are made with.
        from turnstile.engine.speculation import SpeculativeConfigError, speculation_of

        try:
            speculation_of(self)
        except SpeculativeConfigError as error:
            raise EngineConfigError(str(error)) from error
