"""The live map of a server whose engine is a process: over the wire, and in a browser."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.browser import CHROMIUM, Browser
from e2e.harness import FAKED, PATIENCE, ServerProcess, until

pytestmark = pytest.mark.e2e

NUM_PAGES = 96
STATES = {"free": "0", "cached": "1"}


@pytest.fixture
def server(tiny: Path) -> Iterator[ServerProcess]:
    with ServerProcess(
        tiny, command=FAKED, num_pages=NUM_PAGES, max_num_seqs=4, env={"TEST_STEP": "0.02"},
        canary=False,
    ) as server:  # fmt: skip
        yield server


class Reader:
    """Reads the stream in a thread and adds up what it tells of the pages."""

    def __init__(self, url: str) -> None:
        self.pages: list[str] = []
        self.wholes = 0
        self.words: list[str] = []
        self.tables: dict[int, list[int]] = {}
        self.longest: list[int] = []
        self.ended = False
        self.thread = threading.Thread(target=self._read, args=(url,), daemon=True)
        self.thread.start()

    def _read(self, url: str) -> None:
        with contextlib.suppress(httpx.HTTPError):  # of a test that has failed
            with httpx.stream("GET", f"{url}/live", timeout=PATIENCE) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        self._take(json.loads(line.removeprefix("data: ")))
            self.ended = True  # whole: a connection that breaks raises

    def _take(self, told: dict[str, Any]) -> None:
        if told["type"] == "server":
            self.words.append(told["words"])
        elif told["type"] == "whole":
            self.wholes += 1
            self.pages = list(told["pages"])
            self.tables = {slot["name"]: slot["pages"] for slot in told["slots"]}
        else:
            for page, digit in zip(*told["pages"], strict=True):
                self.pages[page] = digit
            for name, anew, pages in told["tables"]:
                self.tables[name] = pages if anew else self.tables.get(name, []) + pages
            for name in told["left"]:
                self.tables.pop(name, None)
        self.longest = max([self.longest, *self.tables.values()], key=len)

    def counts(self) -> dict[str, int]:
        digits = Counter(self.pages)
        counts = {state: digits[digit] for state, digit in STATES.items()}
        return counts | {"held": len(self.pages) - sum(counts.values())}


def pages_of(server: ServerProcess) -> dict[str, int]:
    scrape = server.scrape()
    states = ("free", "cached", "held")
    return {state: int(scrape.total("turnstile_pages", state=state)) for state in states}


def test_what_it_shows_is_what_the_metrics_say_before_and_after_a_crash(
    server: ServerProcess,
) -> None:
    reader = Reader(server.url)
    until(lambda: len(reader.pages) == NUM_PAGES, "no picture came")
    calls = [
        lambda seed=seed: server.complete(server.tokens(150, seed=seed), max_tokens=40)
        for seed in range(8)
    ]
    assert [status for status, _ in server.gather(calls)] == [200] * 8
    server.idle()
    until(lambda: reader.counts() == pages_of(server), "the map shows something else")
    assert reader.counts()["cached"] > 0
    assert not reader.tables
    assert 10 <= len(reader.longest) <= 12  # 150 and up to 40 tokens in pages of 16
    assert len(set(reader.longest)) == len(reader.longest)
    wholes = reader.wholes
    with ThreadPoolExecutor(1) as pool:
        streaming = pool.submit(
            server.complete, server.tokens(150, seed=1), max_tokens=100, ignore_eos=True
        )
        until(lambda: reader.tables, "nobody runs")
        os.kill(server.engine_pid, signal.SIGKILL)
        assert streaming.result()[0] == 200
    until(lambda: reader.wholes >= wholes + 2, "the map did not start anew")
    server.idle()
    until(lambda: reader.counts() == pages_of(server), "the map shows the engine that died")
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    reader.thread.join(PATIENCE)
    assert reader.ended
    assert "Traceback" not in server.log


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_a_browser_shows_it_and_complains_of_nothing(server: ServerProcess) -> None:
    def shown(name: str) -> str:
        return f"document.getElementById('{name}').textContent"

    with Browser() as browser:
        browser.open(server.url)
        browser.until(f"{shown('words')} === 'Idle.'")
        browser.until(f"{shown('pool-sizes')}.startsWith('{NUM_PAGES} pages of 16 tokens: 0 held')")
        with ThreadPoolExecutor(8) as pool:
            running = [
                pool.submit(
                    server.complete, server.tokens(60, seed=seed), max_tokens=150, ignore_eos=True
                )
                for seed in range(8)
            ]
            browser.until("document.querySelectorAll('.slot:enabled').length === 4")
            until(lambda: server.metric("turnstile_requests_waiting") == 4, "they did not come in")
            with server.frozen():  # what is shown stays so
                browser.until(f"{shown('words')}.includes('4 waiting: too few slots are free')")
                browser.until("document.querySelectorAll('#line b').length === 4")
                browser.ask("document.querySelector('.slot:enabled').click()")
                browser.until(
                    f"/ of default: \\d+ pages, in order \\d+ → /.test({shown('readout')})"
                )
                drawn = "document.getElementById('pages').getContext('2d').getImageData(0,0,600,40)"
                assert browser.ask(f"new Set(new Uint32Array({drawn}.data.buffer)).size") > 2
            for call in running:
                assert call.result()[0] == 200
        server.idle()
        pages = pages_of(server)
        sizes = f"0 held, {pages['cached']} cached, {pages['free']} free"
        browser.until(f"{shown('pool-sizes')}.endsWith('{sizes}')")
        browser.until(f"{shown('happened')}.includes('left')")
        browser.ask(
            "document.getElementById('pages').dispatchEvent("
            "new KeyboardEvent('keydown', {key: 'ArrowRight'}))"
        )
        browser.until(f"/^Page 0: (cached, number \\d+ of|free)/.test({shown('announced')})")
        assert browser.complaints == []
    server.check()
