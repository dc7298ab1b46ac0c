"""Reported faults of kind b: pages that are lost, counted twice or given to the wrong one."""

from __future__ import annotations

import random
import threading
from itertools import combinations
from typing import Any

import psutil
import pytest

from cases.servers import preemptions, teach_short_outputs, text
from e2e.harness import ServerProcess
from e2e.pool import Srv
from e2e.raw import Raw
from turnstile.core.pages import PagePool
from turnstile.core.prefix_cache import PrefixCache
from turnstile.core.request import Request, Sequence

pytestmark = pytest.mark.e2e

BASE: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture
def warm(server: ServerProcess) -> ServerProcess:
    """A server with a prefix cache, which is empty at first."""
    forget(server)
    return server


@pytest.fixture
def tight(srv: Srv) -> ServerProcess:
    """Far more slots than pages."""
    return srv(pages=40, chunk=64, seqs=32, queue=128)


def forget(server: ServerProcess) -> None:
    """Empty the prefix cache."""
    assert server.http.post("/reset_prefix_cache").status_code == 200
    server.idle()


def greedy(server: ServerProcess, prompt: Any, max_tokens: int = 4, **body: Any) -> dict[str, Any]:
    """A whole greedy answer."""
    status, answer = server.complete(prompt, **BASE, max_tokens=max_tokens, **body)
    assert status == 200, answer
    return answer


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Whether two answers have the same tokens with the very same log-probabilities."""
    return bool(left["choices"][0]["logprobs"] == right["choices"][0]["logprobs"])


# B15 ---------------------------------------------------------------------------------------------


def test_b15_hits_after_preemption_do_not_overrun_the_step(
    tight: ServerProcess, cold: ServerProcess
) -> None:
    prompts = [cold.tokens(48, seed=0) + cold.tokens(20, seed=k) for k in range(1, 65)]
    expected = [c["text"] for c in greedy(cold, prompts, 40)["choices"]]
    teach_short_outputs(tight)
    before = preemptions(tight), tight.metric("turnstile_prefix_hit_tokens_total")
    for _ in range(3):
        results = tight.together([lambda p=p: greedy(tight, p, 40) for p in prompts])
        assert [answer["choices"][0]["text"] for answer in results] == expected
    assert preemptions(tight) > before[0], "nobody was preempted: the case proves nothing"
    assert tight.metric("turnstile_prefix_hit_tokens_total") > before[1]


# B17 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("growth", [30, 63, 64, 65, 128])
def test_b17_a_growing_conversation_is_cut_into_chunks_of_what_is_new(
    warm: ServerProcess, cold: ServerProcess, growth: int
) -> None:
    history = warm.tokens(50, seed=growth)
    for turn in range(1, 8):
        now, right = greedy(warm, history, 2, logprobs=1), greedy(cold, history, 2, logprobs=1)
        assert same(now, right), turn
        if turn > 1:
            assert cached(now) >= (len(history) - growth) // 16 * 16 - 16
        history = history + warm.tokens(growth, seed=1000 * growth + turn)


@pytest.mark.parametrize("rest", [1, 15, 16, 17, 63, 64, 65])
def test_b17_the_uncached_rest_may_be_just_a_chunk(
    warm: ServerProcess, cold: ServerProcess, rest: int
) -> None:
    start = warm.tokens(160, seed=rest)
    greedy(warm, start)
    longer = start + warm.tokens(rest, seed=100 + rest)
    now = greedy(warm, longer, logprobs=1)
    assert cached(now) == 160
    assert same(now, greedy(cold, longer, logprobs=1))


# B19 ---------------------------------------------------------------------------------------------


def test_b19_the_prefix_cache_changes_no_answer(warm: ServerProcess, cold: ServerProcess) -> None:
    start = warm.tokens(100, seed=19)
    prompts = [start + warm.tokens(5 + k, seed=1900 + k) for k in range(30)]
    random.Random(19).shuffle(prompts)

    def one_by_one(server: ServerProcess) -> list[dict[str, Any]]:
        return [greedy(server, prompt, 8, logprobs=2) for prompt in prompts]

    off, first, second = one_by_one(cold), one_by_one(warm), one_by_one(warm)
    crowd = warm.gather([lambda p=p: greedy(warm, p, 8, logprobs=2) for p in prompts])
    for right, *others in zip(off, first, second, crowd, strict=True):
        assert all(same(other, right) for other in others)
    assert cached(second[0]) >= 96
    assert not any(cached(answer) for answer in off)


# B21 ---------------------------------------------------------------------------------------------

KINDS = (
    "length", "end of text", "stop string", "n", "best_of", "echo", "scoring", "grammar", "batch",
    "left before the first token", "left while streaming", "timeout", "refused", "preempted",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_b21_no_page_is_lost_however_a_request_ends(srv: Srv, kind: str) -> None:
    server = srv(pages=24, chunk=64, queue=128, prefix=False)  # more than slots and pages hold

    def one(k: int) -> None:
        prompt = server.tokens(1 + 7 * k % 40, seed=k)
        body: dict[str, Any] = {"max_tokens": 1 + 5 * k % 40, "temperature": 1, "seed": k}
        if kind == "end of text":
            body |= {"stop_token_ids": list(range(3, 320, 2)), "max_tokens": 60}
        elif kind == "stop string":
            body |= {"stop": ["a", "e", "\ufffd"], "max_tokens": 60}
        elif kind == "n":
            body |= {"n": 2 + k % 2}
        elif kind == "best_of":
            body |= {"n": 1 + k % 2, "best_of": 3}
        elif kind == "echo":
            body |= {"echo": True, "logprobs": 1}
        elif kind == "scoring":
            body |= {"echo": True, "logprobs": 1, "max_tokens": 0}
        elif kind == "grammar":
            body |= {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}}
        elif kind == "timeout":
            body |= {"timeout": 0.001 + 0.004 * (k % 4), "max_tokens": 60}
        elif kind == "refused":
            body |= {"max_tokens": 5000}
        elif kind == "preempted":
            prompt = server.tokens(60, seed=k)
            body |= {"max_tokens": 60, "ignore_eos": True}
        if kind.startswith("left"):
            raw = Raw(server, "/v1/completions", prompt=prompt, stream=True, max_tokens=200)
            if kind == "left while streaming":
                raw.until(b"data: ")
            raw.reset()
            return
        answer = server.post(
            "/v1/completions", prompt=[prompt] * 3 if kind == "batch" else prompt, **body
        )
        expected = {"refused": (400,), "timeout": (200, 504)}.get(kind, (200,))
        assert answer.status_code in expected, answer.text

    if kind == "preempted":
        teach_short_outputs(server)
    before = preemptions(server)
    at_once = server.together if kind == "preempted" else server.gather
    at_once([lambda k=k: one(k) for k in range(24)])
    server.idle()
    assert server.metric("turnstile_pages", state="free") == 24
    if kind == "preempted":
        assert preemptions(server) > before


# B23 ---------------------------------------------------------------------------------------------


def test_b23_the_pages_add_up_at_every_moment(tight: ServerProcess) -> None:
    server = tight
    start = server.tokens(64, seed=23)
    prompts = [start[:cut] + server.tokens(30, seed=k) for k in range(12) for cut in (32, 40, 48)]
    samples: list[list[float]] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            text = server.http.get("/metrics").text
            lines = [line for line in text.splitlines() if line.startswith("turnstile_pages{")]
            samples.append([float(line.split()[-1]) for line in lines])

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        while len(samples) < 8:
            server.gather([lambda p=p: greedy(server, p, 12) for p in prompts])
        server.idle()
    finally:
        done.set()
        watching.join()
    assert all(len(sample) == 3 and sum(sample) == 40 for sample in samples)
    assert server.metric("turnstile_prefix_hit_tokens_total") > 0


# B25 ---------------------------------------------------------------------------------------------


def test_b25_clients_that_reset_their_connection_disturb_nobody(cold: ServerProcess) -> None:
    server = cold
    normal = [server.tokens(20 + k, seed=k) for k in range(3)]
    expected = [text(server.complete(p, **BASE, max_tokens=60)) for p in normal]
    done = threading.Event()

    def stay(k: int) -> int:
        rounds = 0
        while not done.is_set() or not rounds:
            assert text(server.complete(normal[k], **BASE, max_tokens=60)) == expected[k]
            rounds += 1
        return rounds

    def leave() -> int:
        try:
            for k in range(50):
                # 800 tokens are 13 chunks: the waits spread over them, and over the decode.
                raw = Raw(
                    server, "/v1/completions", prompt=server.tokens(800, seed=k),
                    max_tokens=200, stream=bool(k % 4), n=1 + k % 3, **BASE,
                )  # fmt: skip
                if k % 5 == 4 and k % 4:
                    raw.until(b"data: ")
                else:
                    done.wait(0.002 * (k % 10))
                raw.reset()
        finally:
            done.set()
        return 0

    server.gather([leave, *(lambda k=k: stay(k) for k in range(3))])
    server.idle()
    assert server.metric("turnstile_pages", state="held") == 0


# B27 ---------------------------------------------------------------------------------------------


def test_b27_no_two_prefixes_have_the_same_key() -> None:
    page = [5, 70_000, 9, 2**31]
    variants: list[list[int]] = [
        page * 3,
        *([*page[:j], page[j] + 31, page[j + 1] - 1, *page[j + 2 :]] * 3 for j in range(3)),
        *([*page[:j], page[j + 1], page[j], *page[j + 2 :]] * 3 for j in range(3)),
        [-1, 0, 0, 0] * 3,
        [-2, 0, 0, 0] * 3,
        [1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        [1, 2, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0],
        [1, 2, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0],
        [0x01020304] * 12,
        [0x04030201] * 12,
        [0x0102, 0x0304] * 6,
        [0] * 12,
        [1] * 12,
        [256] * 12,
        [2**32 + 1] * 12,
    ]
    cache = PrefixCache(PagePool(64, 4))

    def keys(tokens: list[int], salt: bytes = b"") -> list[bytes]:
        request = Request(id="r", prompt=(*tokens, 1), max_tokens=1, salt=salt)
        sequence = Sequence(request, 0, (), charged=0.0, arrival_order=0)
        cache.match(sequence)
        assert len(sequence.keys) == 3
        return sequence.keys

    every = [keys(tokens) for tokens in variants]
    for left, right in combinations(every, 2):
        assert left[2] != right[2]
    # A page's key depends on where it stands, and on whose it is.
    assert len(set(keys([7] * 12))) == 3
    assert not set(keys([7] * 12)) & set(keys([7] * 12, b"other"))
    assert keys([7] * 12) == keys([7] * 12)


def test_b27_a_prompt_built_to_collide_is_answered_on_its_own(
    warm: ServerProcess, cold: ServerProcess
) -> None:
    first = warm.tokens(48, seed=27)
    greedy(warm, [*first, 5])
    for place in (0, 15, 16, 17, 31, 40):
        other = list(first)
        other[place], other[place + 1] = (other[place] + 31) % 320, (other[place + 1] - 1) % 320
        now = greedy(warm, [*other, 5], logprobs=1)
        assert cached(now) == place // 16 * 16
        assert same(now, greedy(cold, [*other, 5], logprobs=1))


def test_b27_what_was_computed_under_one_salt_is_not_found_under_another(
    warm: ServerProcess,
) -> None:
    prompt = warm.tokens(64, seed=270)
    assert cached(greedy(warm, prompt, cache_salt="a")) == 0
    assert cached(greedy(warm, prompt, cache_salt="a")) == 48
    for other in ("b", "A", "a ", None):
        assert cached(greedy(warm, prompt, cache_salt=other)) == 0
        assert cached(greedy(warm, prompt, cache_salt=other)) == 48


# B29 ---------------------------------------------------------------------------------------------


def test_b29_eviction_begins_at_the_tail_and_spares_what_was_just_matched(
    srv: Srv, cold: ServerProcess
) -> None:
    server = srv(pages=12, chunk=64, seqs=8)
    forget(server)
    first, second = server.tokens(96, seed=1), server.tokens(64, seed=2)
    greedy(server, first, 1)
    greedy(server, second, 1)
    longer = first + server.tokens(80, seed=3)
    now = greedy(server, longer, 1, logprobs=1)
    assert cached(now) == 96, "matched pages are held before others are allocated"
    assert same(now, greedy(cold, longer, 1, logprobs=1))
    for k in range(8):
        greedy(server, server.tokens(36, seed=100 + k), 1)
        probe = greedy(server, [*first, 5], 1)
        assert cached(probe) % 16 == 0
        assert text((200, probe)) == text((200, greedy(cold, [*first, 5], 1)))
    forget(server)
    assert cached(greedy(server, [*first, 5], 1)) == 0


@pytest.mark.parametrize("others", [0, 2, 3, 4, 5])
def test_b29_hits_shrink_from_the_tail(srv: Srv, others: int) -> None:
    server = srv(pages=12, chunk=64, seqs=8)
    forget(server)
    first = server.tokens(96, seed=1)
    greedy(server, first, 1)
    for k in range(others):
        greedy(server, server.tokens(40, seed=200 + k), 1)  # three pages each, two stay cached
    left = cached(greedy(server, [*first, 5], 1))
    # Twelve pages: six are the first prompt's. Each of the others leaves two cached ones and
    # takes a third for a moment.
    taken = max(0, 2 * others + 1 - 6) if others else 0
    assert left == 16 * max(0, 6 - taken)


# B31 ---------------------------------------------------------------------------------------------


def test_b31_memory_is_taken_once_and_does_not_grow(srv: Srv) -> None:
    server = srv(pages=64)
    processes = [psutil.Process(server.process.pid), psutil.Process(server.engine_pid)]

    def load(first: int, count: int) -> None:
        def one(k: int) -> int:
            prompt = server.tokens(1 + 13 * k % 200, seed=k)
            return server.complete(prompt, max_tokens=1 + k % 24, n=1 + k % 2, seed=k)[0]

        for start in range(first, first + count, 25):
            calls = [lambda k=k: one(k) for k in range(start, start + 25)]
            assert set(server.gather(calls)) == {200}

    def resident() -> list[int]:
        return [process.memory_info().rss for process in processes]

    load(0, 50)
    before = resident()
    load(50, 250)
    for was, now in zip(before, resident(), strict=True):
        assert now < 1.1 * was + 4 * 2**20
    assert server.http.get("/server_info").json()["engine"]["num_pages"] == 64


# B33 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [True, False])
def test_b33_equal_requests_at_once_get_equal_answers(
    srv: Srv, tight: ServerProcess, prefix: bool
) -> None:
    # Without a prefix cache each of them has all its pages to itself.
    server = tight if prefix else srv(pages=24, chunk=64, queue=128, prefix=False)
    prompt = server.tokens(30, seed=1)
    alone = greedy(server, prompt, 64, logprobs=1)
    teach_short_outputs(server)
    before = preemptions(server)
    for width in (4, 16, 16):
        answers = server.together([lambda: greedy(server, prompt, 64, logprobs=1)] * width)
        assert all(same(answer, alone) for answer in answers)
    assert preemptions(server) > before, "nobody was preempted: the case proves nothing"
