"""How many files the process may have open, which bounds the connections: :class:`OpenFiles`.

Where none is left, the event loop closes newcomers without a word, and whatever else needs a file
(a new engine, a grammar's check, the trace) fails as well. So some are kept back: who connects when
only these are left is answered 503, counted, and told to the log. The loop takes all who have
queued up in the kernel before we see the first of them, so the files kept are as many and more. In
a flood that comes faster than it is taken in, some are closed without a word all the same.
"""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable

from turnstile.engine.wording import counted

logger = logging.getLogger("turnstile.server")

MOST_FILES = 1 << 16
"""Open files that the server allows itself, where the system does and no more may be needed."""
MOST_BACKLOG = 2048
"""Connections that the kernel may hold ready for us. More have to try again, a second later."""
OWN_FILES = 64
"""Files that are not for connections. Idle, a server has some 20; a check of a grammar takes three.
"""
_SILENCE = 10.0
"""Seconds between two lines that say the same."""
_HOW = "Allow more (LimitNOFILE= of systemd, --ulimit nofile= of Docker, ulimit -n)"


class OpenFiles:
    """The limit on open files, and whom it kept out.

    Attributes
    ----------
    limit
        Most open files of the process; None where that is not known to matter.
    refused
        Connections that were turned away for it.
    """

    def __init__(
        self, limit: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit = limit
        self.refused = 0
        self._clock = clock
        self._quiet_until = 0.0
        self._untold = 0

    @property
    def backlog(self) -> int:
        """Connections that may queue up in the kernel: a part of the files, where these are few."""
        return MOST_BACKLOG if self.limit is None else min(MOST_BACKLOG, self.limit // 8)

    @property
    def for_connections(self) -> int | None:
        """Files that connections may have; None for any number."""
        if self.limit is None:
            return None
        return self.limit - min(OWN_FILES, self.limit // 8) - self.backlog

    def raise_limit(self, connections: int) -> None:
        """Raise the process's own limit as far as the system lets it, to what so many connections
        need and more: it is 1024 in many places. Only ``limit`` is set where it cannot be raised.
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = max(MOST_FILES, connections + MOST_BACKLOG + OWN_FILES)
        if hard != resource.RLIM_INFINITY:
            wanted = min(hard, wanted)
        if soft == resource.RLIM_INFINITY:
            return
        if soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        self.limit = max(soft, wanted)

    def warn_if_too_few(self, connections: int) -> None:
        """Say so if the limit is below what so many connections need."""
        room = self.for_connections
        if room is not None and connections > room:
            logger.warning(
                "The limit of %d open files leaves %d for connections, but --max-num-queued-reqs "
                "and --max-num-seqs let in %s: the rest will be answered 503. %s.",
                self.limit, room, counted(connections, "request"), _HOW,
            )  # fmt: skip

    def has_room_at(self, number: int) -> bool:
        """Whether a connection may stay whose file has this number: the lowest that was free, so
        that as many are open.
        """
        room = self.for_connections
        return room is None or number < room

    def turn_away(self) -> None:
        """Count a connection that may not stay; a line in the log says so, now and then."""
        self.refused += 1
        self._untold += 1
        now = self._clock()
        if now >= self._quiet_until:
            logger.warning(
                "Too many open files: %s turned away. Of %s files, %s may be connections. %s.",
                counted(self._untold, "connection"), self.limit, self.for_connections, _HOW,
            )  # fmt: skip
            self._quiet_until, self._untold = now + _SILENCE, 0
