"""Token ids to text, one token at a time, never looking back: :class:`Detokenizer`.

A table ``id → bytes`` and at most three bytes of state (an unfinished UTF-8 character) are all it
takes, so a token costs the same whether it is the tenth or the ten-thousandth. Text comes out as
soon as it is whole: the deltas, joined, equal the decoding of all bytes at once, and no U+FFFD is
emitted that a later token would have completed.
"""

from __future__ import annotations

import codecs

from turnstile.text.vocabulary import Vocabulary

_decode = codecs.utf_8_decode


class Detokenizer:
    """Incremental decoding of one sequence.

    Parameters
    ----------
    vocabulary
        The table.
    skip_special_tokens
        Control tokens add nothing to the text.
    strip_first_space
        Take away one space at the very start: for decoding a whole text of a SentencePiece
        model, not for a continuation, whose first space is real.
    """

    __slots__ = ("_bytes_of", "_pending", "_strip", "_text_of")

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        skip_special_tokens: bool = True,
        strip_first_space: bool = False,
    ) -> None:
        self._bytes_of = vocabulary.bytes_of
        self._text_of = vocabulary.read_of if skip_special_tokens else vocabulary.text_of
        self._strip = strip_first_space
        self._pending = b""

    @property
    def pending(self) -> bytes:
        """Bytes of a character that is not finished (at most 3)."""
        return self._pending

    def push(self, token_id: int) -> str:
        """Take one token; return the text that is whole now (often all of it, ``""`` inside a
        character). An id outside the vocabulary adds nothing.
        """
        table = self._text_of
        text = table[token_id] if 0 <= token_id < len(table) else ""
        if text == "" or not (text is None or self._pending or self._strip):
            return text
        if text is None or self._pending:
            data = self._pending + self._bytes_of[token_id]
            text, used = _decode(data, "replace", False)
            self._pending = data[used:]
        if self._strip and (text or self._pending):
            self._strip = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        """End of the sequence: what can no longer be completed becomes U+FFFD."""
        data, self._pending = self._pending, b""
        return data.decode("utf-8", "replace")
