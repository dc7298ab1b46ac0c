"""Output that must match a grammar: masks over the vocabulary, token by token, with llguidance.

In the API process, :func:`check_grammar` finds out whether a request's grammar compiles, in a
process that may die of it. In the engine, :class:`GrammarCompiler` makes a :class:`GrammarState`
for each sample; the sampler asks it for the mask before a token is drawn and tells it the token
after. Nothing here needs torch: a mask is a row of int32, one bit for each token.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from turnstile.text import grammar_checker
from turnstile.text.errors import CANNOT_FOLLOW, GrammarError, UncheckedGrammarError
from turnstile.text.heap import heap_bytes
from turnstile.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Int32Array = npt.NDArray[np.int32]

_WALL_SECONDS = 30.0
_POLL_SECONDS = 0.2
# What the checker dies of where the grammar is at fault: its bound on CPU time, or a compiler that
# finds no memory or stack. A SIGKILL is somebody else's: an operator, or a machine out of memory.
_DEATHS_BY_GRAMMAR = {
    -getattr(signal, name)
    for name in ("SIGXCPU", "SIGABRT", "SIGSEGV", "SIGBUS", "SIGILL")
    if hasattr(signal, name)
}
_TOO_COMPLEX = (
    "the schema or grammar is too complex: compiling it takes too much time, memory or depth"
)
_KEPT_VERDICTS = 256
_ALWAYS_KEPT = 8
"""Compiled grammars that stay however much the heap has grown, which others may have done."""
_verdicts: OrderedDict[str, str | None] = OrderedDict()
_verdicts_lock = threading.Lock()


def check_grammar(grammar: str, unwanted: threading.Event | None = None) -> None:
    """Compile a grammar in a process of its own, once; the verdict is remembered.

    Takes some 100 ms the first time, and a process: call it off the event loop and few at once,
    unless :func:`is_checked`. The process is ended soon after ``unwanted`` is set. Raises
    :class:`GrammarError` with the compiler's complaint, or where compiling takes too much time,
    memory or depth; and :class:`UncheckedGrammarError`, which is not remembered, where there is no
    verdict: the machine is too busy or has no memory, or nobody waits any more.
    """
    with _verdicts_lock:
        known = grammar in _verdicts
        complaint = _verdicts.get(grammar)
    if not known:
        complaint = _complaint_about(grammar, unwanted or threading.Event())
    with _verdicts_lock:
        _verdicts[grammar] = complaint
        _verdicts.move_to_end(grammar)
        if len(_verdicts) > _KEPT_VERDICTS:
            _verdicts.popitem(last=False)
    if complaint is not None:
        raise GrammarError(complaint)


def is_checked(grammar: str) -> bool:
    """Whether the verdict on a grammar is known, so that :func:`check_grammar` takes no time."""
    return grammar in _verdicts


def _complaint_about(grammar: str, unwanted: threading.Event) -> str | None:
    try:
        said, code = _ask_checker(grammar, unwanted)
    except OSError as error:
        raise UncheckedGrammarError(f"the grammar could not be checked: {error.strerror}") from None
    if code in _DEATHS_BY_GRAMMAR or (code == 0 and not said):
        return _TOO_COMPLEX
    try:
        complaint = json.loads(said)["error"]
    except (ValueError, KeyError, TypeError):
        raise UncheckedGrammarError(
            f"the grammar could not be checked: its checker ended with code {code}"
        ) from None
    return None if complaint is None else f"the schema or grammar cannot be used: {complaint}"


def _ask_checker(grammar: str, unwanted: threading.Event) -> tuple[bytes, int]:
    """What the checker says, and its exit code (a signal's number, negative)."""
    with subprocess.Popen(
        [sys.executable, "-I", grammar_checker.__file__],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        given: bytes | None = grammar.encode("utf-8", "surrogatepass")
        end = time.monotonic() + _WALL_SECONDS
        while True:
            try:
                said, _ = process.communicate(given, timeout=_POLL_SECONDS)
                return said, process.returncode
            except subprocess.TimeoutExpired:
                given = None  # all of it is on its way
                if unwanted.is_set():
                    process.kill()
                    raise UncheckedGrammarError("nobody waits for the verdict any more") from None
                if time.monotonic() > end:
                    process.kill()
                    # It had a few seconds of CPU to use; others must have had the rest.
                    raise UncheckedGrammarError(
                        f"the grammar could not be checked within {_WALL_SECONDS:g} s: the machine "
                        "is too busy"
                    ) from None


class GrammarCompiler:
    """Makes grammar states for one vocabulary. Built on first use (a third of a second for
    150,000 tokens); compiled grammars are kept, since clients send the same ones again.

    One takes some 100 kB, and 9 MB where somebody made it to. It grows while it is used, and cannot
    say how large it is: what is bounded is what the process's heap has grown by since the first.

    Parameters
    ----------
    tokenizer
        Whose vocabulary it is.
    kept
        Most compiled grammars that are kept.
    kept_bytes
        Most bytes that the heap may have grown by when another is compiled; beyond, those least
        recently asked for go, down to a few that are always kept.
    heap
        Bytes in use now; None where nobody knows, which leaves the bound on their number.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        kept: int = 64,
        kept_bytes: int = 128 << 20,
        heap: Callable[[], int | None] = heap_bytes,
    ) -> None:
        self._tokenizer = tokenizer
        self._kept = kept
        self._kept_bytes = kept_bytes
        self._heap = heap
        self._heap_before = 0
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._vocabulary: LLTokenizer | None = None

    @property
    def kept(self) -> int:
        """Compiled grammars that are kept."""
        return len(self._compiled)

    def start(self, grammar: str) -> GrammarState:
        """Begin a sample. Raises :class:`GrammarError` where the grammar does not compile."""
        matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = self._compile(grammar)
            self._make_room()
            self._compiled[grammar] = matcher
        else:
            self._compiled.move_to_end(grammar)
        return GrammarState(matcher.deep_copy(), self._words)

    def _make_room(self) -> None:
        """Let go of grammars for one that was compiled. What samples still use stays with them."""
        while len(self._compiled) >= self._kept:
            self._compiled.popitem(last=False)
        while len(self._compiled) >= _ALWAYS_KEPT:
            now = self._heap()
            if now is None or now - self._heap_before <= self._kept_bytes:
                return
            self._compiled.popitem(last=False)

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        if self._vocabulary is None:
            self._vocabulary = _make_vocabulary(self._tokenizer)
            self._heap_before = self._heap() or 0
        matcher = LLMatcher(
            self._vocabulary, grammar, log_level=0, limits=grammar_checker.parser_limits()
        )
        _raise_error(matcher)
        return matcher

    @property
    def _words(self) -> int:
        assert self._vocabulary is not None
        return mask_words(self._vocabulary.vocab_size)


class GrammarState:
    """Where one sample stands in its grammar."""

    __slots__ = ("_matcher", "_words")

    def __init__(self, matcher: LLMatcher, words: int) -> None:
        self._matcher = matcher
        self._words = words

    def fill_mask(self, row: Int32Array) -> None:
        """Set ``row`` (int32 ``[words]``, contiguous, at least ``ceil(vocab_size / 32)`` long) to
        the tokens allowed next: bit ``i % 32`` of word ``i // 32`` is token ``i``. Tokens past
        the tokenizer's vocabulary are never allowed.

        When the grammar is satisfied the end-of-sequence tokens are among them; when nothing
        can follow they are the only ones. Raises :class:`GrammarError` where a step is too
        complex to compute.
        """
        if row.dtype != np.int32 or not row.flags.c_contiguous or len(row) < self._words:
            raise ValueError(f"a mask row must be contiguous int32 of at least {self._words} words")
        row[self._words :] = 0
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, self._words * 4)
        _raise_error(self._matcher)

    def advance(self, token_id: int) -> None:
        """Take the token that was drawn. Raises :class:`GrammarError` if it was not allowed."""
        if not self._matcher.consume_token(token_id):
            _raise_error(self._matcher)
            raise GrammarError(f"token {token_id} is not allowed by the grammar here")


def mask_words(vocab_size: int) -> int:
    """Words of int32 a mask over ``vocab_size`` tokens takes."""
    return (vocab_size + 31) // 32


def unpack_mask(row: Int32Array, vocab_size: int) -> npt.NDArray[np.bool_]:
    """Turn mask rows into booleans: ``[..., words]`` to ``[..., vocab_size]``, True is allowed.

    ``vocab_size`` may be larger than the mask covers; the rest is not allowed.
    """
    bits = np.unpackbits(row.view(np.uint8), axis=-1, count=None, bitorder="little")
    if bits.shape[-1] < vocab_size:
        widths = [(0, 0)] * (bits.ndim - 1) + [(0, vocab_size - bits.shape[-1])]
        bits = np.pad(bits, widths)
    return bits[..., :vocab_size].view(np.bool_)


def _make_vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    from llguidance import LLTokenizer
    from llguidance._tokenizer import TokenizerWrapper

    ends = sorted(tokenizer.stop_ids)
    if not ends:
        raise GrammarError("the model names no end-of-sequence token, which grammars need")
    return LLTokenizer(TokenizerWrapper(_Words(tokenizer, ends)), eos_token=ends)


class _Words:
    """A tokenizer as llguidance wants to see one."""

    def __init__(self, tokenizer: Tokenizer, ends: list[int]) -> None:
        self.eos_token_id = ends[0] if tokenizer.eos_id is None else tokenizer.eos_id
        self.bos_token_id = tokenizer.bos_id
        self.tokens = tokenizer.vocabulary.bytes_of
        # A control token spells its name, but is not the text it spells.
        self.special_token_ids = sorted(tokenizer.special_ids | tokenizer.control_ids)
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._tokenizer.encode(text, add_special_tokens=False, parse_special=False)


def _raise_error(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(CANNOT_FOLLOW + grammar_checker.complaint_of(str(matcher.get_error())))
