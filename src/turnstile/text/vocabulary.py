"""The table ``id → bytes`` that detokenization, log-probabilities and grammars read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

_SPACE = "▁"
"""SentencePiece writes a space as U+2581."""


def _byte_alphabet() -> dict[str, int]:
    """The 256 visible characters byte-level BPE writes bytes with (GPT-2's table).

    Printable bytes stand for themselves; the rest take the code points from 256 on, in order.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in visible}
    hidden = (byte for byte in range(256) if chr(byte) not in alphabet)
    alphabet.update({chr(256 + place): byte for place, byte in enumerate(list(hidden))})
    return alphabet


BYTE_ALPHABET = _byte_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level BPE token. Characters outside the alphabet stand for themselves."""
    try:
        return bytes([BYTE_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode("utf-8", "surrogatepass")


def sentencepiece_bytes(token: str) -> bytes:
    """Bytes of a SentencePiece token: ``<0x0A>`` is one byte, ``▁`` is a space."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(_SPACE, " ").encode("utf-8", "surrogatepass")


class Vocabulary:
    """What every id stands for.

    Attributes
    ----------
    bytes_of
        ``bytes_of[id]``, the bytes the token adds to the text (``b""`` where the id is unused).
    text_of
        ``text_of[id]``, the same as text where the bytes are whole characters, else None.
    read_of
        ``text_of`` as a user reads it: empty where the id is special.
    special
        Ids that are control tokens: not part of the text a user reads.
    """

    __slots__ = ("bytes_of", "read_of", "special", "text_of")

    def __init__(self, bytes_of: Sequence[bytes], special: Iterable[int]) -> None:
        self.bytes_of = list(bytes_of)
        self.special: frozenset[int] = frozenset(special)
        self.text_of = [_whole_text(data) for data in self.bytes_of]
        self.read_of = list(self.text_of)
        for token_id in self.special:
            if 0 <= token_id < len(self.read_of):
                self.read_of[token_id] = ""

    def __len__(self) -> int:
        return len(self.bytes_of)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token; ``b""`` for an id outside the table (padded embeddings have such)."""
        return self.bytes_of[token_id] if 0 <= token_id < len(self.bytes_of) else b""

    def token_text(self, token_id: int) -> str:
        r"""A printable name for one token, alone.

        Tokens that are only part of a character are written as OpenAI does, ``bytes:\xf0\x9f``,
        so that two different ones keep different names.
        """
        if not 0 <= token_id < len(self.text_of):
            return ""
        text = self.text_of[token_id]
        if text is not None:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes_of[token_id])


def _whole_text(data: bytes) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def build_vocabulary(
    tokens: Sequence[str], *, byte_level: bool, added: Collection[int], special: Iterable[int]
) -> Vocabulary:
    """Make the table from token strings.

    ``added`` are ids whose strings are plain text (added tokens), not written in the model's
    alphabet. In SentencePiece vocabularies they too write a space as ``▁``.
    """
    if byte_level:
        table = [
            token.encode("utf-8", "surrogatepass") if i in added else byte_level_bytes(token)
            for i, token in enumerate(tokens)
        ]
    else:
        table = [sentencepiece_bytes(token) for token in tokens]
    return Vocabulary(table, special)
