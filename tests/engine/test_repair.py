"""What a step breaks in the books is mended in the loop that found it, and the loop goes on."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from engine.answers import expected, generation, rows_of
from turnstile.core.admission import ExpectedAdmission
from turnstile.core.fairness import FairQueue
from turnstile.core.pages import AuditError, PagePool
from turnstile.core.plan import Plan
from turnstile.core.request import Sequence
from turnstile.core.scheduler import Scheduler, SchedulerConfig
from turnstile.engine.client import Generation
from turnstile.engine.executor import ChunkResult
from turnstile.engine.fake import FakeExecutor
from turnstile.engine.faults import Fault, FaultyExecutor, fault_prompt
from turnstile.engine.journal import Journal
from turnstile.engine.loop import MOST_REPAIRS, StepLoop
from turnstile.engine.protocol import Cancel, Snapshot, StepResult


class Machine:
    """A step loop over an executor without a model; the journal checks every row."""

    def __init__(
        self,
        executor: FakeExecutor | FaultyExecutor | None = None,
        queue: FairQueue | None = None,
    ) -> None:
        self.journal = Journal()
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.errors: dict[str, str] = {}
        self.events: list[str] = []
        self.snapshot = Snapshot()
        self.now = 0.0
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32),
            PagePool(200, 4),
            ExpectedAdmission(),
            FairQueue() if queue is None else queue,
        )
        executor = executor or FakeExecutor(1000)
        self.loop = StepLoop(self.scheduler, executor, 1, self.take, lambda: self.now)

    def submit(self, *requests: Generation) -> None:
        for request in requests:
            for command in self.journal.add(request).submits():
                self.loop.apply(command)

    def take(self, result: StepResult) -> None:
        self.snapshot = result.snapshot
        self.events += [kind for kind, _ in result.events]
        for row in rows_of(self.journal, result):
            news = self.journal.take(row)
            if news is not None:
                self.outputs.setdefault((row.request_id, row.sample_index), []).extend(news.tokens)
                if news.error:
                    self.errors[row.request_id] = news.error

    def run(self, most_steps: int = 500) -> None:
        for _ in range(most_steps):
            if not self.loop.has_work:
                assert self.snapshot.pages_held == 0
                self.scheduler.audit()
                return
            self.now += 1.0
            self.loop.step()
        raise AssertionError("the work does not end")

    def check(self, requests: list[Generation]) -> None:
        for request in requests:
            for index, tokens in enumerate(expected(request)):
                assert self.outputs[request.request_id, index] == tokens, request.request_id


def crowd() -> list[Generation]:
    return [
        generation(f"r{k}", [k + 1] * (3 + 2 * k), 12, n=1 + k % 2, tenant="ab"[k % 2])
        for k in range(7)
    ]


def test_a_step_that_breaks_the_books_costs_nobody_else_anything() -> None:
    machine = Machine(FaultyExecutor(FakeExecutor(1000)))
    machine.submit(*crowd(), generation("corrupt", fault_prompt(Fault.CORRUPT, 2), 9))
    machine.run()
    machine.check(crowd())
    assert list(machine.errors) == ["corrupt"]
    assert "left the books of the engine wrong" in machine.errors["corrupt"]
    assert len(machine.outputs["corrupt", 0]) == 2
    assert machine.snapshot.repairs == machine.events.count("Repaired") == 3


def test_a_plan_that_raises_half_way_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    requests = [generation(f"r{k}", [k + 1] * (3 + 2 * k), 24) for k in range(7)]
    machine.submit(*requests)
    take, calls = machine.scheduler.pool.append, []

    def failing(table: object) -> int:
        calls.append(table)
        if len(calls) in (1, 30, 50):
            machine.scheduler.running[-1].table.pages.append(7)
            raise RuntimeError("the pool fails, as a test told it to")
        return take(table)  # type: ignore[arg-type]

    monkeypatch.setattr(machine.scheduler.pool, "append", failing)
    machine.run()
    machine.check(requests)
    assert len(calls) > 50
    assert machine.snapshot.repairs >= 2
    assert not machine.errors


class FailingCopies(FakeExecutor):
    def copy_pages(self, copies: Seq[tuple[int, int]]) -> None:
        raise RuntimeError("no page can be copied, as a test says")


def test_who_waits_for_a_copy_that_fails_computes_it_itself() -> None:
    machine = Machine(FailingCopies(1000))
    machine.submit(*crowd())
    machine.run()
    machine.check(crowd())
    assert not machine.errors
    assert machine.scheduler.statistics.preemptions > 0


class Exchanging(FakeExecutor):
    """Gives two sequences each other's last page, once."""

    spoilt = False

    def execute(self, plan: Plan) -> list[ChunkResult]:
        if len(plan.chunks) > 3 and not self.spoilt:
            self.spoilt = True
            one, two = (chunk.sequence.table for chunk in plan.chunks[:2])
            one.pages[-1], two.pages[-1] = two.pages[-1], one.pages[-1]
            raise RuntimeError("two have each other's pages, as a test told it to")
        return super().execute(plan)


def test_of_a_step_whose_pages_are_in_doubt_the_rest_is_computed_at_once() -> None:
    executor = Exchanging(1000)
    machine = Machine(executor)
    machine.submit(*crowd())
    machine.run()
    machine.check(crowd())
    assert executor.spoilt
    assert machine.snapshot.repairs == 1
    assert 1 <= machine.scheduler.statistics.preemptions <= 3


def test_a_commit_that_breaks_off_costs_nobody_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    learn, ends = machine.scheduler.admission.learn, []

    def failing(tenant: str, outputs: int) -> None:
        ends.append(tenant)
        if len(ends) == 2:
            raise RuntimeError("this end fails, as a test told it to")
        learn(tenant, outputs)

    monkeypatch.setattr(machine.scheduler.admission, "learn", failing)
    machine.submit(*crowd())
    machine.run()
    machine.check(crowd())
    assert not machine.errors
    assert machine.snapshot.repairs == 1
    samples = sum(request.n for request in crowd())
    assert len(ends) == samples + 1, "one ends again when it has been computed again"


def test_a_page_that_leaked_is_found_when_nobody_is_alive_any_more() -> None:
    machine = Machine()
    machine.submit(*crowd())
    for _ in range(4):
        machine.loop.step()
    victim = machine.scheduler.running[0]
    leaked = victim.table.pages.pop()
    assert machine.scheduler.pool.refcount(leaked) > 0
    for request in crowd():
        machine.journal.cancel(request.request_id, None, "abort")
        machine.loop.apply(Cancel(request.request_id))
    machine.run()
    assert machine.snapshot.repairs == 1
    assert machine.scheduler.pool.num_free == machine.scheduler.pool.num_pages


def test_books_that_break_at_every_step_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()

    def failing(plan: Plan) -> list[ChunkResult]:
        machine.scheduler.pool.num_shared += 1
        raise RuntimeError("this step fails, as a test told it to")

    def fail(number: int) -> None:
        machine.submit(generation(f"r{number}", [number], 3))
        machine.loop.step()

    monkeypatch.setattr(machine.loop.executor, "execute", failing)
    for number in range(MOST_REPAIRS):
        fail(number)
    with pytest.raises(AuditError):
        fail(MOST_REPAIRS)


class Choosy(FairQueue):
    """Has no place for one kind of request."""

    def place(self, sequence: Sequence) -> tuple[float, float, int]:
        if sequence.request.tenant == "unloved":
            raise LookupError("no place for it")
        return super().place(sequence)


def test_whom_a_queue_has_no_place_for_fails_alone() -> None:
    machine = Machine(queue=Choosy())
    requests = crowd()
    machine.submit(*requests[:4])
    for _ in range(3):
        machine.now += 1.0
        machine.loop.step()
    machine.submit(generation("bad", [9] * 5, 4, tenant="unloved"))
    machine.submit(*requests[4:])
    machine.run()
    machine.check(requests)
    assert list(machine.errors) == ["bad"]
