"""What a tokenizer is made of, whichever file it came from: :class:`TokenizerParts`."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenizers import AddedToken, Tokenizer

from turnstile.text.vocabulary import Vocabulary

MAX_VOCABULARY = 1 << 21
"""Eight times the largest known vocabulary (262,144 ids)."""

# Texts of control tokens that end a turn or a document. A model's files often name only one of
# them as its end; the others end it just as well, and no one wants to read on past them.
END_TEXTS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|eot|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<turn|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end_of_turn|>",
    "<|END_OF_TURN_TOKEN|>",
    "<｜end▁of▁sentence｜>",
    "<|eos|>",
    "<eos>",
    "<EOT>",
    "</s>",
)


@dataclass(slots=True, kw_only=True)
class TokenizerParts:
    """The pieces :class:`turnstile.text.tokenizer.Tokenizer` is put together from.

    Attributes
    ----------
    backend
        Encodes, with every added token recognised.
    vocabulary
        ``id → bytes`` of the whole vocabulary.
    strings
        ``id → token string`` as the model's files write it.
    bos_id, eos_id, unk_id, pad_id
        The usual control tokens; None where the model has none.
    stop_ids
        Every id that ends a generation (``eos_id`` among them).
    byte_level
        True for byte-level BPE, False for SentencePiece-like vocabularies.
    strip_first_space
        True where the tokenizer puts a space before the text, so that decoding a whole text
        takes one away again.
    chat_templates
        Jinja sources by name; the usual one is ``default``.
    """

    backend: Tokenizer
    vocabulary: Vocabulary
    strings: list[str]
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    pad_id: int | None
    stop_ids: frozenset[int]
    byte_level: bool
    strip_first_space: bool
    chat_templates: dict[str, str] = field(default_factory=dict)


def end_ids(strings: list[str], special: frozenset[int]) -> set[int]:
    """Ids of the control tokens known to end a turn (:data:`END_TEXTS`)."""
    ends = set(END_TEXTS)
    return {i for i in special if i < len(strings) and strings[i] in ends}


def added_token(text: str, *, special: bool) -> AddedToken:
    """Make an added token that is matched on the text as it was written."""
    return AddedToken(text, special=special, normalized=False)
