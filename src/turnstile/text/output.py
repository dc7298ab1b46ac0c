"""From the tokens of one sample to what its client reads: :class:`TextStream`.

One object does it for streamed and unstreamed answers, so the two cannot differ::

    stream = TextStream(vocabulary, options)
    for token in row.tokens:
        if stream.push(token):         # a stop string is complete: cancel the sample
            break
    send(stream.take())                # what may be sent now
    ...
    stream.finish()                    # no more tokens: let go of what was held back
    send(stream.take())

Text is held back while it may be the start of a stop string, and while a character is not whole.
What lies behind a stop string is never emitted, and its tokens are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from turnstile.text.detokenizer import Detokenizer
from turnstile.text.logprobs import LogprobEntry, TokenLogprobs, make_entry
from turnstile.text.stop import StopAutomaton, StopMatcher
from turnstile.text.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """What a request says about its text; all its samples share one.

    Attributes
    ----------
    stop
        The compiled stop strings, or None.
    include_stop
        Leave the stop string (or the stop token's text) in the output.
    skip_special_tokens
        Control tokens add nothing to the text.
    min_tokens
        No stop string ends the sample before this many tokens.
    logprobs
        Make an entry of every token.
    offset
        Characters that come before this text (an echoed prompt), for ``text_offset``.
    """

    stop: StopAutomaton | None = None
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    logprobs: bool = False
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """What a client gets next: text, and the tokens taken since the last delta."""

    text: str
    token_ids: list[int]
    logprobs: list[LogprobEntry]


class TextStream:
    """The text of one sample while it grows.

    Attributes
    ----------
    num_tokens
        Tokens taken: those to charge and to report. The token that completes a stop string is
        the last one.
    stopped
        A stop string was completed; nothing more is taken.
    stop_reason
        The stop string, or the id of the stop token, or None.
    """

    __slots__ = (
        "_detokenizer",
        "_entries",
        "_held",
        "_ids",
        "_length",
        "_matcher",
        "_options",
        "_ready",
        "_vocabulary",
        "num_tokens",
        "stop_reason",
        "stopped",
    )

    def __init__(self, vocabulary: Vocabulary, options: TextOptions) -> None:
        self._vocabulary = vocabulary
        self._options = options
        self._detokenizer = Detokenizer(vocabulary, skip_special_tokens=options.skip_special_tokens)
        self._matcher = None if options.stop is None else StopMatcher(options.stop)
        self._length = 0  # characters decoded so far, where somebody counts them
        self._ready: list[str] = []  # pieces that may be handed out
        self._held = ""  # what follows them and may be the start of a stop string
        self._ids: list[int] = []
        self._entries: list[LogprobEntry] = []
        self.num_tokens = 0
        self.stopped = False
        self.stop_reason: str | int | None = None

    def push(
        self, token_id: int, logprobs: TokenLogprobs | None = None, *, is_stop: bool = False
    ) -> bool:
        """Take the next token. Returns whether a stop string is complete now.

        ``is_stop`` marks the token that made the engine stop: it counts, but its text is left
        out unless the request wants it. After a stop nothing is taken any more.
        """
        if self.stopped:
            return True
        options = self._options
        self.num_tokens += 1
        self._ids.append(token_id)
        if options.logprobs:
            offset = options.offset + self._length
            self._entries.append(make_entry(self._vocabulary, token_id, logprobs, offset))
        if is_stop:
            self.stop_reason = token_id
            if not options.include_stop:
                return False
        text = self._detokenizer.push(token_id)
        return self._add(text) if text else False

    @property
    def passes(self) -> bool:
        """Whether :meth:`pass_on` may be used: there are no stop strings to look for, and no
        log-probabilities to report.
        """
        return self._matcher is None and not self._options.logprobs

    def pass_on(self, token_ids: Sequence[int]) -> str:
        """:meth:`push` and :meth:`take_text` in one, for text that :attr:`passes`. Nothing of it is
        held back, so it need not go through the list of what is ready.
        """
        self.num_tokens += len(token_ids)
        push = self._detokenizer.push
        text = push(token_ids[0]) if len(token_ids) == 1 else "".join(map(push, token_ids))
        return self.take_text() + text if self._ready else text

    def finish(self) -> None:
        """No more tokens come: what was held back is text, and half a character is U+FFFD."""
        if self.stopped:
            return
        tail = self._detokenizer.flush()
        if tail and self._add(tail):
            return
        self._release(self._held)
        self._held = ""

    def take(self) -> Delta:
        """Hand out the text that is certain, and the tokens since the last time."""
        delta = Delta("".join(self._ready), self._ids, self._entries)
        self._ready, self._ids, self._entries = [], [], []
        return delta

    def take_text(self) -> str:
        """As :meth:`take`, for who wants the text alone: the common case makes no objects."""
        ready = self._ready
        text = ready[0] if len(ready) == 1 else "".join(ready)
        ready.clear()
        self._ids.clear()
        self._entries.clear()
        return text

    def _add(self, text: str) -> bool:
        self._length += len(text)
        matcher = self._matcher
        if matcher is None:
            self._ready.append(text)
            return False
        options = self._options
        match = matcher.feed(text, armed=self.num_tokens >= options.min_tokens)
        # A match begins inside what is held: that is all that could have begun one.
        text = self._held + text
        if match is None:
            certain = len(text) - matcher.held
            self._release(text[:certain])
            self._held = text[certain:]
            return False
        end = match.end if options.include_stop else match.start
        self._release(text[: len(text) - (self._length - end)])
        self._held = ""
        self._length = end
        self.stopped, self.stop_reason = True, match.stop
        return True

    def _release(self, text: str) -> None:
        if text:
            self._ready.append(text)
