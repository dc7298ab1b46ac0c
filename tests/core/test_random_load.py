"""Random load on pools of a few pages. The invariants are checked by the driver at every step."""

from __future__ import annotations

import random

import pytest

from core.driver import Driver, make_scheduler, next_token, solo
from turnstile.core.admission import NeverFitsError
from turnstile.core.request import FinishReason, Request, State


def random_request(rng: random.Random, number: int, pool_tokens: int) -> Request:
    stem = rng.choice([[], [1] * rng.choice([4, 7, 8, 13]), [2, 3] * 5])
    prompt = tuple(stem + [rng.randrange(3) for _ in range(rng.randint(1, pool_tokens // 3))])
    return Request(
        id=f"r{number}",
        prompt=prompt,
        max_tokens=rng.randint(1, max(1, pool_tokens // 3)),
        n=rng.choice([1, 1, 1, 2, 3, 4]),
        tenant=rng.choice("abc"),
        weight=1.0,
        priority=rng.choice([0, 0, 1]),
        arrival=float(number),
        stop_ids=frozenset(rng.sample(range(50), rng.choice([0, 1, 4]))),
        min_tokens=rng.choice([0, 0, 2]),
        salt=rng.choice([b"", b"", b"x"]),
        read_cache=rng.random() < 0.9,
    )


def draft_some(driver: Driver, rng: random.Random) -> None:
    for sequence in driver.scheduler.running:
        if sequence.decoding and rng.random() < 0.5:
            tokens, drafts = list(sequence.tokens), []
            for _ in range(rng.randint(1, 3)):
                drafts.append(next_token(sequence.index, tokens))
                if rng.random() < 0.3:
                    drafts[-1] = (drafts[-1] + 1) % 50
                tokens.append(drafts[-1])
            sequence.drafts = tuple(drafts)


def load(
    seed: int, admission: str, *, speculation: bool, caching: bool = True, queue: str = "fair"
) -> Driver:
    rng = random.Random(seed)
    pages, page_size = rng.randint(6, 24), rng.choice([1, 2, 4])
    driver = Driver(
        make_scheduler(
            pages=pages,
            page_size=page_size,
            admission=admission,
            queue=queue,
            prefix_caching=caching,
            max_num_seqs=rng.choice([4, 8, 9]),
            max_num_batched_tokens=rng.choice([9, 16, 40]),
            max_skips=rng.choice([0, 2, 16]),
            reserved_slots=rng.choice([0, 1]),
            speculation=speculation,
        )
    )
    if speculation:
        driver.before_plan = lambda d: draft_some(d, rng)
    requests: dict[str, Request] = {}
    cancelled: set[tuple[str, int]] = set()
    for number in range(rng.randint(10, 60)):
        request = random_request(rng, number, pages * page_size)
        try:
            driver.submit(request)
            requests[request.id] = request
        except NeverFitsError:
            continue
        for _ in range(rng.choice([0, 0, 1, 3])):
            driver.step()
        if requests and rng.random() < 0.1:
            request = rng.choice(list(requests.values()))
            cancelled |= {(request.id, i) for i in range(request.n)} - set(driver.finished)
            driver.cancel(request.id)
    driver.run()
    for key, reason in driver.finished.items():
        expected = solo(requests[key[0]], key[1], driver.scheduler.config.max_model_len)
        if reason is FinishReason.ABORT:
            assert key in cancelled
            expected = expected[: len(driver.outputs[key])]
        assert driver.outputs[key] == expected, key
    whole = [r for r in requests.values() if not any(k[0] == r.id for k in cancelled)]
    assert all((r.id, i) in driver.finished for r in whole for i in range(r.n))
    return driver


@pytest.mark.parametrize("admission", ["expected", "guaranteed", "optimistic"])
@pytest.mark.parametrize("speculation", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_everyone_gets_their_solo_answer_and_nothing_leaks(
    admission: str, speculation: bool, caching: bool
) -> None:
    preemptions = hits = forks = 0
    for seed in range(20):
        driver = load(seed, admission, speculation=speculation, caching=caching)
        preemptions += driver.scheduler.statistics.preemptions
        hits += driver.scheduler.cache.hits
        forks += any(plan.copies for plan in driver.plans)
        if admission == "guaranteed":
            assert driver.scheduler.statistics.preemptions == 0, seed
            assert not any(s == FinishReason.ERROR for s in driver.finished.values())
    assert forks
    assert (hits > 0) == caching
    assert admission != "optimistic" or preemptions > 50


@pytest.mark.parametrize("queue", ["fcfs", "priority"])
def test_the_other_queue_policies_lose_nothing_either(queue: str) -> None:
    for seed in range(20):
        load(seed, "optimistic", speculation=False, queue=queue)


def test_a_failing_row_ends_alone() -> None:
    driver = Driver(make_scheduler(pages=12))
    driver.break_row = lambda chunk: chunk.sequence.request.id == "bad"
    bad = Request(id="bad", prompt=(1,) * 9, max_tokens=5)
    good = [Request(id=f"g{i}", prompt=(1,) * 9, max_tokens=9) for i in range(5)]
    driver.submit(bad)
    for request in good:
        driver.submit(request)
    driver.run()
    assert driver.finished["bad", 0] is FinishReason.ERROR
    assert driver.errors["bad", 0] == "broken"
    for request in good:
        assert driver.outputs[request.id, 0] == solo(request)


def test_a_deadline_ends_the_waiting_and_the_running_with_what_there_is() -> None:
    driver = Driver(make_scheduler(pages=8, max_num_seqs=1))
    driver.submit(Request(id="runs", prompt=(1,), max_tokens=20, deadline=6.0))
    driver.submit(Request(id="waits", prompt=(2,), max_tokens=20, deadline=3.0))
    driver.submit(Request(id="late", prompt=(2,), max_tokens=5, deadline=99.0))
    driver.run()
    assert driver.finished["runs", 0] is FinishReason.TIMEOUT
    assert len(driver.outputs["runs", 0]) == 6
    assert driver.finished["waits", 0] is FinishReason.TIMEOUT
    assert driver.outputs["waits", 0] == []
    assert driver.finished["late", 0] is FinishReason.LENGTH


def test_a_resubmitted_sample_goes_on_where_it_was() -> None:
    request = Request(id="r", prompt=(5, 6, 7), max_tokens=12, n=2)
    whole = [solo(request, i) for i in range(2)]
    driver = Driver(make_scheduler())
    driver.submit(request, outputs=whole[0][:4], sample_index=0, charged=3.0 + 8.0)
    driver.submit(request, outputs=whole[1][:7], sample_index=1, charged=14.0)
    driver.run()
    assert [driver.outputs["r", i] for i in range(2)] == whole


def test_resubmitting_a_complete_sample_ends_it_without_another_token() -> None:
    request = Request(id="r", prompt=(5, 6, 7), max_tokens=3)
    driver = Driver(make_scheduler())
    driver.submit(request, outputs=solo(request), charged=9.0)
    driver.run()
    assert driver.outputs["r", 0] == solo(request)
    assert driver.finished["r", 0] is FinishReason.LENGTH


def test_a_wrong_outcome_changes_nothing() -> None:
    driver = Driver(make_scheduler())
    a = driver.submit(Request(id="a", prompt=(1, 2), max_tokens=3))
    b = driver.submit(Request(id="b", prompt=(3, 4), max_tokens=3))
    plan = driver.scheduler.plan(0.0)
    outcomes = driver.model.run(plan)
    with pytest.raises(ValueError, match="draws"):
        driver.scheduler.commit(plan, [outcomes[0], type(outcomes[1])(())], 1.0)
    assert (a.computed, b.computed, a.outputs, b.outputs) == (0, 0, [], [])
    assert a.state is State.RUNNING
    driver.scheduler.commit(plan, outcomes, 1.0)
    assert (a.num_outputs, b.num_outputs) == (1, 1)
