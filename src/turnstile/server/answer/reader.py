"""Work on the texts of one request: :class:`Reader`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from turnstile.server.answer.parameters import context_error
from turnstile.server.errors import bad_request
from turnstile.server.model import ServedModel
from turnstile.server.tenants import Tenant
from turnstile.server.threads import Threads

T = TypeVar("T")

OFF_LOOP_CHARS = 4_096
"""Work on longer text than this happens in a thread: probes and streams must not wait for it."""
HEAVY_CHARS = 65_536
"""Longer text than this occupies a thread for so long that others would feel it."""
QUEUE_CHARS = 16 * 2**20
"""Characters before the threads: one body of the default largest size, or hundreds of prompts."""
LEAST_GIANT = 2**18
GIANT_PER_TOKEN = 16
"""The default bound on text that need not fit the context (because it is cut, or only counted):
``GIANT_PER_TOKEN`` characters for each token of the context, and at least ``LEAST_GIANT``. That
many digits, which are a token each, take 0.6 s of a processor; prose takes 0.13 s (SmolLM2).
"""


def text_threads() -> Threads:
    """The threads that tokenize and fill in templates; work is weighed in characters."""
    return Threads(
        "turnstile-text", number=2, most=QUEUE_CHARS, heavy=HEAVY_CHARS + 1, what="long texts"
    )


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads one request's texts: in its tenant's turn, and none that is too long.

    Attributes
    ----------
    model
        Whose tokenizer and context count.
    tenant
        Whose turn it takes.
    threads
        Where long texts are worked on.
    most_chars
        Most characters of text that need not fit the context (``--max-text-size``); None for the
        default.
    """

    model: ServedModel
    tenant: Tenant
    threads: Threads
    most_chars: int | None = None

    async def off_loop(self, chars: int, work: Callable[[], T]) -> T:
        """Do ``work`` on ``chars`` characters: here where they are few, else in a thread.

        Raises :class:`ApiError` 503 where too much is waiting for the threads.
        """
        if chars <= OFF_LOOP_CHARS:
            return work()
        return await self.threads.run(chars, work, self.tenant)

    def refuse_hopeless(self, num_bytes: int, where: str, output: int = 1) -> None:
        """Raise :class:`ApiError` 400 for text of ``num_bytes`` that cannot fit the context beside
        ``output`` tokens, before any time goes into it.
        """
        least = self.model.tokenizer.min_tokens(num_bytes)
        limit = self.model.max_model_len
        if not least:
            self.refuse_giant(num_bytes, where)  # this tokenizer may drop text: nobody knows
        elif least + output > limit:
            raise context_error(least, limit, output, where, at_least=True)

    def refuse_giant(self, size: int, where: str) -> None:
        """Raise :class:`ApiError` 400 for text that need not fit, because it is cut or only
        counted, and is so long that it would hold up others and take hundreds of megabytes.
        """
        most = self.most_chars
        if most is None:
            most = max(LEAST_GIANT, GIANT_PER_TOKEN * self.model.max_model_len)
        if size > most:
            raise bad_request(
                f"{where} is {size} characters long; at most {most} are taken (--max-text-size), "
                "whatever is cut off later. Send it in pieces.",
                where,
            )
