"""Other servers' policies, and the ones with something missing, do what their names say."""

from __future__ import annotations

import pytest

from turnstile.bench.lengths import Fixed, Uniform
from turnstile.core.admission import GuaranteedAdmission
from turnstile.core.pages import PageTable
from turnstile.lab import drive as drive_module
from turnstile.lab.continuous import ContinuousServer
from turnstile.lab.drive import drive
from turnstile.lab.load import Ask, make_asks
from turnstile.lab.model import LabModel
from turnstile.lab.parts.common import Served
from turnstile.lab.policies import (
    NO_PREEMPTION,
    ORCA,
    POLICIES,
    UNCHECKED,
    VLLM,
    Policy,
    UncountedPool,
)


def serve(model: LabModel, policy: Policy, asks: list[Ask], memory: int = 256) -> Served:
    server = ContinuousServer(
        model, policy, memory_tokens=memory, max_model_len=128, slots=16, watched=True
    )
    return Served(policy, drive(server, asks), server)


@pytest.mark.parametrize("name", [n for n, p in POLICIES.items() if p.admission().preempts])
def test_every_policy_that_can_take_back_answers_everybody(tiny: LabModel, name: str) -> None:
    asks = make_asks(Uniform(4, 30), Uniform(4, 60), 14, tiny.vocab_size, max_tokens=80)
    outcome = serve(tiny, POLICIES[name], asks)
    assert len(outcome.run.complete) == len(asks)
    assert outcome.server.pool.num_held == 0


def test_orca_reserves_the_longest_sequence_in_one_piece(tiny: LabModel) -> None:
    asks = make_asks(Fixed(4), Fixed(4), 6, tiny.vocab_size)
    outcome = serve(tiny, ORCA, asks, memory=3 * 128)
    run, pool = outcome.run, outcome.server.pool
    assert (pool.num_pages, pool.page_size) == (3, 128)
    assert run.peak_sequences == 3
    assert run.steps[0].reserved == 3 * 128


def test_vllm_lets_in_what_fits_now_and_throws_out_the_newest(tiny: LabModel) -> None:
    asks = make_asks(Fixed(15), Fixed(40), 6, tiny.vocab_size)
    run = serve(tiny, VLLM, asks, memory=10 * 16).run
    assert run.steps[0].sequences == 6, "every prompt is one page of ten"
    assert run.preemptions > 0
    assert run.answers["r0"].longest_gap == 1, "the oldest is never thrown out"
    assert run.answers["r5"].longest_gap > 1


@pytest.mark.parametrize("policy", [UNCHECKED, NO_PREEMPTION])
def test_without_a_way_back_somebody_dies_in_the_middle(tiny: LabModel, policy: Policy) -> None:
    asks = make_asks(Fixed(15), Fixed(40), 6, tiny.vocab_size)
    run = serve(tiny, policy, asks, memory=10 * 16).run
    assert run.dead
    assert all(0 < len(a.tokens) < 40 and "ran out of pages" in a.error for a in run.dead)


def test_without_counts_the_first_to_leave_gives_a_shared_page_away() -> None:
    pool = UncountedPool(4, 16)
    first, second, third = PageTable(), PageTable(), PageTable()
    shared = pool.append(first)
    pool.hold(second, [shared])
    pool.clear(first)
    assert second.pages == [shared], "still read"
    assert pool.append(third) == shared, "and given away"
    assert pool.stolen == 1
    pool.clear(second)
    assert pool.refcount(shared) == 1, "a reader from before takes nothing from the new owner"
    pool.clear(third)
    assert pool.num_free == 4


def test_an_answer_ends_where_it_was_to_end_whatever_the_client_allows(tiny: LabModel) -> None:
    short, long = Ask("short", (5, 6, 7), 6, 100), Ask("long", (5, 6, 7), 9, 9)
    run = serve(tiny, VLLM, [short, long], memory=512).run
    assert run.answers["short"].finish == "stop"
    assert run.tokens()["short"] == run.tokens()["long"][:6]


def test_a_policy_that_lets_nobody_in_is_told_from_one_that_is_slow(
    tiny: LabModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closed(GuaranteedAdmission):
        def fits(self, *arguments: object, **named: object) -> bool:
            return False

    monkeypatch.setattr(drive_module, "_PATIENCE", 50)
    shut = POLICIES["turnstile"].but("shut", "lets nobody in", admission=Closed)
    # More than the memory holds, or admission would not be asked.
    asks = make_asks(Fixed(15), Fixed(40), 6, tiny.vocab_size)
    with pytest.raises(drive_module.StuckError):
        serve(tiny, shut, asks, memory=4 * 16)
