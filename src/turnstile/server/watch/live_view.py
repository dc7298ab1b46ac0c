"""What of the live map is told to whom: :class:`Viewer`.

An administrator sees whose each page is. A tenant sees its own sequences, and of all others only
that there are some: which pages are free and cached, and how many slots are taken. Nobody is told
a word of a prompt or an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from turnstile.core.pages import PageState
from turnstile.engine.protocol import Occupant, Picture
from turnstile.server.watch.live_map import LiveMap

Told = dict[str, object]
NameOf = Callable[[str], str]
"""From an engine request id to the id its client knows."""
_HELD = (PageState.HELD, PageState.PUBLISHED, PageState.SHARED)


@dataclass(frozen=True, slots=True)
class Viewer:
    """Who looks: a tenant, or with None somebody who may see all."""

    tenant: str | None

    def sees(self, tenant: str) -> bool:
        """Whether what a tenant does is told in full."""
        return self.tenant is None or self.tenant == tenant

    def whole(self, live: LiveMap, name_of: NameOf) -> Told:
        """All of a map."""
        return {
            "type": "whole",
            "pages": self._digits(live, range(len(live.states))),
            "cached": list(live.cached),
            "slots": [
                {
                    **_occupant(slot.who, name_of),
                    "computed": slot.computed,
                    "total": slot.total,
                    "pages": slot.pages,
                }
                for slot in live.slots.values()
                if self.sees(slot.who.tenant)
            ],
            "taken": len(live.slots),
        }

    def change(self, live: LiveMap, picture: Picture, name_of: NameOf) -> Told:
        """What a picture changed, which ``live`` has taken already."""
        slots = live.slots
        pages = self._changed(live, picture.pages)
        return {
            "type": "change",
            "pages": [pages, self._digits(live, pages)],
            "entered": [_occupant(w, name_of) for w in picture.entered if self.sees(w.tenant)],
            "left": picture.left,
            "progress": [
                [name, slot.computed, slot.total]
                for name, slot in slots.items()
                if self.sees(slot.who.tenant)
            ],
            "tables": [table for table in picture.tables if self.sees(slots[table[0]].who.tenant)],
            "taken": len(slots),
        }

    def _changed(self, live: LiveMap, pages: list[int]) -> list[int]:
        """Those of the pages that look different to this viewer. What others do with the ones they
        hold shows nothing, not even that something happened.
        """
        if self.tenant is None:
            return pages
        own = live.pages_of(self.tenant) | live.released.get(self.tenant, set())
        return [
            page
            for page in pages
            if page in own or not (live.before[page] in _HELD and live.states[page] in _HELD)
        ]

    def _digits(self, live: LiveMap, pages: range | list[int]) -> str:
        """The state of each page as a digit. How others hold theirs is not told, nor with whom."""
        states = live.states
        if self.tenant is None:
            return "".join([str(states[page]) for page in pages])
        own = live.pages_of(self.tenant)
        return "".join(
            [
                str(
                    int(PageState.HELD)
                    if states[page] in _HELD and page not in own
                    else states[page]
                )
                for page in pages
            ]
        )


def _occupant(who: Occupant, name_of: NameOf) -> Told:
    return {
        "name": who.name,
        "id": name_of(who.request_id),
        "sample": who.sample_index,
        "tenant": who.tenant,
        "prompt": who.prompt_tokens,
        "most": who.max_tokens,
    }
