"""The reference backend: what every operation means, in plain torch, on any device.

Weights are float32 or bfloat16; everything between two products is float32, and K and V are
stored as float32 or bfloat16. In exact mode products come in fixed tiles (``row_products``), the
batch is padded with zero rows to whole tiles, and every other operation is one that treats rows
alike (``row_math``, ``paged_attention``). Without it products are plain ``torch.mm``: faster, and
a row's last bits then depend on the batch.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from torch import Tensor

from turnstile.kernels import row_math
from turnstile.kernels.base import (
    AttentionShape,
    Backend,
    FlatBatch,
    FloatArray,
    HeadWeights,
    Int64Array,
    KvShape,
    LayerWeights,
    LoadFormat,
    Matrix,
    Opaque,
)
from turnstile.kernels.paged_attention import AttentionPlan, LayerPages, attend, plan_attention
from turnstile.kernels.row_products import UNIT, Projection, TileProbe, multiply, padded_outputs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def refusal(device: str, weight_format: str, kv_dtype: str | None) -> str | None:
    """Why this backend cannot serve, or None."""
    kind = device.partition(":")[0]
    if kind == "cuda" and not torch.cuda.is_available():
        return "this torch sees no CUDA device"
    if kind not in ("cpu", "cuda"):
        return f"device {device!r} was never tried; cpu and cuda are known"
    if weight_format not in DTYPES:
        return f"weights are kept as {' or '.join(DTYPES)}"
    if kv_dtype is not None and kv_dtype not in DTYPES:
        return f"K and V are kept as {' or '.join(DTYPES)}"
    return None


def create(
    device: str, weight_format: str, kv_dtype: str | None, exact: bool, threads: int | None
) -> Backend:
    """Build the backend; K and V default to the format of the weights."""
    if threads is not None:
        torch.set_num_threads(threads)
    form: LoadFormat = "bfloat16" if weight_format == "bfloat16" else "float32"
    return ReferenceBackend(device, form, DTYPES[kv_dtype or weight_format], exact)


@dataclass(eq=False, slots=True)
class _Rope:
    """The frequencies layers share, compared by identity."""

    inv_freq: Tensor
    scale: float


@dataclass(slots=True)
class _Layer:
    attention: AttentionShape
    rope: _Rope
    eps: float
    input_norm: Tensor
    qkv: Projection
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Projection
    post_attention_norm: Tensor
    gate_up: Projection
    down: Projection


@dataclass(slots=True)
class _Head:
    norm: Tensor
    projection: Projection
    eps: float


@dataclass(slots=True)
class _Pool:
    """All layers' pages; ``zero_page`` is one page more than was asked for."""

    layers: list[LayerPages]
    page_size: int
    zero_page: int


@dataclass(slots=True)
class _Workspace:
    """One step. Rows past ``num_tokens`` are padding: computed along, read by nobody.

    ``rotations``, ``plans`` and ``writes`` hold what is derived at the first layer that needs it.
    """

    batch: FlatBatch
    num_tokens: int
    ids: Tensor
    positions: Tensor
    logit_rows: Tensor
    hidden: Tensor = field(init=False)
    q: Tensor = field(init=False)
    attended: Tensor = field(init=False)
    activated: Tensor = field(init=False)
    rotations: dict[_Rope, tuple[Tensor, Tensor]] = field(default_factory=dict)
    plans: dict[AttentionShape, AttentionPlan] = field(default_factory=dict)
    writes: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


class ReferenceBackend(Backend):
    """Plain torch. See the module's docstring."""

    name = "reference"

    def __init__(
        self, device: str, load_format: LoadFormat, kv_dtype: torch.dtype, exact: bool
    ) -> None:
        self.device = device
        self.exact = exact
        self.load_format = load_format
        self._dtype = DTYPES[load_format]
        self._kv_dtype = kv_dtype
        self._probe = TileProbe()
        self._ropes: list[_Rope] = []
        self._table: tuple[weakref.ref[Matrix], Tensor] | None = None
        self._buffers: dict[torch.dtype, Tensor] = {}

    # -- at load time -------------------------------------------------------------------------

    def prepare_embedding(self, table: Matrix) -> Opaque:
        """Keep the table in the weights' dtype, padded for the head that may share it."""
        stored = padded_outputs(self._matrix(table))
        self._table = (weakref.ref(table), stored)
        return stored

    def prepare_layer(
        self, weights: LayerWeights, inv_freq: FloatArray, rope_scale: float
    ) -> Opaque:
        """Fuse q, k, v and gate, up into one matrix each."""
        biases = (weights.q_bias, weights.k_bias, weights.v_bias)
        present = [bias for bias in biases if bias is not None]
        return _Layer(
            attention=weights.attention,
            rope=self._rope(inv_freq, rope_scale),
            eps=weights.norm_eps,
            input_norm=self._vector(weights.input_norm),
            qkv=self._projection(
                self._matrix(np.concatenate((weights.q, weights.k, weights.v))),
                self._vector(np.concatenate(present)) if present else None,
            ),
            q_norm=None if weights.q_norm is None else self._vector(weights.q_norm),
            k_norm=None if weights.k_norm is None else self._vector(weights.k_norm),
            o=self._projection(
                self._matrix(weights.o),
                None if weights.o_bias is None else self._vector(weights.o_bias),
            ),
            post_attention_norm=self._vector(weights.post_attention_norm),
            gate_up=self._projection(self._matrix(np.concatenate((weights.gate, weights.up)))),
            down=self._projection(self._matrix(weights.down)),
        )

    def prepare_head(self, weights: HeadWeights) -> Opaque:
        """Keep the projection, or share the embedding's copy where they are tied."""
        if self._table is not None and self._table[0]() is weights.projection:
            matrix = self._table[1]  # tied: one copy serves both
        else:
            matrix = self._matrix(weights.projection)
        projection = self._projection(matrix, outputs=weights.projection.shape[0])
        return _Head(self._vector(weights.norm), projection, weights.norm_eps)

    def _matrix(self, matrix: Matrix) -> Tensor:
        """The same memory as a tensor, or a copy of it on the device."""
        tensor = torch.from_numpy(np.ascontiguousarray(matrix))
        return (tensor.view(torch.bfloat16) if matrix.dtype == np.uint16 else tensor).to(
            self.device, self._dtype
        )

    def _vector(self, vector: FloatArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(vector, np.float32)).to(self.device)

    def _projection(
        self, weight: Tensor, bias: Tensor | None = None, outputs: int | None = None
    ) -> Projection:
        outputs = outputs or weight.shape[0]
        stored = padded_outputs(weight)
        tiles = self._probe.tiles(stored) if self.exact else None
        return Projection(stored, outputs, tiles, bias)

    def _rope(self, inv_freq: FloatArray, scale: float) -> _Rope:
        turns = self._vector(inv_freq)
        for rope in self._ropes:
            if rope.scale == scale and torch.equal(rope.inv_freq, turns):
                return rope
        self._ropes.append(_Rope(turns, scale))
        return self._ropes[-1]

    def kv_page_bytes(self, shape: KvShape) -> int:
        """K and V of ``page_size`` tokens in all layers; no scales."""
        elements = shape.num_layers * shape.num_kv_heads * shape.head_dim * shape.page_size
        return 2 * elements * self._kv_dtype.itemsize

    def allocate_kv(self, shape: KvShape) -> Opaque:
        """Zeroed pages; on Linux untouched zeros take no memory."""
        size = (shape.num_pages + 1, shape.num_kv_heads, shape.page_size, shape.head_dim)

        def pages() -> Tensor:
            return torch.zeros(size, dtype=self._kv_dtype, device=self.device)

        layers = [LayerPages(pages(), pages()) for _ in range(shape.num_layers)]
        return _Pool(layers, shape.page_size, zero_page=shape.num_pages)

    # -- one step -----------------------------------------------------------------------------

    def begin(self, batch: FlatBatch) -> Opaque:
        """Move the batch to the device, padded to whole tiles in exact mode."""

        def padded(values: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Tensor:
            wide = np.zeros(self._padded(len(values)), np.int64)
            wide[: len(values)] = values
            return torch.from_numpy(wide).to(self.device)

        return _Workspace(
            batch=batch,
            num_tokens=batch.num_tokens,
            ids=padded(batch.ids),
            positions=padded(batch.positions),
            logit_rows=padded(batch.logit_rows),
        )

    def embed(self, embedding: Opaque, workspace: Opaque) -> None:
        """Hidden = rows of the table, in float32."""
        table, step = cast(Tensor, embedding), cast(_Workspace, workspace)
        step.hidden = table[step.ids].to(torch.float32)

    def attention_input(self, layer: Opaque, workspace: Opaque, kv: Opaque, index: int) -> None:
        """Norm, q k v, norms of heads, RoPE; K and V into the pages."""
        weights, step, pool = cast(_Layer, layer), cast(_Workspace, workspace), cast(_Pool, kv)
        shape = weights.attention
        normed = row_math.rms_norm(step.hidden, weights.input_norm, weights.eps)
        qkv = self._product(normed, weights.qkv)
        qkv = qkv.reshape(len(qkv), -1, shape.head_dim)
        q, k, v = torch.split(qkv, [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], 1)
        if weights.q_norm is not None and weights.k_norm is not None:
            q = row_math.rms_norm(q, weights.q_norm, weights.eps)
            k = row_math.rms_norm(k, weights.k_norm, weights.eps)
        cos, sin = self._rotation(weights.rope, step)
        step.q = row_math.rotate(q, cos, sin)
        self._write_kv(pool, index, row_math.rotate(k, cos, sin), v, step)

    def attend(self, layer: Opaque, workspace: Opaque, kv: Opaque, index: int) -> None:
        """Attention over the pages; see ``paged_attention``. After the last layer's only rows
        whose logits are wanted are left.
        """
        weights, step, pool = cast(_Layer, layer), cast(_Workspace, workspace), cast(_Pool, kv)
        shape = weights.attention
        if shape not in step.plans:
            step.plans[shape] = plan_attention(step.batch, shape, pool.zero_page, step.ids.device)
        q = step.q[: step.num_tokens]
        step.attended = torch.zeros_like(step.q).flatten(1)
        result = attend(q, pool.layers[index], step.plans[shape], shape)
        step.attended[: step.num_tokens] = result.flatten(1)
        if index == len(pool.layers) - 1:  # from here on nobody needs the other rows
            step.hidden = step.hidden[step.logit_rows]
            step.attended = step.attended[step.logit_rows]

    def attention_output(self, layer: Opaque, workspace: Opaque) -> None:
        """Hidden += o(attended)."""
        weights, step = cast(_Layer, layer), cast(_Workspace, workspace)
        step.hidden += self._product(step.attended, weights.o)

    def mlp_input(self, layer: Opaque, workspace: Opaque) -> None:
        """silu(gate(normed)) · up(normed)."""
        weights, step = cast(_Layer, layer), cast(_Workspace, workspace)
        normed = row_math.rms_norm(step.hidden, weights.post_attention_norm, weights.eps)
        gate, up = self._product(normed, weights.gate_up).chunk(2, dim=-1)
        step.activated = row_math.silu(gate) * up

    def mlp_output(self, layer: Opaque, workspace: Opaque) -> None:
        """Hidden += down(activated)."""
        weights, step = cast(_Layer, layer), cast(_Workspace, workspace)
        step.hidden += self._product(step.activated, weights.down)

    def head(self, head: Opaque, workspace: Opaque) -> FloatArray:
        """Logits of the chosen rows: on a CPU a view of scratch that the next step overwrites."""
        weights, step = cast(_Head, head), cast(_Workspace, workspace)
        normed = row_math.rms_norm(step.hidden, weights.norm, weights.eps)
        logits = self._product(normed, weights.projection)[: len(step.batch.logit_rows)]
        return cast(FloatArray, logits.cpu().numpy())

    def _padded(self, rows: int) -> int:
        return -(-rows // UNIT) * UNIT if self.exact else rows

    def _product(self, x: Tensor, projection: Projection) -> Tensor:
        """Float32 ``x @ weight.T + bias`` in a buffer that the next product overwrites."""
        size = (len(x), projection.weight.shape[0])
        result = multiply(x.to(self._dtype), projection, self._buffer(size, self._dtype))
        result = result.to(torch.float32)
        return result if projection.bias is None else result + projection.bias

    def _buffer(self, size: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Scratch that grows to the largest step and stays."""
        elements = size[0] * size[1]
        held = self._buffers.get(dtype)
        if held is None or held.numel() < elements:
            held = self._buffers[dtype] = torch.empty(elements, dtype=dtype, device=self.device)
        return held[:elements].view(size)

    def _rotation(self, rope: _Rope, step: _Workspace) -> tuple[Tensor, Tensor]:
        if rope not in step.rotations:
            angles = step.positions.to(torch.float32)[:, None, None] * rope.inv_freq
            step.rotations[rope] = (angles.cos() * rope.scale, angles.sin() * rope.scale)
        return step.rotations[rope]

    def _write_kv(self, pool: _Pool, index: int, k: Tensor, v: Tensor, step: _Workspace) -> None:
        """Store K and V of the step's tokens in their pages, as the pool's type.

        A page is cleared when its first place is written: what a former owner left there may be
        NaN, and a weight of zero times NaN would reach the new owner.
        """
        pages = pool.layers[index]
        heads = k.shape[1]
        if heads not in step.writes:
            step.writes[heads] = self._destinations(pool, heads, step)
        rows, fresh = step.writes[heads]
        for stored, new in ((pages.k, k), (pages.v, v)):
            stored.index_fill_(0, fresh, 0)
            values = new[: step.num_tokens].to(self._kv_dtype).flatten(0, 1)
            stored.view(-1, stored.shape[-1]).index_copy_(0, rows, values)

    def _destinations(self, pool: _Pool, heads: int, step: _Workspace) -> tuple[Tensor, Tensor]:
        """For every token and head the row of the pool seen as ``[rows, head_dim]``; and the pages
        whose first place is written.
        """
        batch = step.batch
        slots, places = np.divmod(batch.positions, pool.page_size)
        ids = batch.page_tables[batch.sequence_of, slots].astype(np.int64)
        rows = (ids[:, None] * heads + np.arange(heads)) * pool.page_size + places[:, None]
        fresh = ids[places == 0]
        return (
            torch.from_numpy(rows.reshape(-1)).to(self.device),
            torch.from_numpy(fresh).to(self.device),
        )

    # -- pages --------------------------------------------------------------------------------

    def copy_pages(self, kv: Opaque, copies: list[tuple[int, int]]) -> None:
        """Copy pages one by one, in order: a copy may be the source of the next."""
        pool = cast(_Pool, kv)
        for pages in pool.layers:
            for stored in (pages.k, pages.v):
                for source, target in copies:
                    stored[target] = stored[source]

    # -- sampling helpers ---------------------------------------------------------------------

    def argmax(self, logits: FloatArray) -> Int64Array:
        """See :func:`row_math.argmax`."""
        return cast(Int64Array, row_math.argmax(torch.from_numpy(logits)).numpy())

    def log_normalizer(self, logits: FloatArray) -> FloatArray:
        """See :func:`row_math.log_normalizer`."""
        return cast(FloatArray, row_math.log_normalizer(torch.from_numpy(logits)).numpy())

    def top_k(self, logits: FloatArray, k: int) -> tuple[FloatArray, Int64Array]:
        """See :func:`row_math.top_k`."""
        values, ids = row_math.top_k(torch.from_numpy(logits), k)
        return cast(FloatArray, values.numpy()), cast(Int64Array, ids.numpy())
