"""Work beside the event loop: who waits for it, for how long, and what that holds in memory."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from server.served import Raw, Serve, listening, until
from turnstile.server import grammar, prompts
from turnstile.server.errors import ApiError
from turnstile.server.threads import Threads

LONG = "hello " * 5_000
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"prompt": LONG}),
    ("/detokenize", {"tokens": [5] * 20_000}),
    (
        "/v1/chat/completions/render",
        {"messages": [{"role": "user", "content": LONG}], "truncate_prompt_tokens": -1},
    ),
    ("/v1/completions", {"prompt": LONG, "truncate_prompt_tokens": -1}),
]


class Busy:
    """Threads of which the only one works until :attr:`end` is set."""

    def __init__(self, most: int) -> None:
        self.end = threading.Event()
        self.threads = Threads("test", number=1, most=most, what="long texts")

    async def start(self) -> asyncio.Task[bool]:
        task = asyncio.create_task(self.threads.run(1, lambda: self.end.wait(60)))
        await until(lambda: self.threads.inside == 1)
        return task


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Busy]:
    """All threads for texts and for grammars are busy."""
    made = Busy(most=100_000)
    monkeypatch.setattr(prompts, "TEXTS", made.threads)
    monkeypatch.setattr(grammar, "CHECKS", made.threads)
    yield made
    made.end.set()


def test_a_full_queue_refuses_and_takes_again_what_there_is_room_for() -> None:
    async def test() -> None:
        busy = Busy(most=3)
        first = await busy.start()
        second = asyncio.create_task(busy.threads.run(2, lambda: "second"))
        await until(lambda: busy.threads.inside == 3)
        with pytest.raises(ApiError, match="Too many long texts") as refused:
            await busy.threads.run(1, lambda: "third")
        assert refused.value.status == 503
        assert (b"retry-after", b"1") in refused.value.headers()
        busy.end.set()
        assert (await first, await second) == (True, "second")
        assert await busy.threads.run(99, lambda: "large, but alone") == "large, but alone"
        assert busy.threads.inside == 0

    asyncio.run(test())


def test_who_leaves_the_queue_takes_along_what_the_work_holds() -> None:
    class Text(str):
        __slots__ = ("__weakref__",)

    async def test() -> None:
        busy = Busy(most=9)
        first = await busy.start()
        text = Text("of many characters")
        held = weakref.ref(text)
        waiting = asyncio.create_task(busy.threads.run(1, text.upper))
        del text
        await until(lambda: busy.threads.inside == 2)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        del waiting
        gc.collect()
        assert busy.threads.inside == 1
        assert held() is None
        busy.end.set()
        await first

    asyncio.run(test())


def test_work_that_fails_gives_its_place_back() -> None:
    async def test() -> None:
        threads = Threads("test", number=1, most=1, what="long texts")
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                await threads.run(1, lambda: 1 // 0)
        assert threads.inside == 0

    asyncio.run(test())


@pytest.mark.parametrize(("path", "body"), ROUTES, ids=[path for path, _ in ROUTES])
def test_a_body_is_held_until_it_is_tokenized_and_no_longer_than_its_client_is_there(
    serve: Serve, busy: Busy, path: str, body: dict[str, Any]
) -> None:
    async def test() -> None:
        async with serve() as served, listening(served) as port:
            working = await busy.start()
            raw = await Raw.post(port, path, body)
            await until(lambda: busy.threads.inside > 1)
            assert served.service.bodies.held > 20_000
            raw.reset()
            await until(lambda: served.service.bodies.held == 0)
            assert busy.threads.inside == 1
            assert not served.service.live
            busy.end.set()
            await working
            answer = await served.post(path, **body)
            assert answer.status_code == 200, answer.text
            assert served.service.bodies.held == 0

    asyncio.run(test())


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"messages": []}),
        ("/v1/completions", {"truncate_prompt_tokens": -1, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [], "truncate_prompt_tokens": -1, "max_tokens": 1}),
        ("/v1/chat/completions/render", {"messages": [], "truncate_prompt_tokens": -1}),
    ],
)
def test_text_that_need_not_fit_has_a_bound_of_its_own(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], fits: bool
) -> None:
    monkeypatch.setattr(prompts, "LEAST_GIANT", 1000)  # 16 × the context of 256 is more

    async def test() -> None:
        async with serve() as served:
            text = "x" * (3_800 if fits else 4_097)
            field = "messages" if "messages" in body else "prompt"
            value = [{"role": "user", "content": text}] if field == "messages" else text
            answer = await served.post(path, **{**body, field: value})
            assert answer.status_code == (200 if fits else 400), answer.text
            if not fits:
                error = answer.json()["error"]
                assert error["param"] == field
                assert "at most 4096" in error["message"]

    asyncio.run(test())


def test_a_stream_holds_no_body_any_more(serve: Serve) -> None:
    async def test() -> None:
        async with serve(delay=0.01) as served, listening(served) as port:
            for path, field in (
                ("/v1/completions", {"prompt": "hello"}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
            ):
                raw = await Raw.post(port, path, {**field, "max_tokens": 200, "stream": True})
                await raw.until(b"data: ")
                assert served.service.live
                assert served.service.bodies.held == 0
                raw.reset()
                await until(lambda: not served.service.live)

    asyncio.run(test())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ROUTES[3],
        ("/v1/chat/completions", ROUTES[2][1]),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "a{1,31}"}}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}],
             "structured_outputs": {"regex": "a{1,32}"}},
        ),
    ],
    ids=["prompt", "conversation", "grammar of a prompt", "grammar of a conversation"],
)  # fmt: skip
def test_a_deadline_holds_while_a_request_is_being_read(
    serve: Serve, busy: Busy, path: str, body: dict[str, Any]
) -> None:
    async def test() -> None:
        async with serve() as served:
            working = await busy.start()
            answer = await asyncio.wait_for(served.post(path, **body, timeout=0.05), 20)
            assert answer.status_code == 504
            assert answer.json()["error"]["code"] == "deadline_exceeded"
            assert busy.threads.inside == 1
            busy.end.set()
            await working

    asyncio.run(test())


def test_a_flood_of_new_grammars_is_refused_and_holds_up_neither_probes_nor_known_ones(
    serve: Serve, busy: Busy, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        known = {"structured_outputs": {"regex": "known"}, "max_tokens": 1}
        async with serve() as served:
            with monkeypatch.context() as before:
                before.setattr(
                    grammar, "CHECKS", Threads("test", number=1, most=9, what="grammars")
                )
                assert (await served.complete(**known)).status_code == 200
            full = Busy(most=30)
            monkeypatch.setattr(grammar, "CHECKS", full.threads)
            working = await full.start()
            flood = [
                asyncio.create_task(served.complete(structured_outputs={"regex": f"new{i}"}))
                for i in range(40)
            ]
            await until(lambda: sum(task.done() for task in flood) == 11)
            refused = [task.result() for task in flood if task.done()]
            assert {answer.status_code for answer in refused} == {503}
            assert refused[0].headers["retry-after"] == "1"
            assert (await served.client.get("/metrics")).status_code == 200
            assert (await served.complete(**known)).status_code == 200
            json_object = {"type": "json_object"}
            assert (await served.chat(response_format=json_object)).status_code == 200
            assert full.threads.inside == 30
            for task in flood:
                task.cancel()
            await asyncio.gather(*flood, return_exceptions=True)
            assert full.threads.inside == 1
            full.end.set()
            await working

    asyncio.run(test())
