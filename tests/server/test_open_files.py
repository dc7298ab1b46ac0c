"""What happens when the process may open no more files: nobody is left without a word."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
from collections.abc import Iterator

import httpx
import pytest

from server.served import PATIENCE, Serve, listening, until
from turnstile.server.http.open_files import MOST_FILES, OpenFiles

GET = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"


def first_free_file() -> int:
    number = os.dup(0)
    os.close(number)
    return number


def test_where_files_run_out_newcomers_are_told_and_old_ones_served(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with serve() as served, listening(served) as port:
            files = served.service.files
            files.limit = 4 * (first_free_file() + 20) // 3  # a quarter is kept
            stayed, turned_away = [], []
            for _ in range(40):  # ours and the server's ends: two files each
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(GET)
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)
                (stayed if b" 200 OK" in head else turned_away).append((reader, writer, head))
            assert stayed
            assert turned_away
            for reader, _, head in turned_away:
                assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
                assert b"\r\nretry-after: 1\r\n" in head
                length = int(re.findall(rb"content-length: (\d+)", head)[0])
                body = await asyncio.wait_for(reader.readexactly(length), PATIENCE)
                assert json.loads(body)["error"]["code"] == "engine_overloaded"
            assert files.refused == len(turned_away)
            told = [line for line in caplog.messages if "Too many open files" in line]
            assert len(told) == 1, "it is told once, not for each"
            # The connections that were there before go on.
            reader, writer, _ = stayed[0]
            writer.write(GET)
            while b" 200 OK" not in await asyncio.wait_for(reader.readline(), PATIENCE):
                pass
            for _, writer, _ in (*stayed, *turned_away):
                writer.close()
            # And so, without anybody's help, does everything.
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:

                async def comes_in() -> bool:
                    answer = await client.get("/metrics")
                    return answer.status_code == 200 and "refused" in answer.text

                async with asyncio.timeout(PATIENCE):
                    while not await comes_in():
                        await asyncio.sleep(0.01)
                page = (await client.get("/metrics")).text
            assert f"turnstile_connections_refused_total {files.refused}" in page

    asyncio.run(test())


def test_who_is_turned_away_and_sends_nothing_does_not_stay(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served, listening(served) as port:
            served.service.files.limit = 8  # fewer than are open
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
            writer.close()
            await until(lambda: served.service.files.refused == 1)

    asyncio.run(test())


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """The process's own limits, put back afterwards."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_is_raised_to_what_the_queue_may_need(limits: tuple[int, int]) -> None:
    _, hard = limits
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most // 2, hard))
    files = OpenFiles()
    files.raise_limit(connections=100)
    assert files.limit == most
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)


def test_too_low_a_limit_is_told_at_start(caplog: pytest.LogCaptureFixture) -> None:
    files = OpenFiles(limit=1024)
    room = files.for_connections
    assert room is not None
    assert room + files.backlog < 1024
    files.warn_if_too_few(room)
    assert not caplog.messages
    files.warn_if_too_few(room + 1)
    assert f"1024 open files leaves {room} for connections" in caplog.text
    assert "--max-num-queued-reqs" in caplog.text
    assert "LimitNOFILE=" in caplog.text


def test_a_line_about_files_comes_now_and_then_and_counts_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    times = iter([0.0, 1.0, 2.0, 60.0])
    files = OpenFiles(limit=100, clock=lambda: next(times))
    for _ in range(4):
        files.turn_away()
    assert files.refused == 4
    assert ["1 connection " in line for line in caplog.messages] == [True, False]
    assert "3 connections " in caplog.messages[1]
