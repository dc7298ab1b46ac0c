"""A model's tokenizer as a Hugging Face directory, for the tools that want one.

Load generators and evaluation harnesses (aiperf, guidellm, lm-eval) count tokens with a tokenizer
directory of their own; a GGUF file has none. ``turnstile export-tokenizer MODEL DIR`` writes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from turnstile.text.errors import TokenizerError
from turnstile.text.tokenizer import Tokenizer


def export_tokenizer(
    tokenizer: Tokenizer, directory: str | Path, *, max_length: int | None = None
) -> list[Path]:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and, where there is one,
    ``chat_template.jinja``; return their paths. The directory is made if it is not there.

    ``max_length`` is the model's context. Raises :class:`TokenizerError` where it cannot write.
    """
    root = Path(directory)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **tokenizer.special_tokens,
    }
    if max_length is not None:
        settings["model_max_length"] = max_length
    named = {n: s for n, s in tokenizer.chat_templates.items() if n != "default"}
    files = {"tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False) + "\n"}
    if "default" in tokenizer.chat_templates:
        files["chat_template.jinja"] = tokenizer.chat_templates["default"]
    files.update({f"additional_chat_templates/{n}.jinja": s for n, s in sorted(named.items())})
    try:
        root.mkdir(parents=True, exist_ok=True)
        tokenizer.backend.save(str(root / "tokenizer.json"))
        for name, content in files.items():
            path = root / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(content, encoding="utf-8", newline="")
    except Exception as error:  # the library raises bare Exceptions
        raise TokenizerError(f"cannot write the tokenizer to {root}: {error}") from error
    return [root / "tokenizer.json", *(root / name for name in files)]
