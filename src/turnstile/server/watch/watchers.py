"""Who watches the live map, and what is told to them all: :class:`Watchers`.

The first to come has the engine send pictures, the last to leave ends that: a map that nobody looks
at costs nothing. A picture is added to the map once and encoded once for each kind of viewer.
Nothing is kept for a browser that does not read: when it reads again it is sent the whole map as it
is then.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from turnstile.engine.protocol import Picture, StepResult
from turnstile.server.errors import ApiError
from turnstile.server.http import sse
from turnstile.server.watch.live_map import LiveMap
from turnstile.server.watch.live_state import LATELY, LastMinute, server_state
from turnstile.server.watch.live_steps import StepTape
from turnstile.server.watch.live_view import Viewer

if TYPE_CHECKING:
    from turnstile.server.service import Service

INTERVAL = 0.2
"""Least seconds between two pictures."""
BEAT = 1.0
"""Seconds between two looks at everything that is no page."""
SHARE = 0.01
"""Of the event loop's time that may go into those looks: a long line takes milliseconds."""
MOST_WATCHERS = 16
MOST_TENANTS_WATCHERS = 8
"""How many of those may belong to tenants that are not administrators; one tenant may have half of
these. So an administrator who has to find out what is wrong finds a place.
"""
MOST_KNOWN = 1024

logger = logging.getLogger("turnstile.server")


class Watchers:
    """Everybody who watches, and the map they see.

    Attributes
    ----------
    version
        Counts what has been published.
    closed
        The server ends, and so does every watch.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self.version = 0
        self.beat = 0
        self.closed = False
        self._viewers: Counter[Viewer] = Counter()
        self._map = LiveMap()
        self._epoch = 0
        self._lost = False
        self._drawn = False
        """The map has had a whole picture to begin with."""
        self._picture: Picture | None = None
        """What the newest version changed; None where it changed all."""
        self._known: dict[str, tuple[str, str]] = {}
        """Those asked for lately, by engine request id."""
        self._encoded: dict[tuple[Viewer, str], bytes] = {}
        self._news = asyncio.Event()
        self._spent = 0.0
        """Seconds since the last beat that went into what is no page."""
        self._unsubscribe: Callable[[], None] | None = None
        self._beating: asyncio.Task[None] | None = None
        self._tape = StepTape(self._who)
        self._minute = LastMinute(service.metrics)

    # -- coming and going ---------------------------------------------------------------------

    def __len__(self) -> int:
        return self._viewers.total()

    def enter(self, viewer: Viewer) -> None:
        """Somebody begins to watch. Raises :class:`ApiError` 503 where too many do."""
        limited = sum(many for other, many in self._viewers.items() if other.tenant is not None)
        full = len(self) >= MOST_WATCHERS
        if viewer.tenant is not None:
            full |= limited >= MOST_TENANTS_WATCHERS
            full |= self._viewers[viewer] >= MOST_TENANTS_WATCHERS // 2
        if full:
            raise ApiError(
                503,
                f"Too many watch the live map: at most {MOST_WATCHERS} at once, of whom "
                f"{MOST_TENANTS_WATCHERS} without an admin key, {MOST_TENANTS_WATCHERS // 2} of "
                "one tenant. Close one, or try again later.",
                code="too_many_watchers",
                retry_after=5.0,
            )
        self._viewers[viewer] += 1
        if self._unsubscribe is None:
            self._open()

    def leave(self, viewer: Viewer) -> None:
        """And ends it."""
        self._viewers[viewer] -= 1
        self._viewers += Counter()  # forgets those of whom nobody is left
        if not self._viewers:
            self._shut()

    def close(self) -> None:
        """Let every watch end."""
        self.closed = True
        self._wake()

    def _open(self) -> None:
        service = self._service
        self._tape = StepTape(self._who)
        self._minute = LastMinute(service.metrics)
        self._minute.sample(service.clock())
        self._map.clear()
        self._unsubscribe = service.engine.subscribe(self._on_step)
        service.engine.watch(INTERVAL)
        self._beating = asyncio.get_running_loop().create_task(self._beat())

    def _shut(self) -> None:
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._service.engine.watch(None)
        if self._beating is not None:
            self._beating.cancel()
        self._unsubscribe = self._beating = self._picture = None
        self._drawn = False
        self._map.clear()
        self._known.clear()
        self._encoded.clear()

    # -- what is told -------------------------------------------------------------------------

    async def news(self) -> None:
        """Wait for something to tell."""
        await self._news.wait()

    def whole(self, viewer: Viewer) -> bytes:
        """All of the map, as a frame."""
        return self._frame(viewer, "whole")

    def change(self, viewer: Viewer) -> bytes:
        """What the newest version changed, which may be all."""
        return self._frame(viewer, "whole" if self._picture is None else "change")

    def state(self, viewer: Viewer) -> bytes:
        """All that is no page, as a frame."""
        return self._frame(viewer, "server")

    def _frame(self, viewer: Viewer, what: str) -> bytes:
        key = (viewer, what)
        if key not in self._encoded:
            self._encoded[key] = sse.frame(self._told(viewer, what))
        return self._encoded[key]

    def _told(self, viewer: Viewer, what: str) -> dict[str, object]:
        service = self._service
        if what == "server":
            began = service.clock()
            lately = self._tape.preemptions_since(began - LATELY)
            told = server_state(service, viewer, self._minute, lately)
            self._spent += service.clock() - began
            return told
        about = {"version": self.version, "epoch": self._epoch, "time": service.clock()}
        if what == "change" and self._picture is not None:
            told = viewer.change(self._map, self._picture, self._name_of)
            return told | about | self._tape.told(viewer, range(self.version, self.version + 1))
        return (
            viewer.whole(self._map, self._name_of)
            | about
            | self._tape.told(viewer, range(self.version + 1))
        )

    # -- the engine ---------------------------------------------------------------------------

    def _on_step(self, result: StepResult) -> None:
        try:
            self._hear(result)
        except Exception:
            # A fault in what is only looked at must not reach those who are served: they hear of
            # this step in the same turn.
            logger.exception("The live map cannot be kept; it is empty until somebody looks anew")
            self._service.engine.watch(None)
            self._drawn = False
            self._map.clear()
            self._publish(None)

    def _hear(self, result: StepResult) -> None:
        self._tape.version = self.version + 1
        if not result.members and not self._service.engine.healthy:
            self._lose(result.snapshot.pages_total)
        self._epoch = result.epoch
        self._tape.hear(result)
        picture = result.picture
        # One that is not whole may come before the first that is: it was on its way to those who
        # have left when somebody else came.
        if picture is not None and (picture.whole or self._drawn):
            self._drawn, self._lost = True, False
            self._map.take(picture)
            self._publish(None if picture.whole else picture)

    def _lose(self, num_pages: int) -> None:
        """The engine is gone, and with it every page. The next one begins with a whole picture.
        While there is none this may be said again.
        """
        if self._lost:
            return
        self._lost, self._drawn = True, False
        self._map.clear(num_pages)
        self._tape.engine_lost(self._service.clock())
        self._publish(None)
        self._tape.version = self.version + 1

    def _publish(self, picture: Picture | None) -> None:
        self.version += 1
        self._picture = picture
        self._drop("whole", "change")
        self._wake()

    def _drop(self, *kinds: str) -> None:
        for key in [key for key in self._encoded if key[1] in kinds]:
            del self._encoded[key]

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(max(BEAT, self._spent / SHARE))
            self._spent = 0.0
            self._minute.sample(self._service.clock())
            self.beat += 1
            self._drop("server")
            self._wake()

    # -- who is who ---------------------------------------------------------------------------

    def _name_of(self, engine_id: str) -> str:
        return self._who(engine_id)[0]

    def _who(self, engine_id: str) -> tuple[str, str]:
        """The id a client knows a request by, and its tenant. Also of one that has just ended: its
        last event is heard when its answer is already complete.
        """
        trail = self._service.requests.by_engine_id(engine_id)
        if trail is None:
            return self._known.get(engine_id, ("", ""))
        if engine_id not in self._known:
            self._known[engine_id] = (trail.id, trail.tenant)
            if len(self._known) > MOST_KNOWN:
                del self._known[next(iter(self._known))]
        return trail.id, trail.tenant
