"""The model the lab computes with: loaded once, run under many policies and in many memories."""

from __future__ import annotations

from dataclasses import dataclass

from turnstile.engine.batch import BatchBuilder
from turnstile.engine.build import load_model
from turnstile.engine.config import EngineConfig
from turnstile.engine.runner import Runner
from turnstile.kernels import create_backend
from turnstile.lab import tiny
from turnstile.lab.drive import Seconds
from turnstile.models.decoder import Decoder
from turnstile.text.grammar import GrammarCompiler


@dataclass(frozen=True, slots=True)
class LabModel:
    """A decoder, and a fresh executor over fresh pages whenever one is asked for."""

    name: str
    decoder: Decoder
    seconds: Seconds = "wall"
    """Which seconds are measured."""

    @property
    def is_tiny(self) -> bool:
        """Whether seconds would say more of Python than of a model."""
        return self.decoder.config == tiny.tiny_config()

    @property
    def vocab_size(self) -> int:
        """Token ids are ``0 … vocab_size - 1``."""
        return self.decoder.config.vocab_size

    @property
    def exact(self) -> bool:
        """Whether a request gets the same tokens whatever it shares its steps with."""
        return self.decoder.backend.exact

    def describe(self) -> str:
        """The model and what computes it, in a line."""
        backend = self.decoder.backend
        millions = self.decoder.config.num_parameters / 1e6
        how = "exact" if self.exact else "not exact"
        text = f"{self.name} ({millions:.1f} M parameters) on the {backend.name} kernels, {how}"
        return text if self.seconds == "wall" else f"{text}; seconds are of processor time"

    def kv_bytes(self, tokens: int, page_size: int = 16) -> int:
        """Bytes of K and V for ``tokens`` tokens, in whole pages."""
        shape = self.decoder.kv_shape(page_size, 1)
        return -(-tokens // page_size) * self.decoder.backend.kv_page_bytes(shape)

    def runner(
        self, *, num_pages: int, page_size: int, max_tokens: int, max_sequences: int
    ) -> Runner:
        """An executor over a KV cache of its own.

        Parameters
        ----------
        max_tokens, max_sequences
            Most tokens and sequences of a step.
        """
        kv = self.decoder.backend.allocate_kv(self.decoder.kv_shape(page_size, num_pages))
        builder = BatchBuilder(max_tokens, max_sequences, num_pages + 1, page_size)
        return Runner(self.decoder, kv, builder, _no_grammars)


def _no_grammars() -> GrammarCompiler:
    raise ValueError("The lab has no constrained requests.")


def open_model(
    name: str | None = None, *, threads: int | None = None, processor_time: bool = False
) -> LabModel:
    """The tiny model (``"tiny"``), or any model that can be served (None: the default one).

    ``processor_time``: where seconds are measured, count those the processor spends on this
    process, on one thread.

    Raises
    ------
    ModelError, BackendError
        With a sentence that says what to change.
    """
    seconds: Seconds = "processor" if processor_time else "wall"
    if processor_time:
        threads = 1
    if name == tiny.NAME:
        # One thread: steps of microseconds do not get faster by a second one.
        backend = create_backend("cpu", "float32", None, True, threads or 1)
        return LabModel("a tiny random model", tiny.make_tiny(backend), seconds)
    config = EngineConfig(threads=threads)
    if name is not None:
        config.model = name
    loaded = load_model(config)
    return LabModel(loaded.source.name, loaded.decoder, seconds)
