"""The forward pass: one for every family, because they differ in numbers, not in steps."""

from __future__ import annotations

from turnstile.kernels.base import Backend, FlatBatch, FloatArray, KvShape, ModelWeights, Opaque
from turnstile.models.config import ModelConfig
from turnstile.models.loading import Progress, load_weights
from turnstile.models.source import ModelSource


class Decoder:
    """A model, its weights and the backend that computes it."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, backend: Backend) -> None:
        self.config = config
        self.weights = weights
        self.backend = backend

    @classmethod
    def load(
        cls, source: ModelSource, backend: Backend, progress: Progress = lambda done, total: None
    ) -> Decoder:
        """Read ``source`` into ``backend``; see :func:`load_weights` for what can go wrong."""
        return cls(source.config, load_weights(source, backend, progress), backend)

    def kv_shape(self, page_size: int, num_pages: int) -> KvShape:
        """The shape of a page pool for this model."""
        config = self.config
        return KvShape(
            config.num_layers, config.num_kv_heads, config.head_dim, page_size, num_pages
        )

    def forward(self, batch: FlatBatch, kv: Opaque) -> FloatArray:
        """One step: K and V of every token into its page, and logits for ``batch.logit_rows``.

        Returns float32 ``[R, vocab]``, valid until the next step.
        """
        backend, weights = self.backend, self.weights
        workspace = backend.begin(batch)
        backend.embed(weights.embedding, workspace)
        for index, layer in enumerate(weights.layers):
            backend.attention_input(layer, workspace, kv, index)
            backend.attend(layer, workspace, kv, index)
            backend.attention_output(layer, workspace)
            backend.mlp_input(layer, workspace)
            backend.mlp_output(layer, workspace)
        return backend.head(weights.head, workspace)
