"""The prefix cache: right keys, the leaf dies first, equal prefixes are computed once."""

from __future__ import annotations

from itertools import combinations

import pytest

from core.driver import Driver, make_scheduler, solo
from turnstile.core.pages import PagePool
from turnstile.core.prefix_cache import PrefixCache
from turnstile.core.request import Request, Sequence


def keys(tokens: list[int], page_size: int = 2, salt: bytes = b"") -> list[bytes]:
    cache = PrefixCache(PagePool(8, page_size))
    sequence = Sequence(Request(id="x", prompt=(*tokens, 0), max_tokens=1, salt=salt))
    cache.match(sequence)
    return sequence.keys


def test_no_two_prefixes_share_a_key() -> None:
    prefixes = [
        [5, 40], [5 + 31, 39], [40, 5], [-1, 0], [-2, 0], [1, 2, 3, 4], [3, 4, 1, 2], [1, 2, 4, 3],
        [65536, 1], [0, 1], [256, 1], [1, 256], [65537, 0],
    ]  # fmt: skip
    last = [keys(tokens)[-1] for tokens in prefixes]
    assert all(a != b for a, b in combinations(last, 2))
    assert keys([1, 2], salt=b"a") != keys([1, 2], salt=b"b")
    assert keys([1, 2, 3, 4], page_size=2)[-1] != keys([1, 2, 3, 4], page_size=4)[-1]
    assert keys([1, 2, 3, 4])[0] == keys([1, 2, 9, 9])[0]


def prompted(name: str, tokens: list[int], **settings: object) -> Request:
    return Request(id=name, prompt=tuple(tokens), max_tokens=2, **settings)  # type: ignore[arg-type]


def cached_of(driver: Driver, request: Request) -> int:
    sequence = driver.submit(request)
    driver.run()
    assert driver.outputs[request.id, 0] == solo(request)
    return sequence.num_cached


def test_the_newest_token_is_never_taken_from_the_cache() -> None:
    driver = Driver(make_scheduler(pages=40))
    assert cached_of(driver, prompted("a", [1] * 16)) == 0
    assert cached_of(driver, prompted("b", [1] * 16)) == 12
    assert cached_of(driver, prompted("c", [1] * 17)) == 16


def test_salts_separate_and_a_request_can_refuse_the_cache() -> None:
    driver = Driver(make_scheduler(pages=40))
    cached_of(driver, prompted("a", [1] * 16))
    assert cached_of(driver, prompted("b", [1] * 16, salt=b"other")) == 0
    assert cached_of(driver, prompted("c", [1] * 16, read_cache=False)) == 0


# B29: the tail of a chain is evicted first, and never a page that the evicting request matched.
def test_hits_shrink_from_the_tail_as_other_load_evicts() -> None:
    hits = []
    for others in range(8):
        driver = Driver(make_scheduler(pages=12))
        cached_of(driver, prompted("a", list(range(24))))
        for i in range(others):
            cached_of(driver, prompted(f"o{i}", [30 + i] * 7))
        hits.append(cached_of(driver, prompted("again", [*range(24), 49])))
    assert hits == sorted(hits, reverse=True)
    assert hits[0] == 24
    assert any(0 < hit < 24 for hit in hits)


def test_a_request_does_not_evict_what_it_matched() -> None:
    driver = Driver(make_scheduler(pages=12))
    cached_of(driver, prompted("a", list(range(24))))
    cached_of(driver, prompted("b", [40] * 16))
    assert cached_of(driver, prompted("c", [*range(24), *[41] * 18])) == 24


def test_equal_prefixes_that_arrive_together_are_computed_once() -> None:
    driver = Driver(make_scheduler(pages=60))
    for i in range(6):
        driver.submit(prompted(f"r{i}", [*[7] * 16, i]))
    driver.run()
    assert driver.scheduler.statistics.cached_tokens == 5 * 16
    prefix = [c for plan in driver.plans for c in plan.chunks if c.start < 16]
    assert {c.sequence.request.id for c in prefix} == {"r0"}


def test_when_the_writer_leaves_the_next_waiter_computes_and_the_others_wait_on() -> None:
    driver = Driver(make_scheduler(pages=60, max_num_batched_tokens=8))
    for i in range(4):
        driver.submit(prompted(f"r{i}", [*[7] * 24, i]))
    driver.step()
    assert [s.request.id for s in driver.scheduler.running] == ["r0"]
    assert driver.scheduler.waiting_by_reason == {"prefix": 3}
    driver.cancel("r0")
    driver.step()
    assert [s.request.id for s in driver.scheduler.running] == ["r1"]
    driver.run()
    for i in range(1, 4):
        assert driver.outputs[f"r{i}", 0] == solo(prompted(f"r{i}", [*[7] * 24, i]))


# B17: a conversation that grows; chunks are cut from what is not cached, and none is empty.
@pytest.mark.parametrize("growth", [7, 8, 9, 12])
def test_a_growing_conversation_is_chunked_on_its_uncached_rest(growth: int) -> None:
    driver = Driver(make_scheduler(pages=80, max_num_batched_tokens=8))
    history: list[int] = []
    for turn in range(8):
        history += [60 + turn] * growth
        cached = cached_of(driver, prompted(f"t{turn}", history))
        assert cached == max(0, (len(history) - growth) // 4 * 4)


# B15: hits found at the moment of admission, after preemption, with the cache on.
def test_preempted_sequences_resume_from_their_own_pages() -> None:
    driver = Driver(make_scheduler(pages=20, admission="optimistic"))
    requests = [Request(id=f"r{i}", prompt=(*[7] * 12, i, i), max_tokens=20) for i in range(16)]
    for request in requests:
        driver.submit(request)
    driver.run()
    assert driver.scheduler.statistics.preemptions > 0
    assert driver.scheduler.cache.hits > 0
    for request in requests:
        assert driver.outputs[request.id, 0] == solo(request)


class CountingCache(PrefixCache):
    """Counts the pages whose tokens are turned into bytes."""

    turned = 0

    def _contents(self, sequence: Sequence, first: int, last: int) -> list[bytes]:
        self.turned += last - first
        return super()._contents(sequence, first, last)


def test_a_match_turns_each_page_into_bytes_once() -> None:
    cache = CountingCache(PagePool(8, 2))
    request = Request(id="x", prompt=tuple(range(9)), max_tokens=1)
    writer = Sequence(request)
    cache.match(writer)
    pages = [cache.pool.append(writer.table) for _ in range(4)]
    writer.computed = 8
    cache.publish(writer, 0)
    reader = Sequence(request)
    for _ in range(2):  # with keys to derive, and with keys that are known
        cache.turned = 0
        assert cache.match(reader) == pages
        assert cache.turned == 4
