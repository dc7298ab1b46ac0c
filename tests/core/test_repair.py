"""Books that do not balance: the audit sees it, the repair mends it, and nobody's answer changes.

Every book is spoilt in every way that somebody thought of, between two steps and in the middle of
one, and commits break off at every call they make; the model of :mod:`core.driver` notices whoever
reads a page that is not its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.driver import Driver, make_scheduler, solo, tenants_of
from turnstile.core.commit import CommitError
from turnstile.core.events import Repaired, WaitReason
from turnstile.core.fairness import Lane
from turnstile.core.pages import AuditError
from turnstile.core.plan import Outcome, Plan, Progress
from turnstile.core.request import FinishReason, Request, Sequence, State
from turnstile.core.scheduler import MOST_MISTAKES, Scheduler

Spoil = Callable[[Scheduler, random.Random], object]


def held(scheduler: Scheduler, draw: random.Random) -> Sequence:
    return draw.choice([s for s in scheduler.running if s.table.pages])


def some_page(scheduler: Scheduler, draw: random.Random) -> int:
    return draw.randrange(scheduler.pool.num_pages)


def lose_a_page(scheduler: Scheduler, draw: random.Random) -> None:
    pages = held(scheduler, draw).table.pages
    del pages[draw.randrange(len(pages))]


def gain_a_page(scheduler: Scheduler, draw: random.Random) -> None:
    held(scheduler, draw).table.pages.append(some_page(scheduler, draw))


def mistake_a_page(scheduler: Scheduler, draw: random.Random) -> None:
    pages = held(scheduler, draw).table.pages
    place = draw.randrange(len(pages))
    others = [page for page in range(scheduler.pool.num_pages) if page != pages[place]]
    pages[place] = draw.choice([*others, 10**6, -1])


def exchange_pages(scheduler: Scheduler, draw: random.Random) -> None:
    """Two who run get each other's last page."""
    one, two = draw.sample([s for s in scheduler.running if s.table.private], 2)
    one.table.pages[-1], two.table.pages[-1] = two.table.pages[-1], one.table.pages[-1]


def miscount_holders(scheduler: Scheduler, draw: random.Random) -> None:
    scheduler.pool._refcount[some_page(scheduler, draw)] += draw.choice([-1, 1, 2])


def give_to_another(scheduler: Scheduler, draw: random.Random) -> None:
    page = draw.choice(held(scheduler, draw).table.pages)
    owner = scheduler.pool._owner[page]
    others = [s.table for s in scheduler.running if s.table is not owner]
    scheduler.pool._owner[page] = draw.choice([*others, None if owner else others[0]])


def free_twice(scheduler: Scheduler, draw: random.Random) -> None:
    scheduler.pool._free.append(some_page(scheduler, draw))


def break_the_ring(scheduler: Scheduler, draw: random.Random) -> None:
    link = draw.choice([scheduler.pool._next, scheduler.pool._previous])
    link[scheduler.pool.num_pages] = some_page(scheduler, draw)


def flip(field: str) -> Spoil:
    def spoil(scheduler: Scheduler, draw: random.Random) -> None:
        marks = getattr(scheduler.pool, field)
        # A mark that is wrong only where the page is in use, or only where it is not, is not seen.
        page = draw.choice(scheduler.pool._free)
        marks[page] ^= 1

    return spoil


def move_a_key(scheduler: Scheduler, draw: random.Random) -> None:
    known = scheduler.cache._page_of
    key = draw.choice(list(known))
    known[key] = (known[key] + draw.randrange(1, 9)) % scheduler.pool.num_pages


def forget_a_key(scheduler: Scheduler, draw: random.Random) -> None:
    del scheduler.cache._key_of[draw.choice(list(scheduler.cache._key_of))]


def promise_a_page(scheduler: Scheduler, draw: random.Random) -> None:
    scheduler.cache._writer_of[b"nothing"] = held(scheduler, draw)


def wait_for_nobody(scheduler: Scheduler, draw: random.Random) -> None:
    scheduler.cache._waiters[b"nothing"] = [held(scheduler, draw)]


def park_who_runs(scheduler: Scheduler, draw: random.Random) -> None:
    scheduler.books.waiting.parked.add(held(scheduler, draw))


def miscount_those_waiting(scheduler: Scheduler, draw: random.Random) -> None:
    scheduler.books.waiting._reasons[draw.choice(list(WaitReason))] += 1


def take_a_slot_away(scheduler: Scheduler, draw: random.Random) -> None:
    del scheduler.running[draw.randrange(len(scheduler.running))]


def give_two_slots(scheduler: Scheduler, draw: random.Random) -> None:
    scheduler.running.append(draw.choice(scheduler.running))


def run_who_waits(scheduler: Scheduler, draw: random.Random) -> None:
    scheduler.running.append(next(scheduler.waiting()))


def lose_who_waits(scheduler: Scheduler, draw: random.Random) -> None:
    scheduler.queue.remove(next(iter(scheduler.queue)))


def queue_who_runs(scheduler: Scheduler, draw: random.Random) -> None:
    scheduler.queue.push(held(scheduler, draw))


def lose_a_lane(scheduler: Scheduler, draw: random.Random) -> None:
    tenant = next(t for t in tenants_of(scheduler) if len(t.lane))
    tenant.lane = Lane()


def miscount_a_tenant(scheduler: Scheduler, draw: random.Random) -> None:
    tenant = draw.choice(tenants_of(scheduler))
    setattr(tenant, draw.choice(["alive", "running"]), 7)


def shift(place: Callable[[Scheduler], object], field: str) -> Spoil:
    def spoil(scheduler: Scheduler, draw: random.Random) -> None:
        holder = place(scheduler)
        setattr(holder, field, getattr(holder, field) + draw.choice([-1, 1]))

    return spoil


SPOILS: dict[str, Spoil] = {
    spoil.__name__: spoil
    for spoil in (
        lose_a_page, gain_a_page, mistake_a_page, exchange_pages, miscount_holders,
        give_to_another, free_twice, break_the_ring, move_a_key, forget_a_key, promise_a_page,
        wait_for_nobody, park_who_runs, miscount_those_waiting, take_a_slot_away, give_two_slots,
        run_who_waits, lose_who_waits, queue_who_runs, lose_a_lane, miscount_a_tenant,
    )
} | {
    "forget a free page": lambda scheduler, draw: scheduler.pool._free.pop(),
    "publish a free page": flip("_published"),
    "share a free page": flip("_shared"),
    "num_entries": shift(lambda scheduler: scheduler.pool, "num_entries"),
    "num_shared": shift(lambda scheduler: scheduler.pool, "num_shared"),
    "num_cached": shift(lambda scheduler: scheduler.pool, "num_cached"),
    "private": shift(lambda scheduler: scheduler.running[0].table, "private"),
    "tokens": shift(lambda scheduler: scheduler.books.waiting, "tokens"),
    "most_pages": shift(lambda scheduler: scheduler.slots, "most_pages"),
    "reserved": shift(lambda scheduler: scheduler.slots, "reserved"),
}  # fmt: skip


def busy(seed: int, steps: int, **machine: object) -> tuple[Driver, list[Request]]:
    """A machine in the middle of its work: some run, some wait, some share, some pages are free."""
    draw = random.Random(seed)
    settings: dict[str, object] = {"pages": 40, "max_num_seqs": 5, **machine}
    driver = Driver(make_scheduler(**settings))  # type: ignore[arg-type]
    stems: list[tuple[int, ...]] = [(), (1,) * 9, (2, 3) * 6]
    requests = [
        Request(
            id=f"r{k}", prompt=(*draw.choice(stems), k, *draw.choices(range(3), k=6)),
            max_tokens=draw.randint(8, 20), n=draw.choice([1, 1, 2]), tenant=draw.choice("ab"),
        )
        for k in range(9)
    ]  # fmt: skip
    for request in requests:
        driver.submit(request)
    for _ in range(steps):
        driver.step()
    return driver, requests


def check_answers(driver: Driver, requests: list[Request]) -> None:
    driver.run()
    for request in requests:
        for index in range(request.n):
            assert driver.finished[request.id, index] is FinishReason.LENGTH
            assert driver.outputs[request.id, index] == solo(request, index)


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=list(SPOILS))
def test_the_audit_sees_it_and_the_repair_mends_it(spoil: Spoil) -> None:
    for seed in range(3):
        driver, requests = busy(seed, steps=7)
        scheduler = driver.scheduler
        assert scheduler.running
        assert scheduler.num_waiting
        spoil(scheduler, random.Random(seed))
        with pytest.raises(AuditError):
            scheduler.audit()
        scheduler.repair(driver.now)
        scheduler.audit()
        check_answers(driver, requests)
        assert scheduler.statistics.repairs == 1
        assert [type(event) for event in driver.events].count(Repaired) == 1


@settings(max_examples=150)
@given(
    st.integers(0, 2**16),
    st.integers(0, 25),
    st.lists(st.sampled_from(sorted(SPOILS)), min_size=1, max_size=4),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["fair", "fcfs"]),
    st.sampled_from(["expected", "optimistic"]),
)
def test_whatever_is_spoilt_everybody_gets_the_answer_it_gets_alone(
    seed: int, steps: int, spoils: list[str], within: bool, caching: bool, queue: str, policy: str
) -> None:
    driver, requests = busy(
        seed, steps, pages=30, prefix_caching=caching, queue=queue, admission=policy
    )
    scheduler, draw = driver.scheduler, random.Random(seed)

    def spoil_and_repair() -> None:
        for name in spoils:
            try:
                SPOILS[name](scheduler, draw)
            except (IndexError, KeyError, ValueError, StopIteration):
                continue  # there is nothing of the kind to spoil
        scheduler.repair(driver.now)
        scheduler.audit()

    if within:
        spoil_within_a_step(driver, spoil_and_repair)
    else:
        spoil_and_repair()
    check_answers(driver, requests)


def spoil_within_a_step(driver: Driver, spoil: Callable[[], None]) -> None:
    """Between a plan, whose copies are made, and its commit; who is computed again is not run."""
    model, run = driver.model, driver.model.run

    def spoilt(plan: Plan) -> list[Outcome]:
        model.run = run  # type: ignore[method-assign]
        model.run(Plan(plan.step, (), plan.copies))
        spoil()
        return [
            model._chunk(chunk)
            if chunk.sequence.state is State.RUNNING
            else Outcome((0,) * chunk.samples)
            for chunk in plan.chunks
        ]

    model.run = spoilt  # type: ignore[method-assign]


def test_who_is_not_in_doubt_keeps_its_pages() -> None:
    driver, requests = busy(3, steps=9)
    scheduler = driver.scheduler
    unlucky = max(scheduler.running, key=lambda s: s.table.private)
    shares = [
        s for s in scheduler.running if not set(s.table.pages).isdisjoint(unlucky.table.pages)
    ]
    kept = [s for s in scheduler.running if s not in shares]
    before = [(s.computed, list(s.table.pages)) for s in kept]
    assert kept
    unlucky.table.pages[-1] = scheduler.pool._free[0]
    assert 1 <= scheduler.repair(driver.now) <= len(shares)
    assert [(s.computed, s.table.pages) for s in kept] == before
    assert unlucky.state is State.WAITING
    check_answers(driver, requests)


def test_a_page_that_lacks_a_holder_whom_nobody_knows_puts_everybody_in_doubt() -> None:
    driver, requests = busy(3, steps=9)
    scheduler = driver.scheduler
    shared = next(page for page in range(40) if scheduler.pool.refcount(page) > 1)
    loser = next(s for s in scheduler.running if shared in s.table.pages)
    loser.table.pages.remove(shared)
    running = len(scheduler.running)
    assert scheduler.repair(driver.now) == running
    check_answers(driver, requests)


def test_whose_table_is_wrong_time_and_again_fails_alone() -> None:
    driver, requests = busy(4, steps=5)
    scheduler = driver.scheduler
    name = scheduler.running[0].request.id
    for _ in range(MOST_MISTAKES):
        while not any(s.request.id == name and s.table.private for s in scheduler.running):
            driver.step()
        for sequence in scheduler.sequences(name):
            if sequence.table.private:
                sequence.table.pages.pop()
        scheduler.repair(driver.now)
    driver.run()
    for request in requests:
        for index in range(request.n):
            reason = driver.finished[request.id, index]
            assert (reason is FinishReason.ERROR) == (request.id == name)
            if request.id != name:
                assert driver.outputs[request.id, index] == solo(request, index)


class Stumbling:
    """Makes the ``at``-th call that commits make into the books raise: before it does anything, or
    when all is done.
    """

    def __init__(self, scheduler: Scheduler, at: int, late: bool) -> None:
        self.scheduler, self.at, self.late = scheduler, at, late
        self.calls = self.stumbled = 0
        self.within = False
        books = scheduler.books
        self.commit = scheduler.commit
        scheduler.commit = self.committing  # type: ignore[method-assign]
        for part in (
            books, books.pool, books.cache, books.queue, books.slots, books.alive, books.waiting,
            books.deadlines, scheduler.admission, scheduler.cost, scheduler.attendance,
        ):  # fmt: skip
            for name in dir(type(part)):
                if not name.startswith("__") and callable(method := getattr(part, name)):
                    setattr(part, name, self.tripping(method))

    def tripping(self, method: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **named: object) -> object:
            self.calls += self.within
            strikes = self.within and self.calls == self.at
            if strikes:
                self.within, self.stumbled = False, self.stumbled + 1
            if strikes and not self.late:
                raise ArithmeticError("a test made this fail")
            answer = method(*args, **named)
            if strikes:
                raise ArithmeticError("a test made this fail")
            return answer

        return call

    def committing(
        self, plan: Plan, outcomes: list[Outcome], now: float, seconds: float = 0.0
    ) -> list[Progress]:
        self.within = True
        try:
            return self.commit(plan, outcomes, now, seconds)
        except CommitError as error:
            self.scheduler.repair(now)
            return error.progress
        finally:
            self.within = False


@settings(max_examples=200)
@given(
    st.integers(0, 2**16),
    st.integers(1, 400),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["fair", "fcfs"]),
    st.sampled_from(["expected", "optimistic"]),
)
def test_wherever_a_commit_breaks_off_everybody_gets_the_answer_it_gets_alone(
    seed: int, at: int, late: bool, caching: bool, queue: str, policy: str
) -> None:
    driver, requests = busy(
        seed, 0, pages=30, prefix_caching=caching, queue=queue, admission=policy
    )
    stumbling = Stumbling(driver.scheduler, at, late)
    check_answers(driver, requests)
    assert stumbling.stumbled == driver.scheduler.statistics.repairs == (stumbling.calls >= at)


def test_what_cannot_be_committed_time_and_again_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, requests = busy(5, steps=3)
    scheduler = driver.scheduler
    name = scheduler.running[-1].request.id
    commit, append = scheduler.commit, Sequence.append

    def appending(self: Sequence, *args: object) -> object:
        if self.request.id == name:
            raise ArithmeticError("a test made this fail")
        return append(self, *args)  # type: ignore[arg-type]

    def committing(*args: object) -> list[Progress]:
        try:
            return commit(*args)  # type: ignore[arg-type]
        except CommitError as error:
            scheduler.repair(driver.now)
            return error.progress

    monkeypatch.setattr(Sequence, "append", appending)
    monkeypatch.setattr(scheduler, "commit", committing)
    driver.run()
    assert scheduler.statistics.repairs >= MOST_MISTAKES
    for request in requests:
        for index in range(request.n):
            reason = driver.finished[request.id, index]
            assert (reason is FinishReason.ERROR) == (request.id == name)
            if request.id != name:
                assert driver.outputs[request.id, index] == solo(request, index)
