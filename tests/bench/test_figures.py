"""Statistics, framing and the standard workloads."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstile.bench.corpus import Prose
from turnstile.bench.http import BrokenResponseError, Response, Server, UrlError
from turnstile.bench.plan import plan
from turnstile.bench.records import Attempt, read
from turnstile.bench.workloads import WORKLOADS, choose

BODY = b'data: {"choices":[{"text":"a"}]}\n\ndata: [DONE]\n\n'
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"%x\r\n%b\r\n" % (20, BODY[:20])
    + b"%x;note=1\r\n%b\r\n" % (len(BODY) - 20, BODY[20:])
    + b"0\r\nTrailer: yes\r\n\r\n"
)
SIZED = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)


@given(
    cuts=st.lists(st.integers(0, len(CHUNKED)), max_size=30), raw=st.sampled_from([CHUNKED, SIZED])
)
def test_an_answer_reads_the_same_however_it_is_cut(cuts: list[int], raw: bytes) -> None:
    bounds = [0, *sorted(min(c, len(raw)) for c in cuts), len(raw)]
    response = Response()
    done = [response.feed(float(i), raw[a:b]) for i, (a, b) in enumerate(pairwise(bounds)) if b > a]
    assert done == [False] * (len(done) - 1) + [True]
    assert response.body == BODY
    attempt = Attempt(0.0, 0.0, 1, ended=99.0, status=200, pieces=response.pieces)
    record = read(attempt, 0.0)
    assert (record.outcome, len(record.times)) == ("completed", 1)


def test_each_read_has_its_own_moment_whatever_it_holds_of_the_chunks() -> None:
    head, chunk = CHUNKED[: CHUNKED.index(b"\r\n\r\n") + 4], b"5\r\nab\r\nc\r\n"
    reads = [
        (head, b""),
        (chunk, b"ab\r\nc"),
        (chunk + chunk, b"ab\r\ncab\r\nc"),
        (chunk[:3], b""),
        (chunk[3:], b"ab\r\nc"),
        (chunk + b"0", b"ab\r\nc"),
        (b"1\r\nd\r\n", b"d"),  # behind the 0 of its size
        (b"5;note=1" + chunk[1:], b"ab\r\nc"),
        (chunk[:-1], b"ab\r\nc"),
        (b"\n", b""),
    ]
    response = Response()
    for moment, (data, _) in enumerate(reads):
        assert not response.feed(float(moment), data)
    assert response.feed(99.0, b"0\r\n\r\n")
    expected = [(float(moment), body) for moment, (_, body) in enumerate(reads) if body]
    assert response.pieces == expected


def test_an_answer_until_the_end_of_the_connection_is_whole_only_then() -> None:
    response = Response()
    assert not response.feed(0.0, b"HTTP/1.1 200 OK\r\n\r\n" + BODY)
    assert response.body == BODY
    assert response.end()
    assert not response.keep_alive


def test_what_is_not_http_is_an_error() -> None:
    with pytest.raises(BrokenResponseError):
        Response().feed(0.0, b"220 mail ready\r\n\r\n")
    for size in (b"nope", b"-5", b"0x5", b"1_0", b"", b"f" * 5000):
        raw = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + size + b"\r\nhello\r\n"
        with pytest.raises(BrokenResponseError):
            Response().feed(0.0, raw)


def test_urls_are_read_with_and_without_the_version() -> None:
    assert Server.parse("http://localhost:8000/v1/") == Server("localhost", 8000)
    assert Server.parse("127.0.0.1:81/api") == Server("127.0.0.1", 81, "/api")
    with pytest.raises(UrlError, match="TLS"):
        Server.parse("https://localhost")
    for url in ("localhost:many", "localhost:99999", "http://[::1"):
        with pytest.raises(UrlError, match="is no URL"):
            Server.parse(url)


async def by_words(text: str) -> list[int]:
    return [hash(word) for word in text.split()]


def test_w1_is_the_workload_that_the_published_figures_are_of() -> None:
    planned = asyncio.run(plan(WORKLOADS["W1"], by_words, Prose(0), 101))
    assert sum(len(p.prompt) for p in planned) == 50_735
    assert sum(p.output_tokens for p in planned) == 33_376


def test_w3_shares_its_prefix_and_nothing_else() -> None:
    planned = asyncio.run(plan(WORKLOADS["W3"], by_words, Prose(0), 101))
    assert len({tuple(p.prompt[:512]) for p in planned}) == 1
    assert {len(p.prompt) - 512 for p in planned} <= set(range(16, 65))
    assert len({tuple(p.prompt[512:]) for p in planned}) == 200


def test_a_changed_workload_does_not_pass_for_the_standard_one() -> None:
    assert choose("W1").name == "W1"
    assert choose("W5", rate=3.0).name == "W5"
    assert choose("W1", rate=3.0).name == choose("W1", users=10).name == "W1*"
    with pytest.raises(ValueError, match="W1, W2"):
        choose("W9")


def test_poisson_arrivals_have_their_rate_and_the_same_seed_the_same_times() -> None:
    w5 = choose("W5", rate=4.0, requests=4000)
    times = w5.arrivals(1).times  # type: ignore[union-attr]
    assert times == w5.arrivals(1).times  # type: ignore[union-attr]
    assert times[-1] == pytest.approx(1000, rel=0.1)
    gaps = np.diff(times)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)
