"""The shortest way from a token to a socket: :class:`Passage`, and :class:`Outbox` for a step.

Nearly every token of nearly every stream is one more piece of text, for a client that reads. What
it costs is most of what this process costs, so it has a way of its own: one method from the row to
the bytes, and one loop that writes and counts what a step had for everybody.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from turnstile.server.answer.choices import Choice
from turnstile.server.http.direct import Direct
from turnstile.server.http.exchange import Exchange
from turnstile.server.http.sse import encode
from turnstile.server.watch.metrics import Metrics

logger = logging.getLogger("turnstile.server")


class Outbox:
    """What one step has for all streams, written and counted when the last of it is made.

    A write costs more than making its bytes, and most of that is in the kernel. A hundred writes in
    a row are faster than a hundred with Python in between, and a client that reads many streams is
    woken once instead of a hundred times. The inter-token latencies of a step are observed together
    too: its tokens come at one moment, and most streams had their last one at one moment as well.

    It empties itself in the same turn of the event loop. Whoever writes to one of these streams
    directly must call :meth:`flush` first, or the pieces change order.

    Attributes
    ----------
    before
        When the tokens of the step before this one came.
    steady
        Samples that have got a token in each of the two.
    """

    __slots__ = ("_clock", "_metrics", "_now", "_pieces", "before", "steady")

    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._now: float | None = None
        self._pieces: list[tuple[Exchange, Direct, bytes]] = []
        self.before = 0.0
        self.steady = 0

    def open(self) -> float:
        """When the tokens of this step came: the first call begins it."""
        now = self._now
        if now is None:
            now = self._now = self._clock()
            asyncio.get_running_loop().call_soon(self.flush)
        return now

    def add(self, exchange: Exchange, direct: Direct, data: bytes) -> None:
        """Write ``data`` soon; the step is open, and ``direct``, the exchange's, ready."""
        self._pieces.append((exchange, direct, data))

    def flush(self) -> None:
        """Write what there is, and end the step."""
        now = self._now
        if now is None:
            return
        pieces, self._pieces = self._pieces, []
        for exchange, direct, data in pieces:
            exchange.last_write = now
            try:
                direct.write(data)
            except Exception:
                # Whatever is wrong with this connection, the other pieces must be written.
                logger.exception("A piece of a stream could not be written")
        if self.steady:
            self._metrics.itl.observe(now - self.before, self.steady)
        self.before, self.steady, self._now = now, 0, None


class Passage:
    """Takes the tokens of one choice whose stream carries text alone, as it comes.

    It does for them what :meth:`Follower._advance` does for any row, with all that stays the same
    looked up before. Rows that end or fail a choice are not for it.

    Parameters
    ----------
    around
        The bytes of an event before and after the text in it.
    fail
        Called where a row cannot be taken at all. It comes in the middle of a step that concerns
        others too, and must not raise.
    """

    __slots__ = (
        "_after", "_before", "_choice", "_direct", "_exchange", "_fail", "_metrics", "_outbox",
        "_text",
    )  # fmt: skip

    def __init__(
        self,
        choice: Choice,
        around: tuple[bytes, bytes],
        exchange: Exchange,
        direct: Direct,
        outbox: Outbox,
        metrics: Metrics,
        fail: Callable[[Exception], None],
    ) -> None:
        self._choice = choice
        self._before, self._after = around
        self._exchange = exchange
        self._direct = direct
        self._outbox = outbox
        self._metrics = metrics
        self._text = choice.text
        self._fail = fail

    def take_token(self, token: int) -> bool:
        """Take the next token of the choice; returns whether it was taken: not where the stream
        has to wait, for its client or because it is to fail.
        """
        return self.take((token,))

    def take(self, tokens: Sequence[int]) -> bool:
        """As :meth:`take_token`, for as many as there are."""
        if not self._direct.ready:
            return False
        outbox, choice = self._outbox, self._choice
        now = outbox.open()
        count = len(tokens)
        self._metrics.generated_tokens += count
        if choice.last_time == outbox.before and count == 1:
            outbox.steady += 1
        else:
            self._metrics.next_tokens(now - choice.last_time, count)
        choice.last_time = now
        try:
            text = self._text.pass_on(tokens)
        except Exception as error:
            self._fail(error)
            return False
        if text:
            outbox.add(self._exchange, self._direct, self._before + encode(text) + self._after)
        return True
