"""Long texts that come again: :class:`SectionCache`.

A conversation is sent whole with every turn, and a system prompt with every conversation. To
tokenize 2 KB costs the API process as much as all else it does for a request. But between two
added tokens, as chat templates write them around each message, many tokenizers encode a text as if
it stood alone (:attr:`Tokenizer.section_pattern`), so that the ids of a section can be kept.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b

from turnstile.text.tokenizer import Tokenizer

LEAST_CHARS = 256
"""A shorter section is tokenized in less time than it is looked for."""
MOST_TOKENS = 1 << 20
"""Kept in all: 4 MB."""


class SectionCache:
    """Encodes texts whose long sections it may have encoded before. Safe to share between threads.

    The least recently used sections are forgotten first. A section is found again only with the
    salt it was encoded with. So a caller that gives each tenant a salt of its own keeps tenants
    from learning, by the time an encoding takes, what another has sent.

    Parameters
    ----------
    most_tokens
        Tokens kept in all.
    least_chars
        Characters of the shortest section that is kept.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        most_tokens: int = MOST_TOKENS,
        least_chars: int = LEAST_CHARS,
    ) -> None:
        self._tokenizer = tokenizer
        self._least = least_chars
        self._most = most_tokens
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, array[int]] = OrderedDict()
        self._tokens = 0
        self.hits = 0
        """Sections found."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are kept now."""
        return self._tokens

    def encode(self, text: str, salt: bytes) -> list[int]:
        """What :meth:`Tokenizer.encode` makes of ``text``, without the model's begin token."""
        ids: list[int] = []
        place = 0
        for start, end in self._long_sections(text):
            ids += self._encode(text[place:start])
            ids += self._encode_section(text[start:end], salt)
            place = end
        return ids + self._encode(text[place:])

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._known.clear()
            self._tokens = 0

    def _long_sections(self, text: str) -> Iterator[tuple[int, int]]:
        pattern = self._tokenizer.section_pattern
        if pattern is None or len(text) < self._least:
            return
        place = 0
        for token in pattern.finditer(text):
            if token.start() - place >= self._least:
                yield place, token.start()
            place = token.end()
        if len(text) - place >= self._least:
            yield place, len(text)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False) if text else []

    def _encode_section(self, text: str, salt: bytes) -> list[int]:
        data = text.encode("utf-8", "surrogatepass")
        key = blake2b(b"%d:%b%b" % (len(salt), salt, data), digest_size=32).digest()
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                self.hits += 1
                return known.tolist()
        ids = self._encode(text)
        with self._lock:
            if key not in self._known:  # else another thread was as quick
                self._known[key] = array("i", ids)
                self._tokens += len(ids)
            while self._tokens > self._most:
                self._tokens -= len(self._known.popitem(last=False)[1])
        return ids
