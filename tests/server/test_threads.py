"""Work beside the event loop: who waits for it, for how long, and what that holds in memory."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from server.served import PATIENCE, Raw, Serve, Served, listening, until
from turnstile.server.answer import reader
from turnstile.server.errors import ApiError
from turnstile.server.http.auth import key_name
from turnstile.server.tenants import Tenant
from turnstile.server.threads import Threads
from turnstile.text.errors import UncheckedGrammarError

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


A, B, C = Tenant("a"), Tenant("b"), Tenant("c")


class Busy:
    """Threads that all work until :attr:`end` is set."""

    def __init__(self, most: int = 100_000, *, number: int = 1, heavy: int = 1 << 30) -> None:
        self.end = threading.Event()
        self.number = number
        self.threads = Threads("test", number=number, most=most, heavy=heavy, what="long texts")
        self.done: list[str] = []

    async def start(self) -> list[asyncio.Task[bool]]:
        tasks = []
        for place in range(self.number):
            work = self.threads.run(1, lambda: self.end.wait(60), Tenant(f"busy-{place}"))
            tasks.append(asyncio.create_task(work))
        await until(lambda: self.threads.inside == self.number and not self.threads.waiting)
        return tasks

    async def queue(self, name: str, size: int, tenant: Tenant) -> asyncio.Task[None]:
        """Let ``name`` wait in the queue; where it is done, it is in :attr:`done`."""
        before = self.threads.waiting
        work = self.threads.run(size, lambda: self.done.append(name), tenant)
        task = asyncio.create_task(work)
        await until(lambda: self.threads.waiting == before + 1)
        return task

    def serve(self, served: Served) -> None:
        """Make these the threads of a server."""
        served.service.texts = served.service.checks = self.threads


@pytest.fixture
def busy() -> Iterator[Busy]:
    """All threads for texts and for grammars are busy, once they are those of a server."""
    made = Busy()
    yield made
    made.end.set()


def test_a_full_queue_refuses_and_takes_again_what_there_is_room_for() -> None:
    async def test() -> None:
        busy = Busy(most=3)
        first = await busy.start()
        second = asyncio.create_task(busy.threads.run(2, lambda: "second", A))
        await until(lambda: busy.threads.inside == 3)
        with pytest.raises(ApiError, match="Too many long texts") as refused:
            await busy.threads.run(1, lambda: "third", A)
        assert refused.value.status == 503
        assert (b"retry-after", b"1") in refused.value.headers()
        assert busy.threads.refused == 1
        busy.end.set()
        assert await asyncio.gather(*first, second) == [True, "second"]
        assert await busy.threads.run(99, lambda: "large, but alone", A) == "large, but alone"
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
        waiting = asyncio.create_task(busy.threads.run(1, text.upper, A))
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
        await asyncio.gather(*first)

    asyncio.run(test())


def test_work_that_fails_gives_its_place_back() -> None:
    async def test() -> None:
        threads = Threads("test", number=1, most=1, heavy=9, what="long texts")
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                await threads.run(1, lambda: 1 // 0, A)
        assert threads.inside == 0

    asyncio.run(test())


@pytest.mark.parametrize(
    ("pieces", "order"),
    [
        ([(A, 5)] * 4 + [(B, 5)] * 2, "A0 B4 A1 B5 A2 A3"),
        ([(A, 4), (A, 4), (A, 4), (B, 1), (B, 1), (B, 1), (B, 1)], "A0 B3 B4 B5 B6 A1 A2"),
        ([(A, 6)] * 3 + [(Tenant("B", weight=3.0), 6)] * 4, "A0 B3 B4 B5 A1 B6 A2"),
        ([(A, 1), (B, 1), (C, 1), (A, 1), (B, 1)], "A0 B1 C2 A3 B4"),
    ],
    ids=["equal turns", "by size and not by number", "by a tenant's weight", "three"],
)
def test_next_is_the_tenant_that_was_served_least(
    pieces: list[tuple[Tenant, int]], order: str
) -> None:
    async def test() -> None:
        busy = Busy()
        tasks = list(await busy.start())
        for place, (tenant, size) in enumerate(pieces):
            name = f"{tenant.name.upper()}{place}"
            tasks.append(await busy.queue(name, size, tenant))  # type: ignore[arg-type]
        busy.end.set()
        await asyncio.gather(*tasks)
        assert busy.done == order.split()

    asyncio.run(test())


def test_a_tenant_that_comes_back_has_saved_up_nothing_and_escapes_nothing() -> None:
    async def test() -> None:
        threads = Threads("test", number=1, most=10**6, heavy=10**6, what="long texts")
        gates: dict[str, threading.Event] = {}
        done: list[str] = []

        def work(name: str) -> None:
            gates[name].wait(60)
            done.append(name)

        async def ask(name: str, size: int, tenant: Tenant) -> asyncio.Task[None]:
            gates[name] = threading.Event()
            task = asyncio.create_task(threads.run(size, lambda: work(name), tenant))
            await asyncio.sleep(0)
            return task

        tasks = [await ask("b0", 30, B)]
        tasks += [await ask(name, 10, A) for name in ("a1", "a2", "a3")]
        gates["b0"].set()
        await tasks[0]
        tasks += [await ask("b1", 10, B)]  # it has had 30 already
        gates["a1"].set()
        await tasks[1]
        tasks += [await ask(name, 10, C) for name in ("c0", "c1")]  # nobody has had less than 10
        for gate in gates.values():
            gate.set()
        await asyncio.gather(*tasks)
        assert done == ["b0", "a1", "a2", "c0", "a3", "c1", "b1"]

    asyncio.run(test())


def test_heavy_work_of_one_tenant_leaves_a_thread_to_the_light_and_to_others() -> None:
    async def test() -> None:
        hold = threading.Event()
        threads = Threads("test", number=2, most=1000, heavy=100, what="long texts")
        heavy = [asyncio.create_task(threads.run(100, hold.wait, A)) for _ in range(3)]
        await until(lambda: threads.waiting == 2)
        assert await threads.run(1, lambda: "light", A) == "light"
        assert await threads.run(100, lambda: "heavy", B) == "heavy"
        assert threads.waiting == 2
        hold.set()
        assert await asyncio.gather(*heavy) == [True] * 3
        assert (threads.inside, threads.waiting) == (0, 0)

    asyncio.run(test())


def test_in_a_full_queue_whoever_has_most_waiting_makes_room() -> None:
    async def test() -> None:
        busy = Busy(most=21)
        first = await busy.start()
        flood = [await busy.queue(f"a{k}", 4, A) for k in range(5)]
        small = asyncio.create_task(busy.threads.run(5, lambda: busy.done.append("b"), B))
        with pytest.raises(ApiError, match="Too many long texts"):
            await flood[4]
        with pytest.raises(ApiError, match="Too many long texts"):
            await flood[3]
        # Nobody gives way to somebody who would have more than he has himself.
        with pytest.raises(ApiError, match="Too many long texts"):
            await busy.threads.run(12, lambda: None, C)
        assert busy.threads.refused == 3
        busy.end.set()
        await asyncio.gather(*first, *flood[:3], small)
        assert sorted(busy.done) == ["a0", "a1", "a2", "b"]
        assert busy.threads.inside == 0

    asyncio.run(test())


@pytest.mark.parametrize(("path", "body"), ROUTES, ids=[path for path, _ in ROUTES])
def test_a_body_is_held_until_it_is_tokenized_and_no_longer_than_its_client_is_there(
    serve: Serve, busy: Busy, path: str, body: dict[str, Any]
) -> None:
    async def test() -> None:
        async with serve() as served, listening(served) as port:
            busy.serve(served)
            working = await busy.start()
            raw = await Raw.post(port, path, body)
            await until(lambda: busy.threads.inside > 1)
            assert served.service.bodies.held > 20_000
            raw.reset()
            await until(lambda: served.service.bodies.held == 0)
            assert busy.threads.inside == 1
            assert not served.service.live
            busy.end.set()
            await asyncio.gather(*working)
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
    if "messages" in body:
        monkeypatch.setattr(reader, "LEAST_GIANT", 1000)  # 16 × the context of 256 is more
    config = {} if "messages" in body else {"max_text_size": 4096}

    async def test() -> None:
        async with serve(config=config) as served:
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
        *ROUTES,
        ("/v1/chat/completions", ROUTES[2][1]),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "a{1,31}"}}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}],
             "structured_outputs": {"regex": "a{1,32}"}},
        ),
    ],
    ids=[*(path for path, _ in ROUTES), "/v1/chat/completions", "a grammar", "grammar of a chat"],
)  # fmt: skip
def test_a_deadline_holds_while_a_request_is_being_read(
    serve: Serve, busy: Busy, path: str, body: dict[str, Any]
) -> None:
    async def test() -> None:
        async with serve() as served:
            busy.serve(served)
            working = await busy.start()
            answer = await asyncio.wait_for(served.post(path, **body, timeout=0.05), PATIENCE)
            assert answer.status_code == 504
            assert answer.json()["error"]["code"] == "deadline_exceeded"
            assert busy.threads.inside == 1
            busy.end.set()
            await asyncio.gather(*working)

    asyncio.run(test())


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", {"prompt": "hello"}), ("/detokenize", {"tokens": [70]})]
)
def test_a_deadline_that_has_passed_is_a_504_however_short_the_work(
    serve: Serve, path: str, body: dict[str, Any]
) -> None:
    async def test() -> None:
        async with serve() as served:
            assert (await served.post(path, **body, timeout=60)).status_code == 200
            assert (await served.post(path, **body, timeout=1e-9)).status_code == 504
            headers = {"x-request-timeout": "soon"}
            answer = await served.client.post(path, json=body, headers=headers)
            assert answer.json()["error"]["param"] == "x-request-timeout"

    asyncio.run(test())


def test_a_flood_of_new_grammars_is_refused_and_holds_up_neither_probes_nor_known_ones(
    serve: Serve,
) -> None:
    async def test() -> None:
        known = {"structured_outputs": {"regex": "known"}, "max_tokens": 1}
        async with serve() as served:
            assert (await served.complete(**known)).status_code == 200
            full = Busy(most=30)
            full.serve(served)
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
            await asyncio.gather(*working)

    asyncio.run(test())


def test_a_grammar_check_is_told_when_its_client_is_gone(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(grammar: str, unwanted: threading.Event) -> None:
        assert unwanted.wait(60)

    monkeypatch.setattr("turnstile.text.grammar.check_grammar", check)

    async def test() -> None:
        async with serve() as served:
            body = {"structured_outputs": {"regex": "never checked"}, "timeout": 0.05}
            assert (await served.complete(**body)).status_code == 504
            await until(lambda: not served.service.checks.inside)

    asyncio.run(test())


def test_a_grammar_the_machine_has_no_room_to_check_is_a_503_and_may_come_again(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(grammar: str, unwanted: threading.Event) -> None:
        raise UncheckedGrammarError("the machine is too busy")

    async def test() -> None:
        async with serve() as served:
            body = {"structured_outputs": {"regex": "checked later"}}
            with monkeypatch.context() as busy:
                busy.setattr("turnstile.text.grammar.check_grammar", check)
                answer = await served.complete(**body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (503, "engine_overloaded")
            assert error["param"] == "structured_outputs"
            assert "busy" in error["message"]
            assert answer.headers["retry-after"] == "10"
            assert answer.headers["x-should-retry"] == "true"
            assert (await served.complete(**body)).status_code == 200

    asyncio.run(test())


@pytest.mark.parametrize("kind", ["text", "grammar"])
def test_a_tenant_that_floods_waits_behind_the_others(serve: Serve, kind: str) -> None:
    async def test() -> None:
        async with serve(config={"api_key": ["key-a", "key-b"]}) as served:
            busy = Busy(most=170_000 if kind == "text" else 6)
            busy.serve(served)
            working = await busy.start()

            def ask(key: str, number: int) -> asyncio.Task[Any]:
                body: dict[str, Any] = {"prompt": f"{number} " + LONG, "truncate_prompt_tokens": -1}
                if kind == "grammar":
                    body = {"prompt": "x", "structured_outputs": {"regex": f"{key}{number}"}}
                body["max_tokens"] = 1
                headers = {"authorization": f"Bearer {key}"}
                post = served.client.post("/v1/completions", json=body, headers=headers)
                return asyncio.create_task(post)

            flood = [ask("key-a", number) for number in range(10)]
            await until(lambda: any(task.done() for task in flood))
            ours = [ask("key-b", number) for number in range(2)]
            await until(lambda: sum(task.done() for task in flood) == 7)
            busy.end.set()
            answers = await asyncio.gather(*ours)
            assert {answer.status_code for answer in answers} == {200}
            theirs = [answer.status_code for answer in await asyncio.gather(*flood)]
            assert (theirs.count(503), theirs.count(200)) == (7, 3)
            # All of theirs came first, and ours are in the engine before the last of them.
            tenants = [stream.generation.tenant for stream in served.engine.streams]
            ours_at = [place for place, name in enumerate(tenants) if name == key_name("key-b")]
            assert ours_at == [1, 3]
            await asyncio.gather(*working)

    asyncio.run(test())


def test_a_batch_is_tokenized_in_pieces_and_the_first_prompt_too_long_ends_it(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[list[str]] = []

    async def test() -> None:
        async with serve(max_model_len=40_000, num_pages=10**5) as served:
            encode = type(served.tokenizer).encode_batch

            def noted(self: Any, texts: list[str], **options: Any) -> list[list[int]]:
                pieces.append(list(texts))
                return encode(self, texts, **options)

            monkeypatch.setattr(type(served.tokenizer), "encode_batch", noted)
            some, many = "hello " * 2_000, "a b c d " * 20_000
            answer = await served.complete([some] * 7, max_tokens=1)
            assert answer.status_code == 200, answer.text
            assert [len(piece) for piece in pieces] == [5, 2]
            pieces.clear()
            answer = await served.complete([some, many, *[some] * 20], max_tokens=1)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "prompt.1"
            assert answer.json()["error"]["code"] == "context_length_exceeded"
            assert [len(piece) for piece in pieces] == [1, 1]

    asyncio.run(test())
