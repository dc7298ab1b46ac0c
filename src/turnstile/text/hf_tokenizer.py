"""A tokenizer from a Hugging Face directory: ``tokenizer.json`` and the files beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors

from turnstile.text.errors import TokenizerError
from turnstile.text.parts import MAX_VOCABULARY, TokenizerParts, end_ids
from turnstile.text.vocabulary import build_vocabulary


def load_directory_parts(directory: str | Path) -> TokenizerParts:
    """Build a tokenizer from ``tokenizer.json``, ``tokenizer_config.json``,
    ``special_tokens_map.json``, ``generation_config.json``, ``config.json`` and
    ``chat_template.jinja``; only the first is required.

    Raises :class:`TokenizerError` for missing, damaged or unsupported files.
    """
    root = Path(directory)
    path = root / "tokenizer.json"
    if not path.is_file():
        hint = (
            "; tokenizer.model alone is not enough: save the fast tokenizer with transformers"
            if (root / "tokenizer.model").exists()
            else ""
        )
        raise TokenizerError(f"no tokenizer.json in {root.name}{hint}")
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise TokenizerError(f"cannot read tokenizer.json: {error}") from error
    return _Loader(root, backend).load()


class _Loader:
    def __init__(self, root: Path, backend: Tokenizer) -> None:
        self._root = root
        self.backend = backend
        # Inputs are cut and padded by the server, where anyone can see it.
        backend.no_truncation()
        backend.no_padding()
        self.config = self._read("tokenizer_config.json")
        self.special_map = self._read("special_tokens_map.json")
        self.decoder = _state(backend.decoder)

    def load(self) -> TokenizerParts:
        vocab = self.backend.get_vocab(with_added_tokens=True)
        highest = max(vocab.values(), default=-1)
        if highest >= MAX_VOCABULARY:  # the tables below have a place for every id up to it
            raise TokenizerError(
                f"tokenizer.json has the token id {highest}; at most {MAX_VOCABULARY - 1} may be"
            )
        strings = [""] * (highest + 1)
        for token, token_id in vocab.items():
            strings[token_id] = token
        added = self.backend.get_added_tokens_decoder()
        special = frozenset(i for i, token in added.items() if token.special)
        unused = {i for i, token in enumerate(strings) if not token}
        byte_level = self._is_byte_level()
        bos_id, eos_id = self._id("bos_token"), self._id("eos_token")
        self._honour_add_bos(bos_id)
        return TokenizerParts(
            backend=self.backend,
            vocabulary=build_vocabulary(
                strings, byte_level=byte_level, added=added, special=special | unused
            ),
            strings=strings,
            bos_id=bos_id,
            eos_id=eos_id,
            unk_id=self._id("unk_token"),
            pad_id=self._id("pad_token"),
            stop_ids=frozenset(self._stop_ids(eos_id, len(strings)) | end_ids(strings, special)),
            byte_level=byte_level,
            strip_first_space=not byte_level and self._strips_first_space(),
            chat_templates=self._templates(),
        )

    def _is_byte_level(self) -> bool:
        kinds = {part.get("type") for part in _flatten(self.decoder)}
        if "ByteLevel" in kinds:
            return True
        if kinds & {"ByteFallback", "Metaspace"}:
            return False
        raise TokenizerError(
            "this kind of tokenizer is not supported: its decoder is "
            f"{', '.join(sorted(map(str, kinds))) or 'missing'}, "
            "where byte-level BPE or SentencePiece is needed"
        )

    def _strips_first_space(self) -> bool:
        for part in _flatten(self.decoder):
            if part.get("type") == "Strip" and part.get("start", 0) > 0:
                return True
            if part.get("type") == "Metaspace" and part.get("prepend_scheme") != "never":
                return True
        return False

    def _honour_add_bos(self, bos_id: int | None) -> None:
        """Llama's ``add_bos_token`` says more than the file's own post-processor."""
        wanted = self.config.get("add_bos_token")
        name = str(self.config.get("tokenizer_class", ""))
        if not isinstance(wanted, bool) or bos_id is None or "Llama" not in name:
            return
        adds = bos_id in self.backend.encode("a").ids
        if wanted and not adds:
            token = self.backend.id_to_token(bos_id)
            self.backend.post_processor = processors.TemplateProcessing(
                single=[token, "$A"], pair=[token, "$A", token, "$B"],
                special_tokens=[(token, bos_id)],
            )  # fmt: skip
        elif adds and not wanted:
            self.backend.post_processor = processors.TemplateProcessing(
                single=["$A"], pair=["$A", "$B"], special_tokens=[]
            )

    def _id(self, name: str) -> int | None:
        for source in (self.config, self.special_map):
            value = source.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                token_id: int | None = self.backend.token_to_id(value)
                if token_id is not None:
                    return token_id
        return None

    def _stop_ids(self, eos_id: int | None, size: int) -> set[int]:
        found = set() if eos_id is None else {eos_id}
        for name in ("generation_config.json", "config.json"):
            value = self._read(name).get("eos_token_id")
            ids = value if isinstance(value, list) else [value]
            found |= {i for i in ids if isinstance(i, int) and 0 <= i < size}
        return found

    def _templates(self) -> dict[str, str]:
        templates: dict[str, str] = {}
        value = self.config.get("chat_template")
        if isinstance(value, str):
            templates["default"] = value
        elif isinstance(value, list):
            for entry in value:
                if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                    templates[str(entry.get("name", "default"))] = entry["template"]
        for path in sorted(self._root.glob("additional_chat_templates/*.jinja")):
            templates[path.stem] = self._text(path)
        single = self._root / "chat_template.jinja"
        if single.is_file():
            templates["default"] = self._text(single)
        return templates

    def _text(self, path: Path) -> str:
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            name = path.relative_to(self._root)
            raise TokenizerError(f"cannot read {name}: {error}") from error

    def _read(self, name: str) -> dict[str, Any]:
        path = self._root / name
        if not path.is_file():
            return {}
        try:
            value = json.loads(self._text(path))
        except ValueError as error:
            raise TokenizerError(f"cannot read {name}: {error}") from error
        except RecursionError:
            raise TokenizerError(f"cannot read {name}: it is nested too deeply") from None
        if not isinstance(value, dict):
            raise TokenizerError(f"{name} is not a JSON object")
        return value


def _state(part: Any) -> dict[str, Any]:
    """Read the JSON a tokenizer component is stored as."""
    if part is None:
        return {}
    state = json.loads(part.__getstate__())
    return state if isinstance(state, dict) else {}


def _flatten(state: dict[str, Any]) -> list[dict[str, Any]]:
    """List a component and, where it is a sequence, what it is made of."""
    nested = [
        part
        for key in ("decoders", "pretokenizers", "normalizers")
        for child in state.get(key, ())
        for part in _flatten(child)
    ]
    return nested or ([state] if state else [])
