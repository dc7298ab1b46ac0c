"""A tokenizer from the metadata of a GGUF file.

The keys are those of the GGUF specification (section "Tokenizer"): ``tokenizer.ggml.model`` names
the algorithm, ``tokens``, ``scores``, ``token_type`` and ``merges`` are the vocabulary. Two
algorithms are known, which cover the Llama, Mistral and Qwen families:

``gpt2``
    byte-level BPE; how text is cut into words is named by ``tokenizer.ggml.pre``.
``llama``
    SentencePiece BPE with byte fallback: the pair whose merged piece has the highest score is
    merged first. It is run as ordinary BPE, with a merge for every way to cut a piece into two
    other pieces, ranked by the score of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, processors

from turnstile.text.errors import TokenizerError
from turnstile.text.parts import TokenizerParts, added_token, end_ids
from turnstile.text.pretokenizers import PreTokenizer, pre_tokenizer_named
from turnstile.text.vocabulary import build_vocabulary

MAX_PIECE_CHARS = 1024
"""Longest piece of a SentencePiece vocabulary: each is cut at every place, which is quadratic."""
_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"


class TokenType(IntEnum):
    """``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def load_gguf_parts(metadata: Mapping[str, object]) -> TokenizerParts:
    """Build a tokenizer from GGUF metadata (keys to Python values; arrays as sequences).

    Raises :class:`TokenizerError` where the vocabulary is missing, inconsistent or of a kind
    not supported.
    """
    model = metadata.get(_PREFIX + "model")
    if model == "gpt2":
        return _Builder(metadata).byte_level()
    if model == "llama":
        return _Builder(metadata).sentencepiece()
    if model is None:
        raise TokenizerError(
            "the GGUF file has no tokenizer (tokenizer.ggml.model is missing): "
            "name a directory with tokenizer.json with --tokenizer"
        )
    raise TokenizerError(
        f"tokenizer model {model!r} is not supported (supported: gpt2, llama): "
        "name a directory with tokenizer.json with --tokenizer"
    )


class _Builder:
    """Reads and checks the metadata once; each public method builds one kind of tokenizer."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata
        self.tokens = self._strings("tokens")
        if not self.tokens:
            raise TokenizerError("the GGUF file's vocabulary is empty (tokenizer.ggml.tokens)")
        self.types = self._types()
        self.bos_id = self._token_id("bos_token_id")
        self.eos_id = self._token_id("eos_token_id")
        self.unk_id = self._token_id("unknown_token_id")
        self.pad_id = self._token_id("padding_token_id")
        # Files exist that declare their own end token an ordinary one.
        for token_id in (self.bos_id, self.eos_id):
            if token_id is not None and self.types[token_id] != TokenType.UNKNOWN:
                self.types[token_id] = TokenType.CONTROL
        self.special = frozenset(
            i for i, kind in enumerate(self.types) if kind in (TokenType.CONTROL, TokenType.UNKNOWN)
        )

    # -- the two kinds ------------------------------------------------------------------------

    def byte_level(self) -> TokenizerParts:
        name = self._metadata.get(_PREFIX + "pre")
        pre = pre_tokenizer_named(name if isinstance(name, str) else None)
        tokenizer = Tokenizer(self._bpe(self._merges(), pre))
        normalizer = pre.normalizer()
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        tokenizer.pre_tokenizer = pre.build()
        tokenizer.decoder = decoders.ByteLevel()
        self._finish(tokenizer, add_bos=pre.add_bos)
        return self._parts(tokenizer, byte_level=True, strip_first_space=False)

    def sentencepiece(self) -> TokenizerParts:
        add_space = self._flag("add_space_prefix", True)
        unknown = next(
            (i for i, kind in enumerate(self.types) if kind == TokenType.UNKNOWN), self.unk_id
        )
        model = _build_bpe(
            vocab=self._vocab(),
            merges=self._merges_by_score(),
            unk_token=None if unknown is None else self.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
        tokenizer = Tokenizer(model)
        steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
        undo: list[decoders.Decoder] = [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
        ]
        if add_space:
            steps.insert(0, normalizers.Prepend("▁"))
            undo.append(decoders.Strip(" ", 1, 0))
        tokenizer.normalizer = normalizers.Sequence(steps)
        tokenizer.decoder = decoders.Sequence(undo)
        self._finish(tokenizer, add_bos=True)
        return self._parts(tokenizer, byte_level=False, strip_first_space=add_space)

    # -- models -------------------------------------------------------------------------------

    def _vocab(self) -> dict[str, int]:
        vocab: dict[str, int] = {}
        for token_id, token in enumerate(self.tokens):
            vocab.setdefault(token, token_id)
        return vocab

    def _bpe(self, merges: list[tuple[str, str]], pre: PreTokenizer) -> models.BPE:
        return _build_bpe(vocab=self._vocab(), merges=merges, ignore_merges=pre.ignore_merges)

    def _merges(self) -> list[tuple[str, str]]:
        pairs = []
        for merge in self._strings("merges"):
            # The left piece is not empty, so a space in first place belongs to it.
            cut = merge.find(" ", 1)
            if cut < 0:
                raise TokenizerError(f"damaged merge {merge[:40]!r} in tokenizer.ggml.merges")
            pairs.append((merge[:cut], merge[cut + 1 :]))
        if not pairs:
            raise TokenizerError("a byte-level vocabulary needs tokenizer.ggml.merges")
        return pairs

    def _merges_by_score(self) -> list[tuple[str, str]]:
        scores = self._array("scores")
        if len(scores) != len(self.tokens):
            raise TokenizerError(
                f"tokenizer.ggml.scores has {len(scores)} entries for {len(self.tokens)} tokens"
            )
        pieces = {
            token: token_id
            for token_id, token in enumerate(self.tokens)
            if self.types[token_id] in (TokenType.NORMAL, TokenType.USER_DEFINED) and token
        }
        ranked: list[tuple[float, str, str]] = []
        for token, token_id in pieces.items():
            if len(token) > MAX_PIECE_CHARS:
                raise TokenizerError(
                    f"tokenizer.ggml.tokens[{token_id}] has {len(token)} characters; "
                    f"at most {MAX_PIECE_CHARS} may be"
                )
            score = _number(scores[token_id])
            cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
            pairs = [(left, right) for left, right in cuts if left in pieces and right in pieces]
            pairs.sort(key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))
            ranked.extend((score, left, right) for left, right in pairs)
        # Where a piece can be made in several ways, the longer left half goes first: that is how
        # the published conversions break the tie, and close to SentencePiece's leftmost-first.
        ranked.sort(key=lambda entry: (entry[0], len(entry[1]), len(entry[2])), reverse=True)
        return [(left, right) for _, left, right in ranked]

    # -- what both share ----------------------------------------------------------------------

    def _finish(self, tokenizer: Tokenizer, *, add_bos: bool) -> None:
        tokenizer.add_tokens(
            [
                added_token(token, special=token_id in self.special)
                for token_id, token in enumerate(self.tokens)
                if token and (token_id in self.special or self._user_defined(token_id))
            ]
        )
        before = self.bos_id if self._flag("add_bos_token", add_bos) else None
        after = self.eos_id if self._flag("add_eos_token", False) else None
        if before is None and after is None:
            return
        single = [t for t in (self._name(before), "$A", self._name(after)) if t]
        names = {i: self.tokens[i] for i in (before, after) if i is not None}
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single,
            pair=[*single, *(part if part != "$A" else "$B" for part in single)],
            special_tokens=[(name, token_id) for token_id, name in names.items()],
        )

    def _user_defined(self, token_id: int) -> bool:
        return self.types[token_id] == TokenType.USER_DEFINED

    def _name(self, token_id: int | None) -> str | None:
        return None if token_id is None else self.tokens[token_id]

    def _parts(
        self, tokenizer: Tokenizer, *, byte_level: bool, strip_first_space: bool
    ) -> TokenizerParts:
        added = {i for i in range(len(self.tokens)) if i in self.special or self._user_defined(i)}
        stop_ids = end_ids(self.tokens, self.special)
        for name in ("eos_token_id", "eot_token_id", "eom_token_id"):
            token_id = self._token_id(name)
            if token_id is not None:
                stop_ids.add(token_id)
        unused = {i for i, kind in enumerate(self.types) if kind == TokenType.UNUSED}
        return TokenizerParts(
            backend=tokenizer,
            vocabulary=build_vocabulary(
                self.tokens, byte_level=byte_level, added=added, special=self.special | unused
            ),
            strings=self.tokens,
            bos_id=self.bos_id,
            eos_id=self.eos_id,
            unk_id=self.unk_id,
            pad_id=self.pad_id,
            stop_ids=frozenset(stop_ids),
            byte_level=byte_level,
            strip_first_space=strip_first_space,
            chat_templates=self._templates(),
        )

    def _templates(self) -> dict[str, str]:
        templates = {}
        for key, value in self._metadata.items():
            if key == _TEMPLATE and isinstance(value, str):
                templates["default"] = value
            elif key.startswith(_TEMPLATE + ".") and isinstance(value, str):
                templates[key[len(_TEMPLATE) + 1 :]] = value
        return templates

    # -- reading with suspicion ---------------------------------------------------------------

    def _array(self, name: str) -> Sequence[object]:
        value: Any = self._metadata.get(_PREFIX + name, ())
        if isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
            raise TokenizerError(f"tokenizer.ggml.{name} is not an array")
        return value  # type: ignore[no-any-return]

    def _strings(self, name: str) -> list[str]:
        values = list(self._array(name))
        if not all(isinstance(value, str) for value in values):
            raise TokenizerError(f"tokenizer.ggml.{name} is not an array of strings")
        return values  # type: ignore[return-value]

    def _types(self) -> list[int]:
        values = [_integer(value) for value in self._array("token_type")]
        if not values:
            return [TokenType.NORMAL] * len(self.tokens)
        if len(values) != len(self.tokens):
            raise TokenizerError(
                f"tokenizer.ggml.token_type has {len(values)} entries for {len(self.tokens)} tokens"
            )
        return values

    def _token_id(self, name: str) -> int | None:
        value = self._metadata.get(_PREFIX + name)
        if value is None:
            return None
        token_id = _integer(value)
        if not 0 <= token_id < len(self.tokens):
            raise TokenizerError(
                f"tokenizer.ggml.{name} is {token_id}, outside the vocabulary of {len(self.tokens)}"
            )
        return token_id

    def _flag(self, name: str, default: bool) -> bool:
        value = self._metadata.get(_PREFIX + name)
        if value is None:
            return default
        if not isinstance(value, (bool, int)):
            raise TokenizerError(f"tokenizer.ggml.{name} is {value!r:.40}, which is no boolean")
        return bool(value)


def _number(value: object) -> float:
    """``value`` as a float; scores may well be infinite."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TokenizerError(
            f"{value!r:.40} where the tokenizer's metadata needs a number"
        ) from None


def _integer(value: object) -> int:
    number = _number(value)
    if not number.is_integer():  # neither are NaN and the infinities
        raise TokenizerError(f"{number!r} where the tokenizer's metadata needs an integer")
    return int(number)


def _build_bpe(**arguments: Any) -> models.BPE:
    try:
        return models.BPE(**arguments)
    except Exception as error:
        # The library raises bare Exceptions, for instance for a merge of unknown tokens.
        raise TokenizerError(f"the GGUF file's vocabulary is inconsistent: {error}") from error
