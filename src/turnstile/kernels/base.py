"""The one interface between models and the code that touches memory: :class:`Backend`.

A model is a sequence of coarse operations on a :class:`Workspace`. What lies in the workspace
(which dtype, quantised or not, how laid out) is the backend's own business, and so is the layout
of K and V in the page pool. A model therefore reads the same on every backend, and a backend may
fuse whatever lies inside one operation.

The life of one step::

    workspace = backend.begin(batch)               derived arrays, once per step
    backend.embed(weights.embedding, workspace)    hidden[t] = table[id[t]]
    for index, layer in enumerate(weights.layers):
        backend.attention_input(layer, workspace, kv, index)   norm, q k v, RoPE, K and V to pages
        backend.attend(layer, workspace, kv, index)            attention over the pages
        backend.attention_output(layer, workspace)             hidden += o_proj(attended)
        backend.mlp_input(layer, workspace)                    norm, silu(gate) * up
        backend.mlp_output(layer, workspace)                   hidden += down(...)
    logits = backend.head(weights.head, workspace)             only for batch.logit_rows

Of the last layer, the one with the last index of the pool, other rows need K and V alone: from
``attend`` on it is computed for ``batch.logit_rows`` only.

Exactness (DESIGN, "Exactness"): with ``exact`` true, every row of the result depends on that
row's own tokens alone, bit for bit: not on the batch around it, on its place in the batch, on how
its prompt was cut into chunks, or on the number of threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

LoadFormat = Literal["float32", "bfloat16"]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
Matrix = npt.NDArray[np.float32 | np.uint16]
"""A weight matrix ``[out, in]``: float32, or the bits of bfloat16, which numpy has no type for."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The numbers attention needs. ``sliding_window`` counts the tokens seen, itself included."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True)
class KvShape:
    """The shape of a page pool: every page holds ``page_size`` tokens of all layers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    num_pages: int


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer (matrices in ``Backend.load_format``, vectors in float32).

    ``q_norm`` and ``k_norm`` are per-head RMS norms (Qwen3), applied before RoPE.
    """

    attention: AttentionShape
    input_norm: FloatArray
    q: Matrix
    k: Matrix
    v: Matrix
    o: Matrix
    post_attention_norm: FloatArray
    gate: Matrix
    up: Matrix
    down: Matrix
    norm_eps: float
    q_bias: FloatArray | None = None
    k_bias: FloatArray | None = None
    v_bias: FloatArray | None = None
    o_bias: FloatArray | None = None
    q_norm: FloatArray | None = None
    k_norm: FloatArray | None = None


@dataclass(slots=True)
class HeadWeights:
    """The final norm ``[hidden]`` and the output projection ``[vocab, hidden]``."""

    norm: FloatArray
    projection: Matrix
    norm_eps: float


@dataclass(slots=True)
class FlatBatch:
    """One step as one row of tokens; all arrays are int32 views of buffers allocated once.

    With T tokens of S sequences, R of which need logits:

    ========================  ===============================================================
    ``ids[T]``                token ids
    ``positions[T]``          position of each token in its sequence
    ``sequence_of[T]``        the row of ``page_tables`` each token belongs to
    ``page_tables[S, P]``     page ids; entries past a sequence's last page are not valid ids
    ``query_offsets[S + 1]``  tokens of sequence s are ``query_offsets[s]:query_offsets[s + 1]``
    ``context_lengths[S]``    tokens of s in the cache *after* this step's are written
    ``logit_rows[R]``         indices into the T tokens, ascending
    ========================  ===============================================================

    A sequence's tokens are consecutive positions ending at ``context_lengths[s] - 1``.
    Token at position p lives in page ``page_tables[s, p // page_size]``, place ``p % page_size``.
    """

    page_size: int
    ids: Int32Array
    positions: Int32Array
    sequence_of: Int32Array
    page_tables: Int32Array
    query_offsets: Int32Array
    context_lengths: Int32Array
    logit_rows: Int32Array

    @property
    def num_tokens(self) -> int:
        """T, the tokens computed in this step."""
        return len(self.ids)


class Opaque(Protocol):
    """Something a backend made and only that backend can read."""


@dataclass(slots=True)
class ModelWeights:
    """A whole model, prepared by a backend: each member is opaque to everyone else."""

    embedding: Opaque
    layers: list[Opaque]
    head: Opaque


class Backend(ABC):
    """Prepares weights, owns buffers and the KV layout, and computes. One instance per engine.

    Subclasses are built by :func:`turnstile.kernels.create_backend`, from the device, the weight
    format (``float32``, ``bfloat16`` or ``int8``) and the KV dtype.
    """

    name: str
    device: str
    exact: bool
    load_format: LoadFormat = "float32"
    """How matrices are handed over (vectors: float32). Arrays given to ``prepare_*`` belong to the
    backend, which need not copy them again.
    """

    # -- at load time -------------------------------------------------------------------------

    @abstractmethod
    def prepare_embedding(self, table: Matrix) -> Opaque:
        """Take the table ``[vocab, hidden]``. It may be the same array as the head's projection;
        a backend that keeps the format must then not copy it twice.
        """

    @abstractmethod
    def prepare_layer(
        self, weights: LayerWeights, inv_freq: FloatArray, rope_scale: float
    ) -> Opaque:
        """Take one layer. ``inv_freq[head_dim / 2]`` are the (already scaled) RoPE frequencies;
        ``rope_scale`` multiplies cos and sin (YaRN's attention factor). Pairs are (i, i + d/2).
        """

    @abstractmethod
    def prepare_head(self, weights: HeadWeights) -> Opaque:
        """Take the final norm and the output projection."""

    @abstractmethod
    def kv_page_bytes(self, shape: KvShape) -> int:
        """Bytes one page takes, over all layers, K and V and any scales (``num_pages`` unused)."""

    @abstractmethod
    def allocate_kv(self, shape: KvShape) -> Opaque:
        """Make the page pool. Never grows. Untouched pages need not be resident."""

    # -- one step -----------------------------------------------------------------------------

    @abstractmethod
    def begin(self, batch: FlatBatch) -> Opaque:
        """Derive what the step needs from ``batch``; returns the workspace for the other calls."""

    @abstractmethod
    def embed(self, embedding: Opaque, workspace: Opaque) -> None:
        """Set hidden to the embedding rows of ``batch.ids``."""

    @abstractmethod
    def attention_input(self, layer: Opaque, workspace: Opaque, kv: Opaque, index: int) -> None:
        """RMS norm, q/k/v projections (biases, q/k norms), RoPE; K and V go to the pages of layer
        ``index`` in the pool's storage type; q stays in the workspace.
        """

    @abstractmethod
    def attend(self, layer: Opaque, workspace: Opaque, kv: Opaque, index: int) -> None:
        """Causal attention of q over the pages of layer ``index``, read from storage only."""

    @abstractmethod
    def attention_output(self, layer: Opaque, workspace: Opaque) -> None:
        """Add the projected attention result to hidden."""

    @abstractmethod
    def mlp_input(self, layer: Opaque, workspace: Opaque) -> None:
        """RMS norm, gate and up projections, ``silu(gate) * up``."""

    @abstractmethod
    def mlp_output(self, layer: Opaque, workspace: Opaque) -> None:
        """Add the down projection to hidden."""

    @abstractmethod
    def head(self, head: Opaque, workspace: Opaque) -> FloatArray:
        """Final norm and projection of ``batch.logit_rows``: float32 ``[R, vocab]``, valid until
        the next step.
        """

    # -- pages --------------------------------------------------------------------------------

    @abstractmethod
    def copy_pages(self, kv: Opaque, copies: list[tuple[int, int]]) -> None:
        """Copy whole pages (all layers), in order, as ``(source, target)``. For forks."""

    # -- sampling helpers: row by row, so that the batch never shows in the result --------------

    @abstractmethod
    def argmax(self, logits: FloatArray) -> Int64Array:
        """Lowest index of the largest value in each row: int64 ``[R]``. NaN rows are the
        sampler's business (see :meth:`log_normalizer`).
        """

    @abstractmethod
    def log_normalizer(self, logits: FloatArray) -> FloatArray:
        """``log Σ exp`` of each row, float32 ``[R]``; NaN (or +inf) marks a bad row."""

    @abstractmethod
    def top_k(self, logits: FloatArray, k: int) -> tuple[FloatArray, Int64Array]:
        """The k largest of each row, descending, ties by lower index: values and int64 indices."""
