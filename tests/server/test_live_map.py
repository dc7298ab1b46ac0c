"""The live map: what it tells to whom, to how many, and what it costs when nobody looks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from server.served import PATIENCE, Raw, Serve, Served, listening, until
from turnstile.core import events
from turnstile.core.events import encode
from turnstile.engine.client import EngineState
from turnstile.engine.protocol import Loading, Occupant, Picture, Snapshot, StepResult
from turnstile.server.service import Phase
from turnstile.server.watch import watchers
from turnstile.server.watch.live_map import LiveMap
from turnstile.server.watch.live_state import in_words, quantile
from turnstile.server.watch.live_steps import StepTape
from turnstile.server.watch.live_view import Viewer

EVERYBODY = Viewer(None)
FREE, CACHED, HELD, PUBLISHED, SHARED = range(5)


def whole(*occupants: Occupant, tables: list[list[int]] = [], states: list[int]) -> Picture:  # noqa: B006
    """A picture of everything."""
    names = [who.name for who in occupants]
    return Picture(
        True, list(occupants), [], names, [4] * len(names), [5] * len(names),
        [(name, True, pages) for name, pages in zip(names, tables, strict=True)],
        list(range(len(states))), bytes(states),
    )  # fmt: skip


def news(pages: dict[int, int], running: dict[int, tuple[int, int]] | None = None) -> Picture:
    """A picture of what has changed."""
    told = running or {}
    return Picture(
        False, [], [], list(told), [c for c, _ in told.values()], [t for _, t in told.values()],
        [], list(pages), bytes(pages.values()),
    )  # fmt: skip


class Watching:
    """Somebody who reads the stream."""

    def __init__(self, answer: httpx.Response) -> None:
        self.answer = answer
        self._lines = answer.aiter_lines()

    async def next(self, kind: str | None = None) -> dict[str, Any]:
        """The next event (of a kind)."""
        async with asyncio.timeout(PATIENCE):
            async for line in self._lines:
                if line.startswith("data: "):
                    told: dict[str, Any] = json.loads(line.removeprefix("data: "))
                    if kind in (None, told["type"]):
                        return told
        raise EOFError

    async def drawn(self) -> dict[str, Any]:
        """The next map that has pages."""
        while not (told := await self.next("whole"))["pages"]:
            pass
        return told


@asynccontextmanager
async def watch(port: int, key: str = "", **headers: str) -> AsyncIterator[Watching]:
    given = ({"x-api-key": key} if key else {}) | headers
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client,
        client.stream("GET", "/live", headers=given) as answer,
    ):
        if answer.status_code != 200:
            await answer.aread()
        yield Watching(answer)


async def status(port: int, **headers: str) -> int:
    async with watch(port, **headers) as watching:
        return watching.answer.status_code


def test_first_all_of_it_then_what_changes(serve: Serve) -> None:
    async def test() -> None:
        async with serve(num_pages=4) as served, listening(served) as port:
            async with watch(port) as watching:
                assert (await watching.next())["type"] == "server"
                assert (await watching.next())["pages"] == ""
                who = Occupant(7, "unknown", 0, "default", 3, 9)
                served.engine.show(whole(who, tables=[[2]], states=[CACHED, FREE, HELD, FREE]))
                told = await watching.drawn()
                assert told["pages"] == "1020"
                assert told["cached"] == [0]
                assert told["slots"] == [
                    {"name": 7, "id": "", "sample": 0, "tenant": "default", "prompt": 3,
                     "most": 9, "computed": 4, "total": 5, "pages": [2]},
                ]  # fmt: skip
                served.engine.show(news({0: FREE, 3: CACHED}, {7: (5, 6)}))
                change = await watching.next("change")
                assert change["pages"] == [[0, 3], "01"]
                assert change["progress"] == [[7, 5, 6]]
                assert change["version"] == told["version"] + 1
                async with watch(port) as late:
                    assert (await late.drawn())["pages"] == "0021"
            await until(lambda: not len(served.service.watchers), "the watchers are still there")

    asyncio.run(test())


def test_the_engine_draws_only_while_somebody_looks(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served, listening(served) as port:
            listeners = len(served.engine._listeners)
            async with watch(port) as one:
                await one.next()
                async with watch(port) as another:
                    await another.next()
                assert served.engine.watched == [watchers.INTERVAL]
            await until(lambda: None in served.engine.watched, "the engine was not told to stop")
            assert len(served.engine._listeners) == listeners
            async with watch(port) as again:
                await again.next()
            assert served.engine.watched == [watchers.INTERVAL, None, watchers.INTERVAL]

    asyncio.run(test())


def test_a_difference_on_its_way_to_who_has_left_is_none_for_who_comes(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served, listening(served) as port, watch(port) as watching:
            await watching.next()
            served.engine.show(news({2: HELD}, {5: (1, 2)}))
            served.engine.show(whole(states=[FREE, CACHED]))
            assert (await watching.drawn())["pages"] == "01"

    asyncio.run(test())


def test_a_map_that_cannot_be_kept_disturbs_nobody(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with serve() as served, listening(served) as port, watch(port) as watching:
            await watching.next()
            served.engine.show(whole(states=[FREE, HELD]))
            await watching.drawn()
            served.engine.show(news({7: HELD}))  # there is no such page
            assert (await watching.next("whole"))["pages"] == ""
            assert served.engine.watched == [watchers.INTERVAL, None]
            assert (await served.complete(max_tokens=2)).status_code == 200

    asyncio.run(test())
    assert "cannot be kept" in caplog.text


def test_only_the_head_of_the_stream_is_sent_where_that_is_asked_for(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served, listening(served) as port:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                answer = await client.head("/live")
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert not len(served.service.watchers)

    asyncio.run(test())


def test_a_tenant_sees_its_own_and_only_that_there_are_others(serve: Serve) -> None:
    config = {"api_key": ["ours", "theirs"], "admin_api_key": ["admin"]}

    async def test() -> None:
        async with serve(config=config, delay=60.0) as served, listening(served) as port:
            keys = {"x-api-key": "ours"}, {"x-api-key": "theirs"}
            asked = {"prompt": "a secret", "max_tokens": 3}
            asking = [
                asyncio.create_task(served.client.post("/v1/completions", json=asked, headers=key))
                for key in keys
            ]
            await until(lambda: len(served.engine.streams) == 2, "they did not come in")
            ours, theirs = (stream.generation for stream in served.engine.streams)
            picture = whole(
                Occupant(1, ours.request_id, 0, ours.tenant, 3, 9),
                Occupant(2, theirs.request_id, 0, theirs.tenant, 3, 9),
                tables=[[0, 1], [1, 2]],
                states=[PUBLISHED, SHARED, PUBLISHED, CACHED, FREE],
            )
            async with watch(port, "ours") as own, watch(port, "admin") as all_of_it:
                await own.next()
                await all_of_it.next()
                served.engine.show(picture)
                told, full = await own.drawn(), await all_of_it.drawn()
                served.engine.show(news({2: SHARED}, {1: (5, 6), 2: (5, 6)}))
                change = await own.next("change")
                served.engine.happen(events.Preempted(0.0, theirs.request_id, 0, 8, 1))
                state = await own.next("server")
                full_state = await all_of_it.next("server")
            for task in asking:
                task.cancel()
            trails = {trail.tenant: trail.id for trail in served.service.requests.alive()}
            assert told["pages"] == "34210"  # that they publish theirs is theirs to know
            assert full["pages"] == "34310"
            assert [slot["id"] for slot in told["slots"]] == [trails[ours.tenant]]
            assert [slot["id"] for slot in full["slots"]] == list(trails.values())
            assert told["taken"] == full["taken"] == 2
            assert change["progress"] == [[1, 5, 6]]
            assert change["pages"] == [[], ""]  # the others do something with one of theirs
            assert [row["tenant"] for row in state["tenants"]] == [ours.tenant]
            assert {row["tenant"] for row in full_state["tenants"]} == {ours.tenant, theirs.tenant}
            assert (state["more_tenants"], state["others_waiting"]) == (1, 1)
            assert [row["id"] for row in state["line"]] == [trails[ours.tenant]]
            assert len(full_state["line"]) == 2
            seen = json.dumps([told, change, state])
            assert theirs.tenant not in seen
            assert trails[theirs.tenant] not in seen
            assert "secret" not in seen + json.dumps([full, full_state])

    asyncio.run(test())


def test_a_page_that_a_tenant_lets_go_looks_like_the_others() -> None:
    live, own = LiveMap(), Viewer("a")
    live.take(
        whole(
            Occupant(1, "x", 0, "a", 3, 9),
            Occupant(2, "y", 0, "b", 3, 9),
            tables=[[0, 1], [1, 2]],
            states=[HELD, SHARED, PUBLISHED],
        )
    )
    left = Picture(False, [], [1], [2], [5], [6], [], [0, 1, 2], bytes([FREE, PUBLISHED, SHARED]))
    live.take(left)
    assert own.change(live, left, str)["pages"] == [[0, 1], "02"]
    assert EVERYBODY.change(live, left, str)["pages"] == [[0, 1, 2], "034"]


def test_there_is_room_for_so_many_and_some_of_it_is_for_administrators(serve: Serve) -> None:
    config = {"api_key": ["a", "b", "c"], "admin_api_key": ["admin"]}

    async def test() -> None:
        async with (
            serve(config=config) as served,
            listening(served) as port,
            contextlib.AsyncExitStack() as stack,
        ):
            there: list[Watching] = []

            async def come(key: str) -> int:
                watching = await stack.enter_async_context(watch(port, key))
                if watching.answer.status_code == 200:
                    there.append(watching)
                    await watching.next()
                    return 200
                error = watching.answer.json()["error"]
                assert error["code"] == "too_many_watchers"
                assert "retry-after" in watching.answer.headers
                return watching.answer.status_code

            assert [await come("a") for _ in range(5)] == [200] * 4 + [503]
            assert [await come("b") for _ in range(4)] == [200] * 4
            assert await come("c") == 503
            assert [await come("admin") for _ in range(9)] == [200] * 8 + [503]
            assert len(served.service.watchers) == watchers.MOST_WATCHERS
            await stack.aclose()
            await until(lambda: not len(served.service.watchers), "a place was not given back")
            assert await come("c") == 200

    asyncio.run(test())


def test_for_a_browser_that_does_not_read_nothing_is_kept(serve: Serve) -> None:
    pages = 20_000
    pictures = 400

    async def test() -> None:
        async with serve() as served, listening(served, send_buffer=8 << 10) as port:
            raw = await Raw.get(port, "/live", window=8 << 10)
            await raw.until(b'"type":"server"')
            served.engine.show(whole(states=[FREE] * pages))
            for number in range(pictures):
                state = HELD if number % 2 else CACHED
                served.engine.show(news(dict.fromkeys(range(2000), state)))
                await asyncio.sleep(0)
            exchange = next(iter(served.service.live))
            assert exchange.write_began is not None  # it waits for the reader, and with it all else
            served.engine.show(news({0: SHARED}))
            newest = served.service.watchers.version
            read = b""
            async with asyncio.timeout(PATIENCE):
                while b'"version":%d,' % newest not in read.rpartition(b"data: ")[2]:
                    read += await raw.reader.read(1 << 16)
            frames = read.split(b"data: ")
            assert len(frames) < pictures // 4
            assert b'"type":"whole"' in frames[-1]
            raw.reset()

    asyncio.run(test())


def test_after_a_crash_the_map_starts_anew(serve: Serve) -> None:
    async def test() -> None:
        async with serve(num_pages=3) as served, listening(served) as port:
            engine = served.engine
            async with watch(port) as watching:
                await watching.next()
                engine.show(whole(states=[HELD, SHARED, CACHED]))
                await watching.drawn()
                engine.state, engine.alive = EngineState.RECOVERING, False
                engine._say([])
                engine._say([])  # somebody who waits for the next engine has left
                told = await watching.next("whole")
                assert told["pages"] == "000"
                assert [row["what"] for row in told["happened"]] == ["engine_lost"]
                state = await watching.next("server")
                assert state["engine"] == "recovering"
                assert "being restarted" in state["words"]
                engine.state, engine.alive, engine.epoch = EngineState.READY, True, 2
                engine.show(whole(states=[HELD, FREE, FREE]))
                told = await watching.next("whole")
                assert (told["pages"], told["epoch"]) == ("200", 2)

    asyncio.run(test())


def test_the_page_needs_no_key_and_the_stream_does(serve: Serve) -> None:
    async def test() -> None:
        async with serve(config={"api_key": ["secret"]}) as served, listening(served) as port:
            client = served.client
            for path in ("/", "/dashboard", "/dashboard.js", "/dashboard_map.js", "/dashboard.css"):
                answer = await client.get(path)
                assert answer.status_code == 200, path
                assert "'unsafe" not in answer.headers["content-security-policy"]
                assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", answer.text)
            html = (await client.get("/")).text
            assert not re.search(r"<style|style=|<script(?![^>]*src=)|\son\w+=", html)
            assert (await client.get("/live")).status_code == 401
            async with watch(port, "secret") as watching:
                assert (await watching.next())["phase"] == "ready"

    asyncio.run(test())


def test_only_pages_of_this_server_may_watch(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served, listening(served) as port:
            assert await status(port, host="evil.example") == 403
            assert await status(port, origin="http://evil.example") == 403
            assert await status(port, **{"sec-fetch-site": "cross-site"}) == 403
            assert await status(port, **{"sec-fetch-site": "same-origin"}) == 200
            assert await status(port, host="localhost:8000") == 200
        allowed = {"allowed_origins": ["https://ops.example"]}
        async with serve(config=allowed) as served, listening(served) as port:
            other = {"origin": "https://ops.example", "sec-fetch-site": "cross-site"}
            assert await status(port, **other) == 200
            assert await status(port, host="ops.example") == 200
            assert await status(port, host="evil.example") == 403
        async with serve(config={"api_key": ["k"]}) as served, listening(served) as port:
            assert await status(port, host="any.example", **{"x-api-key": "k"}) == 200

    asyncio.run(test())


def test_without_a_dashboard_there_is_none(serve: Serve) -> None:
    async def test() -> None:
        async with serve(config={"enable_dashboard": False, "api_key": ["k"]}) as served:
            for path in ("/", "/dashboard.js", "/live"):
                assert (await served.client.get(path)).status_code == 401
                answer = await served.client.get(path, headers={"x-api-key": "k"})
                assert answer.status_code == 404

    asyncio.run(test())


def test_the_end_of_the_server_ends_every_watch(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served, listening(served) as port, watch(port) as watching:
            await watching.next()
            assert served.service.metrics.in_flight == 0  # draining waits for nobody who watches
            served.service.drain()
            assert (await watching.next("server"))["words"].startswith("Shutting down")
            served.service.watchers.close()
            with pytest.raises(EOFError):
                await watching.next("nothing that there is")

    asyncio.run(test())


def words(served: Served, preemptions: int = 0, **snapshot: Any) -> str:
    served.service.metrics.snapshot = Snapshot(pages_total=64, **snapshot)
    return in_words(served.service, preemptions)


def test_who_comes_between_two_pictures_hears_of_no_step_twice(serve: Serve) -> None:
    async def test() -> None:
        async with serve(delay=0.001) as served, listening(served) as port, watch(port) as first:
            await first.next()
            served.engine.show(whole(states=[FREE]))
            await first.drawn()
            served.engine.show(news({0: HELD}))
            await first.next("change")
            assert (await served.complete(max_tokens=5)).status_code == 200
            # The steps are noted, and told with the picture that is to come.
            async with watch(port) as late:
                told = [await late.drawn()]
                served.engine.show(news({0: CACHED}))
                told.append(await late.next("change"))
            heard = [step["step"] for message in told for step in message["steps"]]
            assert len(heard) == 5
            assert len(set(heard)) == 5

    asyncio.run(test())


def test_it_says_in_words_how_it_is(serve: Serve) -> None:
    async def test() -> None:
        async with serve(max_num_seqs=4) as served:
            assert words(served) == "Idle."
            assert "3 pages" in words(served, pages_cached=3)
            full = {"running": 4, "waiting": 2, "waiting_by_reason": {"slots": 1, "queued": 1}}
            assert words(served, **full) == (
                "4 sequences in 4 slots, 2 waiting: too few slots are free."
            )
            assert "2 preemptions" in words(served, 2, running=1)
            served.engine.alive = False
            assert "No step has ended" in words(served, running=1)
            served.engine.loading = Loading(1, "weights", 0.4)
            served.service.phase = Phase.LOADING
            assert words(served) == "The model is being loaded: weights, 40%."
            served.engine.state = EngineState.DEAD
            assert "cannot be restarted" in words(served)

    asyncio.run(test())


def test_the_tape_says_what_each_step_did() -> None:
    tape = StepTape(lambda engine_id: (engine_id.upper(), "a"))
    happened = (
        events.Admitted(1.0, "x", 0, "a", 16, 1, 0.5),
        events.Preempted(2.0, "y", 0, 40, 1),
        events.Stepped(3.0, 7, tokens=20, prefill_tokens=12, sequences=5, draws=5, seconds=0.25),
        events.Finished(4.0, "x", 0, "a", "stop", 3, 2, 0, 0),
    )
    tape.hear(StepResult(1, 6, [], [], Snapshot(draft_tokens=10)))
    tape.version = 1
    result = StepResult(1, 7, [], [], Snapshot(draft_tokens=13), [encode(e) for e in happened])
    tape.hear(result)
    told = tape.told(EVERYBODY, range(1, 2))
    assert told["steps"] == [
        {"step": 7, "seconds": 0.25, "prefill": 12, "decode": 5, "drafts": 3, "sequences": 5,
         "entered": 1, "left": 0, "preempted": 1}
    ]  # fmt: skip
    assert [(row["what"], row["id"]) for row in told["happened"]] == [  # type: ignore[attr-defined]
        ("entered", "X"),
        ("preempted", "Y"),
        ("left", "X"),
    ]
    assert (
        tape.told(EVERYBODY, range(1))
        == tape.told(EVERYBODY, range(2, 9))
        == {"steps": [], "happened": []}
    )
    others = tape.told(Viewer("b"), range(2))["happened"]
    assert others[0] == {"time": 1.0, "what": "entered"}  # type: ignore[index]
    assert (tape.preemptions_since(1.5), tape.preemptions_since(2.5)) == (1, 0)


def test_quantiles_lie_in_the_bucket_where_they_are() -> None:
    bounds = (1.0, 2.0, 4.0)
    assert quantile(bounds, [0, 0, 0, 0], 0.5) is None
    assert quantile(bounds, [0, 10, 0, 0], 0.5) == 1.5
    assert quantile(bounds, [50, 0, 50, 0], 0.99) == 3.96
    assert quantile(bounds, [0, 0, 0, 5], 0.5) == 4.0
