""":class:`Tokenizer`: text to token ids, control tokens recognised only where they should be."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as Backend

from turnstile.text.errors import TokenizerError
from turnstile.text.gguf_tokenizer import load_gguf_parts
from turnstile.text.hf_tokenizer import load_directory_parts
from turnstile.text.parts import TokenizerParts

# How much a normalizer may shrink text, in bytes: Unicode composition makes 3 of 9 (Hangul), the
# compatibility forms 1 of 3 (full-width letters). Others have no bound worth stating.
_SHRINK = {"NFC": 4, "NFD": 4, "NFKC": 4, "NFKD": 4, "Lowercase": 3, "Prepend": 1}


class Tokenizer:
    """Encodes text and knows the vocabulary. Safe to share between threads.

    Special tokens (``<|im_end|>`` and the like) steer a model. With ``parse_special`` their text
    becomes the control token; without, it is text like any other, and the ids that come out never
    contain a control token (fault B71 of other servers: a user who types the end-of-turn marker
    ends the turn).

    What counts as control: tokens the files call special, and added tokens that the chat template
    itself writes (Qwen's ``<tool_call>`` is such a one).
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        self.vocabulary = parts.vocabulary
        self.bos_id = parts.bos_id
        self.eos_id = parts.eos_id
        self.unk_id = parts.unk_id
        self.pad_id = parts.pad_id
        self.stop_ids = parts.stop_ids
        self.byte_level = parts.byte_level
        self.strip_first_space = parts.strip_first_space
        self.chat_templates = dict(parts.chat_templates)
        self._strings = parts.strings
        self._added: dict[int, AddedToken] = self._backend.get_added_tokens_decoder()
        self.control_ids = self._find_control_ids()
        self._plain = self._make_plain(self._backend.pre_tokenizer)
        self._longest_token, self._shrink = self._bounds()

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """Build from GGUF metadata (``tokenizer.*`` keys to Python values)."""
        return cls(load_gguf_parts(metadata))

    @classmethod
    def from_directory(cls, directory: str | Path) -> Tokenizer:
        """Build from a Hugging Face directory with ``tokenizer.json``."""
        return cls(load_directory_parts(directory))

    @classmethod
    def from_path(cls, path: str | Path) -> Tokenizer:
        """Build from a ``.gguf`` file, a Hugging Face directory, or a file in one.

        Raises :class:`TokenizerError`, or what reading a damaged GGUF file raises.
        """
        path = Path(path)
        if path.suffix != ".json" and not path.is_dir():
            from turnstile.models.gguf import read_gguf

            return cls.from_gguf(read_gguf(path).metadata)
        return cls.from_directory(path if path.is_dir() else path.parent)

    # -- the vocabulary -----------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """One more than the highest id (a model's embedding may be padded beyond it)."""
        return len(self._strings)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that are no part of the text a user reads."""
        return self.vocabulary.special

    @property
    def special_tokens(self) -> dict[str, str]:
        """``bos_token``, ``eos_token``… to their text, as chat templates name them."""
        named = {
            "bos_token": self.bos_id,
            "eos_token": self.eos_id,
            "unk_token": self.unk_id,
            "pad_token": self.pad_id,
        }
        return {name: self._strings[i] for name, i in named.items() if i is not None}

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes the token adds to the text; ``b""`` for an id outside the vocabulary."""
        return self.vocabulary.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        r"""A printable name of one token alone; parts of characters read ``bytes:\xf0\x9f``."""
        return self.vocabulary.token_text(token_id)

    def token_string(self, token_id: int) -> str:
        """Token as the model's files write it (``Ġhello``, ``▁hello``)."""
        return self._strings[token_id] if 0 <= token_id < len(self._strings) else ""

    def token_id(self, string: str) -> int | None:
        """Id of a token string, or None."""
        found: int | None = self._backend.token_to_id(string)
        return found

    # -- encoding -----------------------------------------------------------------------------

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids of ``text``.

        ``add_special_tokens`` lets the model's begin (and end) token in where it has one.
        Other threads run meanwhile: the work is done without the interpreter lock.
        """
        return self.encode_batch(
            [text], add_special_tokens=add_special_tokens, parse_special=parse_special
        )[0]

    def encode_batch(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        parse_special: bool = True,
    ) -> list[list[int]]:
        """Token ids of several texts, on as many threads as the library likes."""
        texts = [_without_surrogates(text) for text in texts]
        backend = self._backend if parse_special else self._plain
        encodings = backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        if parse_special:
            return [encoding.ids for encoding in encodings]
        plain = [encoding.ids for encoding in encodings]
        if not add_special_tokens:
            return [self._checked(t, ids, self._plain) for t, ids in zip(texts, plain, strict=True)]
        bare = self.encode_batch(texts, add_special_tokens=False, parse_special=False)
        before, after = self._frame
        return [[*before, *ids, *after] for ids in bare]

    def encode_segment(self, text: str, *, first: bool) -> list[int]:
        """Encode text that stands between control tokens (``first``: nothing before it).

        Never yields a control token, and equals what :meth:`encode` makes of the same text in
        the same place.
        """
        backend = self._plain if first else self._plain_inside
        ids: list[int] = backend.encode_batch_fast([_without_surrogates(text)])[0].ids
        return self._checked(text, ids, backend)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of a whole sequence of ids (the space a tokenizer puts in front is taken away).

        Bytes that are no UTF-8 become U+FFFD.
        """
        vocabulary = self.vocabulary
        kept = [i for i in ids if not (skip_special_tokens and i in vocabulary.special)]
        data = b"".join([vocabulary.token_bytes(i) for i in kept])
        if self.strip_first_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def min_tokens(self, num_bytes: int) -> int:
        """Fewest tokens a text of ``num_bytes`` UTF-8 bytes can have; a bound, computed at once.

        It lets a server refuse a huge prompt before spending seconds on tokenizing it (fault
        B83). 0 where nothing can be said, because the tokenizer may drop text.
        """
        if self._longest_token is None:
            return 0
        return -(-num_bytes // (self._longest_token * self._shrink))

    @property
    def backend(self) -> Backend:
        """The library's tokenizer, for saving. Do not change it."""
        return self._backend

    # -- control tokens -----------------------------------------------------------------------

    @cached_property
    def control_pattern(self) -> re.Pattern[str]:
        """Matches the text of any control token, longest first."""
        texts = sorted(self._control_by_text, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    @cached_property
    def _control_by_text(self) -> dict[str, int]:
        return {self._added[i].content: i for i in self.control_ids if self._added[i].content}

    @cached_property
    def section_pattern(self) -> re.Pattern[str] | None:
        """Matches the added tokens, if :meth:`encode` encodes the text between two of them as if it
        stood alone; None if it does not.

        It does not where an added token takes away space beside it, or is found only as a whole
        word or after normalization: then the text around matters. Nor with SentencePiece, which
        writes a space before the first piece but not before the others.
        """
        added = [token for token in self._added.values() if token.content]
        around = any(t.lstrip or t.rstrip or t.single_word or t.normalized for t in added)
        if not self.byte_level or around or not added:
            return None
        # The longest of those that begin at the first place where any does, as the library has it.
        texts = sorted((token.content for token in added), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)))

    @cached_property
    def must_segment(self) -> bool:
        """Whether control tokens can appear only after normalization (NFKC makes ``<`` of ``＜``),
        so that looking for their text in a user's words is not enough.
        """
        if self._backend.normalizer is None:
            return False
        return any(self._added[i].normalized for i in self.control_ids)

    def control_token(self, text: str) -> tuple[int, bool, bool]:
        """Id of a control token's text, and whether it swallows space to its left and right."""
        token_id = self._control_by_text[text]
        added = self._added[token_id]
        return token_id, added.lstrip, added.rstrip

    def _find_control_ids(self) -> frozenset[int]:
        sources = "\0".join(self.chat_templates.values())
        return frozenset(
            token_id
            for token_id, token in self._added.items()
            if token.special or (token.content and token.content in sources)
        )

    def _make_plain(self, pre_tokenizer: pre_tokenizers.PreTokenizer | None) -> Backend:
        """Make a second tokenizer over the same model that reads control tokens as text."""
        plain = Backend(self._backend.model)
        if self._backend.normalizer is not None:
            plain.normalizer = self._backend.normalizer
        if pre_tokenizer is not None:
            plain.pre_tokenizer = pre_tokenizer
        plain.add_tokens(
            [_as_added(t, i in self.control_ids) for i, t in sorted(self._added.items())]
        )
        if any(plain.token_to_id(t.content) != i for i, t in self._added.items()):
            # Ids of added tokens are handed out in order; holes in them need the long way round.
            plain = _copy_with_control(self._backend, self._added, self.control_ids)
            if pre_tokenizer is not None:
                plain.pre_tokenizer = pre_tokenizer
        plain.encode_special_tokens = True
        return plain

    @cached_property
    def _plain_inside(self) -> Backend:
        """As ``_plain``, for text that is not first: no space is put before it."""
        pre_tokenizer = self._backend.pre_tokenizer
        state = json.loads(pre_tokenizer.__getstate__()) if pre_tokenizer is not None else {}
        if state.get("type") == "Metaspace" and state.get("prepend_scheme") == "first":
            inside = pre_tokenizers.Metaspace(
                replacement=state["replacement"], prepend_scheme="never", split=state["split"]
            )
            return self._make_plain(inside)
        return self._plain

    def _checked(self, text: str, ids: list[int], backend: Backend) -> list[int]:
        """Make sure no control token came out of plain text.

        BPE has no merges that lead to one, but a tokenizer that takes whole words from the
        vocabulary (``ignore_merges``) may hit it. Then every such word is cut behind its first
        character and the pieces are encoded each for itself. All cuts are made at once: a text of
        thousands of such words must cost no more than a few encodings of it.
        """
        if self.control_ids.isdisjoint(ids):
            return ids
        encoding = backend.encode(text)
        cuts = [0]
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self.control_ids and token_id != self.unk_id:
                if end - start < 2:
                    raise TokenizerError(
                        f"the tokenizer has no way to write {text[start:end]!r} as plain text"
                    )
                cuts.append(start + 1)
        if len(cuts) == 1:
            return ids
        result: list[int] = []
        for start, end in itertools.pairwise([*cuts, len(text)]):
            inside = self._plain_inside if start else backend
            piece = text[start:end]
            result += self._checked(piece, inside.encode(piece).ids, inside)
        return result

    @cached_property
    def _frame(self) -> tuple[list[int], list[int]]:
        """Ids the tokenizer puts before and after a text."""
        bare = self._backend.encode("a", add_special_tokens=False).ids
        framed: list[int] = self._backend.encode("a", add_special_tokens=True).ids
        for start in range(len(framed) - len(bare) + 1):
            if framed[start : start + len(bare)] == bare:
                return framed[:start], framed[start + len(bare) :]
        raise TokenizerError("the tokenizer's post-processor is not supported")

    def _bounds(self) -> tuple[int | None, int]:
        longest = max((len(data) for data in self.vocabulary.bytes_of), default=1)
        swallows = any(token.lstrip or token.rstrip for token in self._added.values())
        shrink = _shrink_factor(self._backend)
        covers_bytes = self.byte_level or self._has_byte_fallback()
        if swallows or shrink is None or not covers_bytes:
            return None, 1
        return max(1, longest), shrink

    def _has_byte_fallback(self) -> bool:
        return bool(getattr(self._backend.model, "byte_fallback", False)) and all(
            self._backend.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256)
        )


def _as_added(token: AddedToken, special: bool) -> AddedToken:
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=special,
    )


def _copy_with_control(
    backend: Backend, added: Mapping[int, AddedToken], control: Collection[int]
) -> Backend:
    saved = json.loads(backend.to_str())
    for entry in saved["added_tokens"]:
        entry["special"] = entry["id"] in control
    saved["post_processor"] = None
    copy = Backend.from_str(json.dumps(saved))
    if any(copy.token_to_id(token.content) != i for i, token in added.items()):
        raise TokenizerError("the tokenizer's added tokens have inconsistent ids")
    return copy


def _shrink_factor(backend: Backend) -> int | None:
    if backend.normalizer is None:
        return 1
    state = json.loads(backend.normalizer.__getstate__())
    factor = 1
    for part in state.get("normalizers", [state]):
        if part["type"] == "Replace":
            pattern, content = part["pattern"].get("String"), part["content"]
            if pattern is None or len(content.encode()) < len(pattern.encode()):
                return None
            continue
        if part["type"] not in _SHRINK:
            return None
        factor *= _SHRINK[part["type"]]
    return factor


def _without_surrogates(text: str) -> str:
    """JSON can carry lone surrogates, which no tokenizer takes: they become U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
