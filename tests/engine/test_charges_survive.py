"""What tenants were charged outlives the engine: nobody pays twice, nobody's debt is forgotten."""

from __future__ import annotations

import pytest

from engine.answers import expected, generation, rows_of
from turnstile.core.admission import ADMISSION_POLICIES
from turnstile.core.fairness import QUEUE_POLICIES
from turnstile.core.pages import PagePool
from turnstile.core.plan import Plan
from turnstile.core.scheduler import Scheduler, SchedulerConfig
from turnstile.engine.accounts import Accounts
from turnstile.engine.client import DuplicateRequestError, Generation
from turnstile.engine.executor import ChunkResult
from turnstile.engine.fake import FakeExecutor
from turnstile.engine.journal import Journal
from turnstile.engine.loop import StepLoop
from turnstile.engine.protocol import Cancel, Resume, Row, Snapshot, StepResult, Submit


class Death(BaseException):
    """What no loop can catch."""


class Mortal(FakeExecutor):
    """Dies in the step with number ``dies_at``."""

    dies_at: int | None = None

    def execute(self, plan: Plan) -> list[ChunkResult]:
        if self.calls == self.dies_at:
            raise Death
        return super().execute(plan)


class Machine:
    """A journal, and the step loop of the engine that runs now."""

    def __init__(self) -> None:
        self.journal = Journal()
        self.snapshot = Snapshot()
        self.accounts = Accounts()
        self.now = 0.0
        self.charged: dict[tuple[str, int], float] = {}
        self.errors: dict[str, str | None] = {}
        self.start()

    def start(self) -> None:
        scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16),
            PagePool(200, 4),
            ADMISSION_POLICIES["expected"](),
            QUEUE_POLICIES["fair"](),
        )
        self.executor = Mortal(1000)
        self.loop = StepLoop(scheduler, self.executor, 1, self.take, lambda: self.now)

    def submit(self, request: Generation) -> None:
        for command in self.journal.add(request).submits():
            self.loop.apply(command)

    def restart(self) -> None:
        self.journal.restart(self.snapshot.tenants)
        self.start()
        self.loop.apply(self.accounts.resume())
        for entry in self.journal.entries.values():
            for command in entry.submits():
                self.loop.apply(command)

    def take(self, result: StepResult) -> None:
        self.snapshot = result.snapshot
        self.accounts.hear(result.snapshot)
        for row in rows_of(self.journal, result):
            self.journal.take(row)
            self.charged[row.request_id, row.sample_index] = row.charged
            if row.error:
                self.errors[row.request_id] = row.error

    def run(self, steps: int = 10_000) -> None:
        for _ in range(steps):
            if not self.loop.has_work:
                return
            self.now += 1.0
            self.loop.step()
        assert steps < 10_000, "the work does not end"

    def counters(self) -> dict[str, float]:
        return {t: self.loop.scheduler.queue.served(t) for t in ("busy", "quiet")}


def crowd() -> list[Generation]:
    """Two tenants, of which one asks for far more; a group that forks; a long prompt."""
    return [
        generation("b0", [1] * 40, 12, tenant="busy", weight=2.0, n=2),
        generation("q0", [2] * 9, 20, tenant="quiet"),
        *[generation(f"b{k}", [3, k] * 8, 15, tenant="busy", weight=2.0) for k in range(1, 9)],
        generation("q1", [4] * 25, 20, tenant="quiet"),
    ]


def finished(dies_at: int | None) -> tuple[Machine, dict[str, float]]:
    machine = Machine()
    for request in crowd():
        machine.submit(request)
    machine.executor.dies_at = dies_at
    try:
        machine.run()
    except Death:
        before = machine.snapshot.tenants
        machine.restart()
        machine.loop.step()
        for tenant, counter in before.items():
            assert machine.counters()[tenant] >= counter, "a debt was forgotten"
        machine.run()
    return machine, machine.counters()


@pytest.mark.parametrize("dies_at", [0, 1, 3, 6, 10, 17, 25])
def test_an_engine_that_dies_changes_nobodys_bill(dies_at: int) -> None:
    whole, counters = finished(None)
    machine, after = finished(dies_at)
    assert machine.executor.dies_at is None, "the first engine did die"
    assert machine.charged == whole.charged
    assert sum(after.values()) == pytest.approx(sum(counters.values()))
    assert after == counters
    assert not machine.journal.entries


def gone_away() -> Machine:
    """One tenant has been served ten times what the other was, and has nothing left to ask."""
    machine = Machine()
    machine.submit(generation("q", [2] * 9, 100, tenant="quiet"))
    machine.submit(generation("b", [1] * 40, 20, tenant="busy", weight=0.1))
    machine.run(30)
    assert "b" not in machine.journal.entries
    assert machine.counters()["busy"] == (40 + 2 * 20) / 0.1
    assert machine.counters()["quiet"] < 80
    return machine


@pytest.mark.parametrize("dies", [False, True])
def test_a_tenant_that_has_gone_away_comes_back_with_the_counter_it_left_with(dies: bool) -> None:
    machine = gone_away()
    if dies:
        machine.restart()
    machine.submit(generation("again", [4] * 8, 5, tenant="busy", weight=0.1))
    machine.run()
    assert machine.counters()["busy"] == (40 + 2 * 20 + 8 + 2 * 5) / 0.1


@pytest.mark.parametrize("dies", [False, True])
def test_who_is_new_starts_where_the_last_one_was_even_if_nobody_is_there(dies: bool) -> None:
    machine = gone_away()
    machine.journal.cancel("q", None, "abort")
    machine.loop.apply(Cancel("q"))
    machine.run()
    level = machine.counters()["quiet"]
    if dies:
        machine.restart()
    machine.submit(generation("new", [5] * 8, 5, tenant="new"))
    machine.run()
    assert machine.loop.scheduler.queue.served("new") == level + 8 + 2 * 5


def test_accounts_are_bounded_and_the_longest_silent_is_forgotten_first() -> None:
    accounts = Accounts(limit=3)
    for k in range(9):
        accounts.hear(Snapshot(tenants={f"t{k}": float(k), "always": 10.0 + k}, tenant_level=k))
        accounts.hear(Snapshot(tenants={"always": 10.0 + k}, departed={f"t{k}": k + 0.5}))
    accounts.hear(Snapshot(tenant_level=7.0))
    assert accounts.resume() == Resume({"t7": 7.5, "t8": 8.5, "always": 18.0}, 7.0)


def test_a_prompt_is_paid_for_before_the_step_that_computes_it() -> None:
    machine = Machine()
    machine.submit(generation("r", [1] * 30, 5))
    machine.executor.dies_at = 0
    with pytest.raises(Death):
        machine.run()
    (submit,) = machine.journal.entries["r"].submits()
    assert (submit.outputs, submit.charged) == ([], 30.0)
    machine.restart()
    machine.run()
    assert machine.charged["r", 0] == 30.0 + 2.0 * 5


def test_an_id_that_is_alive_is_refused_and_only_that_request_ends() -> None:
    machine = Machine()
    request = generation("same", [1, 2, 3], 6)
    machine.submit(request)
    with pytest.raises(DuplicateRequestError, match="running already"):
        machine.submit(generation("same", [9], 3))
    # What the journal does not stop (here: because it is asked to forget) the engine does.
    machine.run(2)
    rows: list[Row] = []
    machine.loop._emit = lambda result: rows.extend(result.rows)
    machine.loop.apply(Submit("same", [9], request.params, 3, 0))
    machine.loop.apply(Submit("other", [8], request.params, 3, 0))
    machine.run()
    refused = [row for row in rows if row.error]
    assert len(refused) == 1
    assert "running already" in (refused[0].error or "")
    drawn = [token for row in rows if row.request_id == "same" for token in row.tokens]
    assert drawn == expected(request)[0][-len(drawn) :]
    assert len([row for row in rows if row.request_id == "other" and row.finish == "length"]) == 1
