"""The native CPU backend: ``csrc/``, the distribution ``turnstile-kernels``.

Operations of a step are recorded; :meth:`NativeBackend.head` runs them in one call without the
interpreter's lock, on one team of threads. So a step's K and V are in their pages, and its hidden
states computed, when ``head`` has returned, and not before. Rows never depend on the batch, for any
weight format: every accumulation runs in an order that the row's own position fixes.

Nothing here needs torch, which takes more than a second and 200 MB to import.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from turnstile.kernels.base import (
    Backend,
    FlatBatch,
    FloatArray,
    HeadWeights,
    Int64Array,
    KvShape,
    LayerWeights,
    Matrix,
    Opaque,
)
from turnstile.kernels.bfloat16 import bfloat16_bits
from turnstile.kernels.native_heads import stored_head_dim, with_stored_heads

if TYPE_CHECKING:
    from types import ModuleType

FORMATS = ("float32", "bfloat16", "int8")

LEVEL_VARIABLE = "TURNSTILE_ISA"
"""Environment variable that forces an instruction set level: amx, avx512vnni, avx512, avx2 or
portable.
"""


SLOW_INT8 = ("portable",)
"""Levels that multiply floats faster than bytes (see docs/performance.md, "Levels")."""


def _extension() -> tuple[ModuleType | None, str]:
    """The compiled module, or why there is none."""
    try:
        import turnstile_kernels
    except ImportError as error:
        return None, (
            f"the compiled kernels are not installed ({error}); "
            "`pip install ./csrc` in the source tree builds them"
        )
    return cast("ModuleType", turnstile_kernels), ""


def available() -> tuple[bool, str]:
    """Whether the compiled kernels can be used; if not, a sentence that says why."""
    module, reason = _extension()
    return module is not None, reason


def refusal(device: str, weight_format: str, kv_dtype: str | None) -> str | None:
    """Why this backend cannot serve, or None."""
    if device.partition(":")[0] != "cpu":
        return "it computes on the CPU only"
    if weight_format not in FORMATS:
        return f"weights are kept as {', '.join(FORMATS)}"
    if kv_dtype is not None and kv_dtype not in FORMATS:
        return f"K and V are kept as {', '.join(FORMATS)}"
    module, reason = _extension()
    if module is None:
        return reason
    forced = os.environ.get(LEVEL_VARIABLE)
    if forced and forced not in module.levels():
        return f"{LEVEL_VARIABLE}={forced}, but this processor runs {', '.join(module.levels())}"
    return None


def default_level() -> str:
    """The instruction set level of an engine that names none: ``$TURNSTILE_ISA``, or the best this
    processor runs. ModuleNotFoundError where the kernels are not installed.
    """
    module, reason = _extension()
    if module is None:
        raise ModuleNotFoundError(reason)
    return os.environ.get(LEVEL_VARIABLE) or cast(str, module.levels()[0])


def create(
    device: str, weight_format: str, kv_dtype: str | None, exact: bool, threads: int | None
) -> Backend:
    """Build the backend; K and V default to the format of the weights. It is always exact."""
    return NativeBackend(weight_format, kv_dtype or weight_format, threads)


def default_threads() -> int:
    """The processors this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


class ThreadsError(RuntimeError):
    """The system does not allow so many threads."""


@dataclass(frozen=True, slots=True)
class _Workspace:
    """Keeps the arrays alive that the recorded step will read."""

    batch: FlatBatch


class NativeBackend(Backend):
    """One engine of ``turnstile_kernels``.

    Parameters
    ----------
    weight_format, kv_dtype
        ``float32``, ``bfloat16`` or ``int8``. int8 weights have one scale an output, activations
        one a token, K and V one a token and head.
    threads
        Compute threads; None: as many as the process may use processors.
    level
        Instruction set level; None: ``$TURNSTILE_ISA``, or the best this processor runs.

    Raises
    ------
    ValueError
        The processor cannot run ``level``, or a format is unknown.
    ThreadsError
        The system does not allow so many threads.
    """

    name = "native"
    exact = True
    device = "cpu"

    def __init__(
        self,
        weight_format: str,
        kv_dtype: str,
        threads: int | None = None,
        *,
        level: str | None = None,
    ) -> None:
        module, reason = _extension()
        if module is None:
            raise ModuleNotFoundError(reason)
        level = level or default_level()
        self._module = module
        self._engine = module.Engine(level, threads or default_threads(), weight_format)
        self._weight_format = weight_format
        self.kv_dtype = kv_dtype
        self._start_threads()

    def _start_threads(self) -> None:
        """Have the team do a little, so that threads that cannot be had fail now and not the first
        request: the first work of a team starts it, and one row is no work for a team.
        """
        try:
            self._engine.argmax(np.zeros((2, 1), np.float32), np.empty(2, np.int64))
        except RuntimeError as error:
            raise ThreadsError(
                f"{self.threads} compute threads cannot be started ({error}). Ask for fewer with "
                "--threads, or allow more: pids of the container, TasksMax= of systemd, ulimit -u; "
                "each needs memory for its stack, too (ulimit -v)."
            ) from None

    @property
    def level(self) -> str:
        """The instruction set level in use."""
        return cast(str, self._engine.level)

    @property
    def threads(self) -> int:
        """The number of compute threads, the caller's included."""
        return cast(int, self._engine.threads)

    def laps(self) -> dict[str, float]:
        """Seconds spent in each part of all steps so far, as the calling thread saw them."""
        return cast("dict[str, float]", self._engine.laps())

    def peak_operations(self) -> float:
        """Operations a second that products of the weight format reach at best; takes seconds."""
        return cast(float, self._engine.peak_operations())

    def peak_bandwidth(self) -> float:
        """Bytes a second that can be read from memory at best; takes seconds."""
        return cast(float, self._engine.peak_bandwidth())

    # -- at load time -------------------------------------------------------------------------

    def prepare_embedding(self, table: Matrix) -> Opaque:
        """Keep the table: float32 as it is, else a bfloat16 copy."""
        if self._weight_format == "float32":
            return cast(Opaque, self._module.Embedding(_floats(table)))
        return cast(Opaque, self._module.Embedding(bfloat16_bits(_floats(table))))

    def prepare_layer(
        self, weights: LayerWeights, inv_freq: FloatArray, rope_scale: float
    ) -> Opaque:
        """Pack the matrices into panels; q, k, v become one product, gate and up another."""
        norm_width = weights.attention.head_dim
        weights = with_stored_heads(weights)
        shape = weights.attention
        padded_freq = np.zeros(shape.head_dim // 2, np.float32)
        padded_freq[: len(inv_freq)] = inv_freq
        layer = self._engine.layer(
            _floats(weights.input_norm),
            _floats(weights.q),
            _floats(weights.k),
            _floats(weights.v),
            _floats(weights.o),
            _floats(weights.post_attention_norm),
            _floats(weights.gate),
            _floats(weights.up),
            _floats(weights.down),
            _optional(weights.q_bias),
            _optional(weights.k_bias),
            _optional(weights.v_bias),
            _optional(weights.o_bias),
            _optional(weights.q_norm),
            _optional(weights.k_norm),
            padded_freq,
            rope_scale,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            norm_width,
            shape.scale,
            shape.sliding_window or 0,
            weights.norm_eps,
        )
        return cast(Opaque, layer)

    def prepare_head(self, weights: HeadWeights) -> Opaque:
        """Pack the projection into panels."""
        norm, projection = _floats(weights.norm), _floats(weights.projection)
        return cast(Opaque, self._engine.head(norm, projection, weights.norm_eps))

    def kv_page_bytes(self, shape: KvShape) -> int:
        """K, V and, for int8, a float32 scale of each token and head.

        Raises
        ------
        ValueError
            The page size is not a multiple of 16, or the head size is odd or above 512.
        """
        return cast(int, self._module.Pool.page_bytes(self.kv_dtype, *_sizes(shape)))

    def allocate_kv(self, shape: KvShape) -> Opaque:
        """Reserve the pool's addresses; the system gives memory as pages are first written."""
        return cast(Opaque, self._module.Pool(self.kv_dtype, *_sizes(shape), shape.num_pages))

    # -- one step -----------------------------------------------------------------------------

    def begin(self, batch: FlatBatch) -> Opaque:
        """Start recording. What an earlier step recorded and never ran is forgotten.

        Raises
        ------
        ValueError
            The batch contradicts itself.
        """
        self._engine.begin(
            batch.page_size,
            batch.ids,
            batch.positions,
            batch.page_tables,
            batch.query_offsets,
            batch.context_lengths,
            batch.logit_rows,
        )
        return _Workspace(batch)

    def embed(self, embedding: Opaque, workspace: Opaque) -> None:
        """Record. ValueError for a token id outside the vocabulary."""
        self._engine.embed(embedding)

    def attention_input(self, layer: Opaque, workspace: Opaque, kv: Opaque, index: int) -> None:
        """Record. ValueError for a page table that leaves the pool."""
        self._engine.attention_input(layer, kv, index)

    def attend(self, layer: Opaque, workspace: Opaque, kv: Opaque, index: int) -> None:
        """Record."""
        self._engine.attend(layer, kv, index)

    def attention_output(self, layer: Opaque, workspace: Opaque) -> None:
        """Record."""
        self._engine.attention_output(layer)

    def mlp_input(self, layer: Opaque, workspace: Opaque) -> None:
        """Record."""
        self._engine.mlp_input(layer)

    def mlp_output(self, layer: Opaque, workspace: Opaque) -> None:
        """Record."""
        self._engine.mlp_output(layer)

    def head(self, head: Opaque, workspace: Opaque) -> FloatArray:
        """Run the step. The logits lie in native memory that the next step overwrites."""
        rows = len(cast(_Workspace, workspace).batch.logit_rows)
        return cast(FloatArray, self._engine.run(head, rows))

    # -- pages --------------------------------------------------------------------------------

    def copy_pages(self, kv: Opaque, copies: list[tuple[int, int]]) -> None:
        """Copy pages one by one, in order. IndexError for a page outside the pool."""
        pool: Any = kv
        for source, target in copies:
            pool.copy_page(source, target)

    # -- sampling helpers ---------------------------------------------------------------------

    def argmax(self, logits: FloatArray) -> Int64Array:
        """One pass for the value, one up to its first place."""
        out = np.empty(len(logits), np.int64)
        self._engine.argmax(_rows(logits), out)
        return out

    def log_normalizer(self, logits: FloatArray) -> FloatArray:
        """Sixteen partial sums in order, then a fixed tree."""
        out = np.empty(len(logits), np.float32)
        self._engine.log_normalizer(_rows(logits), out)
        return out

    def top_k(self, logits: FloatArray, k: int) -> tuple[FloatArray, Int64Array]:
        """A heap of k. ValueError unless ``1 <= k <= vocab``."""
        if not 1 <= k <= logits.shape[1]:
            raise ValueError(f"top_k needs 1 <= k <= {logits.shape[1]}, not {k}")
        values = np.empty((len(logits), k), np.float32)
        indices = np.empty((len(logits), k), np.int64)
        self._engine.top_k(_rows(logits), k, values, indices)
        return values, indices


def _sizes(shape: KvShape) -> tuple[int, int, int, int]:
    head_dim = stored_head_dim(shape.head_dim)
    return shape.num_layers, shape.num_kv_heads, head_dim, shape.page_size


def _floats(array: Matrix) -> FloatArray:
    return np.ascontiguousarray(array, np.float32)


def _optional(vector: FloatArray | None) -> FloatArray | None:
    return None if vector is None else _floats(vector)


def _rows(logits: FloatArray) -> FloatArray:
    """Rows as they lie, copied only if they are no float32 or not contiguous inside."""
    return logits if logits.strides[1] == logits.itemsize == 4 else _floats(logits)
