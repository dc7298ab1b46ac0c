"""Differences of pages and slots add up to the pool itself, whatever happens between them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.driver import OptimisticAdmission, make_scheduler
from turnstile.core.pages import AuditError, PagePool, PageState, PageTable
from turnstile.core.scheduler import Scheduler
from turnstile.engine.fake import FakeExecutor
from turnstile.engine.loop import StepLoop
from turnstile.engine.params import SamplingParams
from turnstile.engine.protocol import (
    Cancel,
    Control,
    StepResult,
    Submit,
    Watch,
    decode_message,
    encode_message,
)
from turnstile.server.watch.live_map import LiveMap

STEMS = ((1,) * 9, (2, 3) * 6, (4,) * 3)


class Watched:
    """A step loop whose messages are told to a map, over the wire's encoding. The map is checked
    with every picture, at the very moment it is drawn.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.now = 0.0
        self.map = LiveMap()
        self.messages: list[StepResult] = []
        self.loop = StepLoop(scheduler, FakeExecutor(50), 1, self.hear, clock=lambda: self.now)
        self.asked = 0

    def hear(self, result: StepResult) -> None:
        heard = decode_message(encode_message(result))
        assert isinstance(heard, StepResult)
        self.messages.append(heard)
        if heard.picture is not None:
            self.map.take(heard.picture)
            self.check()

    def ask(self, prompt: tuple[int, ...], **wishes: int) -> None:
        self.asked += 1
        limit = wishes.pop("max_tokens", 8)
        params = SamplingParams(max_tokens=limit, ignore_eos=True, temperature=0.0)
        command = Submit(f"r{self.asked}", list(prompt), params, limit, seed=1, **wishes)  # type: ignore[arg-type]
        self.loop.apply(command)

    def step(self) -> None:
        self.now += 1.0
        self.loop.step()

    @property
    def pictures(self) -> int:
        return sum(message.picture is not None for message in self.messages)

    def check(self) -> None:
        """The map says what the pool and the sequences say."""
        scheduler = self.loop.scheduler
        pool = scheduler.pool
        assert list(self.map.states) == [pool.state(page) for page in range(pool.num_pages)]
        assert list(self.map.cached) == list(pool.cached_latest_first())[::-1]
        assert [(slot.who.request_id, slot.who.sample_index, slot.computed, slot.total, slot.pages)
                for slot in self.map.slots.values()] == [
            (s.request.id, s.index, s.computed, s.total, s.table.pages) for s in scheduler.running
        ]  # fmt: skip


def history(watched: Watched, rng: random.Random) -> None:
    """One thing happens."""
    what = rng.choice(["ask", "ask", "step", "step", "step", "cancel", "forget", "repair", "watch"])
    loop = watched.loop
    if what == "ask":
        prompt = (*rng.choice(STEMS), *rng.choices(range(3), k=rng.randint(1, 9)))
        watched.ask(prompt, max_tokens=rng.randint(1, 30), n=rng.choice([1, 1, 3]))
    elif what == "cancel" and watched.asked:
        loop.apply(Cancel(f"r{rng.randint(1, watched.asked)}"))
    elif what == "forget":
        loop.apply(Control("reset_prefix_cache"))
    elif what == "watch":
        loop.apply(Watch(rng.choice([0.0, 0.0, 3.0])))
    elif what == "repair" and rng.random() < 0.3:
        running = loop.scheduler.running
        if running:
            running[0].table.pages.reverse()
        loop.scheduler.repair(watched.now)
    watched.step()


@given(seed=st.integers(0, 2**32), pages=st.integers(8, 24), optimistic=st.booleans())
@settings(max_examples=40, deadline=None)
def test_differences_add_up_to_the_pool(seed: int, pages: int, optimistic: bool) -> None:
    rng = random.Random(seed)
    admission = OptimisticAdmission() if optimistic else "expected"
    watched = Watched(make_scheduler(pages=pages, admission=admission, max_model_len=pages * 4))
    watched.loop.apply(Watch(0.0))
    for _ in range(rng.randint(1, 60)):
        history(watched, rng)
    while watched.loop.has_work:
        watched.step()
    watched.check()
    assert watched.map.count(PageState.HELD) + watched.map.count(PageState.SHARED) == 0


def test_nobody_watches_and_nothing_is_noted() -> None:
    watched = Watched(make_scheduler())
    watched.ask((1, 2, 3))
    watched.step()
    assert watched.loop.scheduler.pool.changes is None
    assert watched.pictures == 0
    watched.loop.apply(Watch(0.0))
    watched.step()
    assert watched.loop.scheduler.pool.changes is not None
    watched.loop.apply(Watch(None))
    watched.step()
    assert watched.loop.scheduler.pool.changes is None
    assert watched.pictures == 1


def test_pictures_come_no_oftener_than_asked_and_one_at_rest() -> None:
    watched = Watched(make_scheduler())
    watched.ask((1, 2, 3), max_tokens=25)
    watched.loop.apply(Watch(10.0))
    steps = 0
    while watched.loop.has_work:
        watched.step()
        steps += 1
    assert steps > 20
    assert watched.pictures == 1 + (steps - 1) // 10 + 1
    watched.check()


def test_an_idle_engine_is_drawn_at_once() -> None:
    watched = Watched(make_scheduler(pages=12))
    watched.loop.apply(Watch(60.0))
    assert watched.loop.has_work
    watched.step()
    assert list(watched.map.states) == [PageState.FREE] * 12
    assert not watched.loop.has_work


def test_books_that_cannot_be_drawn_end_the_watching_and_nothing_else(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(make_scheduler())
    watched.ask((1, 2, 3), max_tokens=6)
    watched.loop.apply(Watch(0.0))
    watched.step()

    def broken(page: int) -> PageState:
        raise AuditError(f"Page {page} is in no state.")

    monkeypatch.setattr(watched.loop.scheduler.pool, "state", broken)
    monkeypatch.setattr(watched, "check", lambda: None)
    while watched.loop.has_work:
        watched.step()
    assert "cannot be drawn" in caplog.text
    assert watched.messages[-1].rows[0].finish == "length"


def test_a_page_says_which_state_it_is_in() -> None:
    pool = PagePool(3, 4)
    first, second = PageTable(), PageTable()
    page = pool.append(first)
    seen = [pool.state(page)]
    pool.publish(page)
    seen.append(pool.state(page))
    pool.hold(second, [page])
    seen.append(pool.state(page))
    pool.clear(first)
    seen.append(pool.state(page))
    pool.clear(second)
    seen.append(pool.state(page))
    pool.drop_cached()
    seen.append(pool.state(page))
    assert seen == [
        PageState.HELD,
        PageState.PUBLISHED,
        PageState.SHARED,
        PageState.PUBLISHED,
        PageState.CACHED,
        PageState.FREE,
    ]
