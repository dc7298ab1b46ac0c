"""Anything may happen to the core, in any order, and its promises hold.

Hypothesis invents a machine (pool, limits, policies) and a history: arrivals, steps, cancels,
failing rows, deadlines, a cache that is dropped, an engine that dies and gets everything again. The
:class:`~core.driver.Driver` checks at every step what can be checked there (``audit()``, nobody
reads or writes another's pages, the oldest progresses, budgets and slots hold, a plan can be
executed twice); here is what must be true of whole lives, and at the end when all is done.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from budget import examples
from core.driver import Driver, make_scheduler, solo, tenants_of
from core.test_random_load import draft_some
from turnstile.core.admission import AdmissionPolicy, ExpectedAdmission, NeverFitsError
from turnstile.core.plan import Outcome
from turnstile.core.request import DuplicateRequestError, FinishReason, Request, Sequence
from turnstile.core.scheduler import Scheduler

NEVER_STOPS = 99
STEMS = ([], [1] * 4, [1] * 9, [2, 3] * 5, [1] * 4 + [5] * 8, [4] * 24)

machines = st.fixed_dictionaries(
    {
        "pages": st.integers(4, 20),
        "page_size": st.sampled_from([1, 2, 4]),
        "queue": st.sampled_from(["fair", "fair", "fcfs", "priority"]),
        "prefix_caching": st.sampled_from([True, True, False]),
        "max_num_seqs": st.sampled_from([1, 2, 4, 8, 9]),
        "max_num_batched_tokens": st.sampled_from([2, 4, 9, 10, 16, 40]),
        "max_model_len": st.sampled_from([16, 200, 200]),
        "chunked_prefill": st.booleans(),
        "target_itl": st.sampled_from([None, 0.001]),
        "min_chunk": st.sampled_from([1, 4]),
        "max_skips": st.sampled_from([0, 1, 16]),
        "reserved_slots": st.sampled_from([0, 1]),
        "pin_after": st.sampled_from([0, 1, 3]),
    }
)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, ...]:
    rest = draw(st.lists(st.integers(0, 2), min_size=1, max_size=12))
    return (*draw(st.sampled_from(STEMS)), *rest)


wishes = st.fixed_dictionaries(
    {
        "prompt": prompts(),
        "max_tokens": st.integers(1, 16) | st.integers(1, 60),
        "n": st.sampled_from([1, 1, 1, 2, 3]),
        "tenant": st.sampled_from("abc"),
        "weight": st.sampled_from([1.0, 1.0, 2.5]),
        "priority": st.integers(-1, 1),
        "stop_ids": st.sets(st.integers(0, 49), max_size=12).map(frozenset),
        "min_tokens": st.sampled_from([0, 0, 3]),
        "salt": st.sampled_from([b"", b"", b"", b"x"]),
        "read_cache": st.sampled_from([True, True, True, False]),
    }
)
patience = st.none() | st.integers(0, 12)


def random_wish(rng: random.Random) -> dict[str, object]:
    """The same, by the handful: what fills a machine quickly."""
    return {
        "prompt": (*rng.choice(STEMS), *rng.choices(range(3), k=rng.randint(1, 12))),
        "max_tokens": rng.randint(1, rng.choice([4, 16, 50])),
        "n": rng.choice([1, 1, 1, 2, 3]),
        "tenant": rng.choice("abc"),
        "weight": rng.choice([1.0, 2.5]),
        "priority": rng.randint(-1, 1),
        "stop_ids": frozenset(rng.sample(range(50), rng.choice([0, 1, 8]))),
        "min_tokens": rng.choice([0, 0, 3]),
        "salt": rng.choice([b"", b"", b"x"]),
        "read_cache": rng.random() < 0.9,
    }


def expect_short_answers(admission: AdmissionPolicy) -> None:
    """Let it believe that outputs have one token: it will be wrong, and somebody must go."""
    for tenant in "abc":
        for _ in range(60):
            admission.learn(tenant, 1)


class Core(RuleBasedStateMachine):
    """A scheduler, what was asked of it, and what was done to it."""

    admission = "expected"
    speculation = False

    @initialize(machine=machines, seed=st.integers(0, 2**16))
    def build(self, machine: dict[str, object], seed: int) -> None:
        budget, slots = machine["max_num_batched_tokens"], machine["max_num_seqs"]
        self.machine = machine | {"max_num_batched_tokens": max(budget, slots)}  # type: ignore[type-var]
        self.rng = random.Random(seed)
        self.requests: dict[str, Request] = {}
        self.cancelled: set[tuple[str, int]] = set()
        self.broken: set[str] = set()
        self.driver = Driver(self.fresh_scheduler())
        self.driver.break_row = lambda chunk: chunk.sequence.request.id in self.broken
        if self.speculation:
            self.driver.before_plan = lambda driver: draft_some(driver, self.rng)

    def fresh_scheduler(self) -> Scheduler:
        admission: str | AdmissionPolicy = self.admission
        if admission == "expected":
            admission = ExpectedAdmission()
            if self.rng.random() < 0.7:
                expect_short_answers(admission)
        return make_scheduler(
            admission=admission, speculation=self.speculation,
            **self.machine,  # type: ignore[arg-type]
        )  # fmt: skip

    # -- what may happen --------------------------------------------------------------------------

    @rule(wish=wishes, patience=patience)
    def submit(self, wish: dict[str, object], patience: int | None) -> None:
        deadline = None if patience is None else self.driver.now + patience
        self.ask(wish, deadline=deadline)

    @rule(wish=wishes, copies=st.integers(2, 5), start=st.booleans())
    def submit_many_with_one_prefix(
        self, wish: dict[str, object], copies: int, start: bool
    ) -> None:
        for k in range(copies):
            self.ask(wish | {"prompt": (*wish["prompt"], k)})  # type: ignore[misc]
        if start:
            self.driver.step()

    @rule(count=st.integers(2, 8))
    def submit_a_crowd(self, count: int) -> None:
        for _ in range(count):
            self.ask(random_wish(self.rng))
            self.driver.step()
        if self.admission == "guaranteed":
            self.look_into_the_worst_future()

    @rule(wish=wishes, outputs=st.booleans())
    def score(self, wish: dict[str, object], outputs: bool) -> None:
        self.ask(wish | {"score_prompt": True} | ({} if outputs else {"max_tokens": 0}))

    def ask(self, wish: dict[str, object], deadline: float | None = None) -> None:
        if self.rng.random() < 0.9:
            wish = self.cut_to_fit(wish)
        request = Request(
            id=f"r{len(self.requests)}", arrival=self.driver.now, deadline=deadline,
            **wish,  # type: ignore[arg-type]
        )  # fmt: skip
        try:
            self.driver.submit(request)
        except NeverFitsError:
            assert not self.driver.scheduler.sequences(request.id)
        else:
            self.requests[request.id] = request

    def cut_to_fit(self, wish: dict[str, object]) -> dict[str, object]:
        """What fits the pool and the context, alone."""
        config, pool = self.driver.scheduler.config, self.driver.scheduler.pool
        room = min(config.max_model_len, pool.num_pages * pool.page_size)
        prompt: tuple[int, ...] = wish["prompt"]  # type: ignore[assignment]
        prompt = prompt[: max(1, room // 2)]
        most = (room - len(prompt)) // (wish["n"] + 1)  # type: ignore[operator]
        tokens = max(1, min(wish["max_tokens"], most)) if wish["max_tokens"] else 0  # type: ignore[call-overload]
        n = min(wish["n"], config.max_num_seqs)  # type: ignore[call-overload]
        return wish | {"prompt": prompt, "max_tokens": tokens, "n": n}

    @rule(count=st.integers(1, 6), seconds=st.sampled_from([0.0, 0.5, 1.0]))
    def steps(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self.driver.step(seconds)

    @precondition(lambda self: self.alive())
    @rule(place=st.integers(0, 99))
    def cancel_request(self, place: int) -> None:
        name, _ = self.pick(place)
        self.cancelled |= {key for key in self.unfinished() if key[0] == name}
        self.driver.cancel(name)
        assert not self.driver.scheduler.sequences(name)

    @precondition(lambda self: any(s.fork_width == 1 for s in self.alive()))
    @rule(place=st.integers(0, 99))
    def cancel_sample(self, place: int) -> None:
        name, index = self.pick(place, forked=True)
        self.cancelled.add((name, index))
        self.driver.cancel(name, index)
        assert (name, index) in self.driver.finished

    @precondition(lambda self: self.alive())
    @rule(place=st.integers(0, 99))
    def break_a_row(self, place: int) -> None:
        self.broken.add(self.pick(place)[0])

    @precondition(lambda self: self.alive())
    @rule(place=st.integers(0, 99))
    def use_an_id_twice(self, place: int) -> None:
        name, index = self.pick(place)
        before = (self.driver.scheduler.num_waiting, self.driver.scheduler.waiting_tokens)
        again = Request(id=name, prompt=(1,), max_tokens=1)
        with pytest.raises(DuplicateRequestError):
            self.driver.scheduler.submit(again, sample_index=index, now=self.driver.now)
        after = (self.driver.scheduler.num_waiting, self.driver.scheduler.waiting_tokens)
        assert after == before

    @precondition(lambda self: self.admission == "guaranteed")
    @rule()
    def look_into_the_worst_future(self) -> None:
        """Nobody comes, nobody leaves early, everybody takes all it asked for: still nobody has
        to go.
        """
        future = copy.deepcopy(self.driver.scheduler)
        del future.entrance._still_blocked  # it looks at the scheduler of the present
        preemptions = future.statistics.preemptions
        now = self.driver.now
        while future.has_work:
            plan = future.plan(now)
            future.take_ended()
            endless = [Outcome((NEVER_STOPS,) * chunk.samples) for chunk in plan.chunks]
            future.commit(plan, endless, now)
        assert future.statistics.preemptions == preemptions

    @rule()
    def drop_the_cache(self) -> None:
        self.driver.scheduler.cache.clear()

    @rule()
    def die_and_submit_everything_again(self) -> None:
        """The engine is new and empty; the journal has the outputs and the charges."""
        driver, old = self.driver, self.driver.scheduler
        journal = sorted(self.alive(), key=lambda s: s.arrival_order)
        counters = old.queue.counters()
        for ended in old.take_ended():
            driver.finished[ended.sequence.request.id, ended.sequence.index] = ended.finish  # type: ignore[assignment]
        driver.install(self.fresh_scheduler())
        for lost in journal:
            request = lost.request
            if lost.fork_width == 1:
                request = replace(request, n=1, score_prompt=lost.request.score_prompt
                                  and not lost.outputs)  # fmt: skip
            driver.submit(
                request, outputs=lost.outputs, sample_index=lost.index, charged=lost.charged,
                served=counters.get(request.tenant),
            )  # fmt: skip
        assert driver.scheduler.queue.counters() == pytest.approx(counters)

    # -- what must be so --------------------------------------------------------------------------

    @invariant()
    def books_balance(self) -> None:
        scheduler = self.driver.scheduler
        scheduler.audit()
        alive = self.alive()
        assert sorted(map(id, alive)) == sorted(map(id, (*scheduler.running, *scheduler.waiting())))
        assert sum(scheduler.waiting_by_reason.values()) == scheduler.num_waiting
        for tenant in tenants_of(scheduler):
            mine = [s for s in alive if s.request.tenant == tenant.name]
            assert tenant.alive == len(mine)
            assert tenant.running == sum(s in scheduler.running for s in mine)

    @invariant()
    def nobody_is_preempted_where_that_was_promised(self) -> None:
        scheduler = self.driver.scheduler
        if not (self.admission == "guaranteed" or not scheduler.admission.preempts):
            return
        assert scheduler.statistics.preemptions == 0
        if self.admission == "guaranteed":
            assert all(error in (None, "broken") for error in self.driver.errors.values())

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        if self.admission == "guaranteed":
            self.look_into_the_worst_future()
        self.driver.run()
        self.books_balance()
        self.nobody_is_preempted_where_that_was_promised()
        for name, request in self.requests.items():
            for index in range(request.n):
                self.check_answer(request, (name, index))

    def check_answer(self, request: Request, key: tuple[str, int]) -> None:
        """Everybody ended, with what it gets alone, or with as much of it as its end allows."""
        reason, outputs = self.driver.finished[key], self.driver.outputs[key]
        whole = solo(request, key[1], self.driver.scheduler.config.max_model_len)
        match reason:
            case FinishReason.LENGTH | FinishReason.STOP:
                assert outputs == whole
                stopped = bool(whole) and whole[-1] in request.stop_ids
                stopped = stopped and len(whole) > request.min_tokens
                assert (reason is FinishReason.STOP) == stopped
                return
            case FinishReason.ABORT:
                assert key in self.cancelled
            case FinishReason.TIMEOUT:
                assert request.deadline is not None
                assert request.deadline <= self.driver.now
            case FinishReason.ERROR:
                known = {"broken"} if request.id in self.broken else set()
                if not self.driver.scheduler.admission.preempts:
                    known.add("The KV cache ran out of pages.")
                assert self.driver.errors[key] in known
        assert outputs == whole[: len(outputs)]

    # -- helpers ----------------------------------------------------------------------------------

    def alive(self) -> list[Sequence]:
        scheduler = self.driver.scheduler
        return [s for name in self.requests for s in scheduler.sequences(name)]

    def unfinished(self) -> Iterator[tuple[str, int]]:
        for name, request in self.requests.items():
            for index in range(request.n):
                if (name, index) not in self.driver.finished:
                    yield name, index

    def pick(self, place: int, *, forked: bool = False) -> tuple[str, int]:
        found = [s for s in self.alive() if s.fork_width == 1 or not forked]
        chosen = found[place % len(found)]
        return chosen.request.id, chosen.index


@pytest.mark.parametrize("speculation", [False, True], ids=["plain", "speculating"])
@pytest.mark.parametrize("admission", ["expected", "guaranteed", "unchecked", "optimistic"])
def test_whatever_happens_the_promises_hold(admission: str, speculation: bool) -> None:
    machine = type("Machine", (Core,), {"admission": admission, "speculation": speculation})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples(25),
            stateful_step_count=30,
            suppress_health_check=list(HealthCheck),
        ),
    )
