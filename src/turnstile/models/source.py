"""From what the operator typed to a model on disk: :func:`resolve`. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from turnstile.models import default_model
from turnstile.models.config import ModelConfig
from turnstile.models.errors import ModelError, ModelNotFoundError
from turnstile.models.generation import (
    GenerationDefaults,
    generation_from_gguf,
    generation_from_json,
)
from turnstile.models.gguf import read_gguf
from turnstile.models.gguf_config import config_from_gguf
from turnstile.models.hf_config import config_from_json
from turnstile.models.safetensors import open_safetensors
from turnstile.models.tensor_file import TensorFiles

HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
HUB_IGNORED = ("original/*", "consolidated*", "*/*")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model found on disk, its weights not yet read.

    ``name`` is what clients call it unless told otherwise; ``path`` is a GGUF file or a Hugging
    Face directory, and the tokenizer is found there too. ``tensors`` are mapped where finding the
    model has shown where they lie.
    """

    name: str
    path: Path
    config: ModelConfig
    generation: GenerationDefaults
    tensors: TensorFiles | None = None

    @property
    def is_gguf(self) -> bool:
        """Whether ``path`` is one GGUF file (else a directory)."""
        return self.path.is_file()

    @property
    def tokenizer_path(self) -> Path:
        """The file to make the tokenizer from: the GGUF itself, or ``tokenizer.json``."""
        return self.path if self.is_gguf else self.path / "tokenizer.json"

    def open_tensors(self) -> TensorFiles:
        """Map the weights. Raises :class:`ModelError` if they are damaged or not readable here."""
        return open_safetensors(self.path) if self.tensors is None else self.tensors


def resolve(
    model: str,
    *,
    revision: str | None = None,
    report: Callable[[str], None] = lambda message: None,
) -> ModelSource:
    """Find a model: a ``.gguf`` path, a directory, the default model's name, or a hub id.

    A path wins over a name. What is not on this machine is fetched; ``report`` gets a sentence
    before that. ``revision`` is a hub branch, tag or commit.

    Raises
    ------
    ModelError
        Nothing is there, or what is there cannot be used; the message says what to do.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _from_directory(path, name=path.resolve().name)
    if path.is_file():
        if path.suffix == ".safetensors":
            raise ModelNotFoundError(f"{path} is only part of a model; give its directory.")
        return _from_gguf(path, name=path.stem)
    if model.lower() == default_model.NAME.lower():
        return _from_gguf(default_model.ensure_default_model(report), default_model.NAME)
    if _HUB_ID.fullmatch(model) and path.suffix != ".gguf":
        return _from_directory(_fetch_from_hub(model, revision, report), name=model)
    raise ModelNotFoundError(
        f"There is no model {model!r}. Give the path of a .gguf file or of a Hugging Face "
        f"directory, a hub id such as Qwen/Qwen3-0.6B, or {default_model.NAME}."
    )


def _from_gguf(path: Path, name: str) -> ModelSource:
    gguf = read_gguf(path)
    tensors = TensorFiles({gguf.path: (gguf.file, gguf.tensors)})
    config = config_from_gguf(gguf)
    generation = generation_from_gguf(gguf, config.vocab_size)
    return ModelSource(name, path, config, generation, tensors)


def _from_directory(directory: Path, name: str) -> ModelSource:
    path = directory / "config.json"
    if path.exists():
        config = config_from_json(path)
        generation = generation_from_json(directory, config.vocab_size)
        return ModelSource(name, directory, config, generation)
    inside = sorted(directory.glob("*.gguf"))
    if len(inside) == 1:
        return _from_gguf(inside[0], name=inside[0].stem)
    if inside:
        listed = ", ".join(path.name for path in inside)
        raise ModelNotFoundError(f"{directory} holds several GGUF files; name one of {listed}.")
    raise ModelNotFoundError(f"{directory} holds neither config.json nor a .gguf file.")


def _fetch_from_hub(model: str, revision: str | None, report: Callable[[str], None]) -> Path:
    """Take a snapshot of a hub repository into the hub's own cache, or find it there."""
    import huggingface_hub  # slow to import, and most starts need no hub
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    report(f"Looking for {model} in the hub's cache, or fetching it")
    try:
        return Path(
            huggingface_hub.snapshot_download(
                model,
                revision=revision,
                allow_patterns=list(HUB_PATTERNS),
                ignore_patterns=list(HUB_IGNORED),
            )
        )
    except GatedRepoError:
        reason = "it is gated: accept its terms on its page and set HF_TOKEN"
    except RepositoryNotFoundError:
        reason = "the hub has no such repository (or HF_TOKEN does not open it)"
    except RevisionNotFoundError:
        reason = f"it has no revision {revision!r}"
    except LocalEntryNotFoundError:
        reason = "it is not in the cache, and the hub cannot be reached (or HF_HUB_OFFLINE is set)"
    except HFValidationError as error:
        reason = str(error)
    except ModelError:
        raise
    except Exception as error:  # the hub's transports raise types of their own
        reason = f"{type(error).__name__}: {error}"
    raise ModelNotFoundError(
        f"There is no file or directory {model}, and it cannot be had from the hub: {reason}. "
        "Give a path instead, or check the name."
    )
