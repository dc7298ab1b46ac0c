"""Tenants: the file, what each may use, and what a refusal says."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.served import Serve, Served, until
from turnstile.server.config import ConfigError
from turnstile.server.tenants import Tenant, digest_of, read_tenants

EXAMPLE = Path(__file__).parents[2] / "deploy" / "tenants.toml"


def write(path: Path, text: str) -> Path:
    file = path / "tenants.toml"
    file.write_text(text)
    return file


def parsed(path: Path, text: str) -> dict[bytes, Tenant]:
    return dict(read_tenants(write(path, text)))


async def complete(served: Served, key: str, **body: Any) -> httpx.Response:
    body = {"prompt": "hello", "max_tokens": 2} | body
    return await served.client.post("/v1/completions", json=body, headers={"x-api-key": key})


def test_the_example_file_is_valid() -> None:
    tenants = {tenant.name: tenant for _, tenant in read_tenants(EXAMPLE)}
    assert tenants["interactive"].weight == 4.0
    assert tenants["batch"].limits.tokens_per_minute == 120_000
    assert tenants["operations"].admin


def test_keys_are_plain_or_hashed_and_defaults_fill_in(tmp_path: Path) -> None:
    hashed = hashlib.sha256(b"secret-2").hexdigest()
    found = parsed(
        tmp_path,
        f"""
        defaults.weight = 3
        [tenants.a]
        keys = ["secret-1", "sha256:{hashed}"]
        cache_sharing = "all"
        [tenants.b]
        keys = ["other"]
        weight = 0.5
        """,
    )
    assert found[digest_of("secret-1")] is found[digest_of("secret-2")]
    assert found[digest_of("secret-1")].weight == 3.0
    assert found[digest_of("secret-1")].share_cache
    assert found[digest_of("other")] == Tenant("b", weight=0.5, priority=0)


WRONG = [
    ("nonsense = 1", "nonsense"),
    ("", "tenants"),
    ("tenants = 3", "tenants"),
    ("[tenants.a]", "tenants.a.keys"),
    ("[tenants.a]\nkeys = []", "tenants.a.keys"),
    ("[tenants.a]\nkeys = ['']", "tenants.a.keys"),
    ("[tenants.a]\nkeys = ['sha256:12']", "tenants.a.keys"),
    ("[tenants.a]\nkeys = ['k\u00e9y']", "tenants.a.keys"),
    ("[tenants.a]\nkeys = ['k']\nwieght = 1", "tenants.a.wieght"),
    ("[tenants.a]\nkeys = ['k']\nweight = 0", "tenants.a.weight"),
    ("[tenants.a]\nkeys = ['k']\nweight = nan", "tenants.a.weight"),
    ("[tenants.a]\nkeys = ['k']\nweight = true", "tenants.a.weight"),
    (f"[tenants.a]\nkeys = ['k']\nweight = 1{'0' * 400}", "tenants.a.weight"),
    (f"[tenants.a]\nkeys = ['k']\nweight = 1{'0' * 5000}", "too many digits"),
    (f"[tenants.a]\nkeys = ['k']\nweight = 0x1{'0' * 5000}", "tenants.a.weight"),
    (f"a = {'[' * 20_000}{']' * 20_000}", "too deeply"),
    ("[tenants.a]\nkeys = ['k']\nmax_concurrent = 0", "tenants.a.max_concurrent"),
    ("[tenants.a]\nkeys = ['k']\ntokens_per_minute = 1.5", "tenants.a.tokens_per_minute"),
    ("[tenants.a]\nkeys = ['k']\npriority = 'high'", "tenants.a.priority"),
    ("[tenants.a]\nkeys = ['k']\nadmin = 1", "tenants.a.admin"),
    ("[tenants.a]\nkeys = ['k']\ncache_sharing = 'some'", "tenants.a.cache_sharing"),
    ("[tenants.a]\nkeys = ['k']\n[tenants.b]\nkeys = ['k']", "tenants.b.keys"),
    ("[tenants.'a b']\nkeys = ['k']", "tenants.a b"),
    ("defaults.keys = ['k']\n[tenants.a]\nkeys = ['x']", "defaults.keys"),
    ("defaults.weight = -1\n[tenants.a]\nkeys = ['x']", "defaults.weight"),
    ("[tenants", "not valid TOML"),
]


@pytest.mark.parametrize(("text", "field"), WRONG)
def test_a_mistake_is_named_by_its_place(tmp_path: Path, text: str, field: str) -> None:
    with pytest.raises(ConfigError, match=field) as raised:
        parsed(tmp_path, text)
    assert "tenants.toml" in str(raised.value)


def test_a_byte_order_mark_is_no_part_of_the_file(tmp_path: Path) -> None:
    found = parsed(tmp_path, "\ufeff[tenants.a]\nkeys = ['k']")
    assert found[digest_of("k")].name == "a"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml"):
        read_tenants(tmp_path / "none.toml")


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_either_tenants_or_a_config_error(data: bytes) -> None:
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"tenants-{os.getpid()}.toml"
    path.write_bytes(data)
    try:
        read_tenants(path)
    except ConfigError:
        pass
    finally:
        path.unlink()


TWO = """
[tenants.a]
keys = ["key-a"]
weight = 2.5
max_concurrent = 2
[tenants.b]
keys = ["key-b"]
priority = 5
cache_sharing = "all"
[tenants.boss]
keys = ["key-boss"]
admin = true
"""


def test_a_tenant_reaches_the_engine_with_weight_priority_and_salt(
    serve: Serve, tmp_path: Path
) -> None:
    async def scenario() -> None:
        config = {"tenants": str(write(tmp_path, TWO))}
        async with serve(config=config) as served:
            assert (await complete(served, "key-a", priority=3)).status_code == 200
            assert (await complete(served, "key-b")).status_code == 200
            assert (await complete(served, "key-c")).status_code == 401
            assert (await served.complete()).status_code == 401
            one, two = (stream.generation for stream in served.engine.streams)
            assert (one.tenant, one.weight, one.priority, one.salt) == ("a", 2.5, 3, b"a")
            assert (two.tenant, two.weight, two.priority, two.salt) == ("b", 1.0, 5, b"")
            for key, status in (("key-a", 403), ("key-boss", 200)):
                answer = await served.client.post("/reset_prefix_cache", headers={"x-api-key": key})
                assert answer.status_code == status

    asyncio.run(scenario())


def test_a_request_is_at_most_as_urgent_as_its_tenant(serve: Serve, tmp_path: Path) -> None:
    async def scenario() -> None:
        config = {"tenants": str(write(tmp_path, TWO))}
        async with serve(config=config) as served:
            for key, priority, status in (
                ("key-a", -1, 400),
                ("key-a", 0, 200),
                ("key-b", 4, 400),
                ("key-b", 5, 200),
                ("key-b", 99, 200),
                ("key-b", 10**7, 400),
            ):
                answer = await complete(served, key, priority=priority)
                assert answer.status_code == status, (key, priority)
                if status == 400:
                    assert answer.json()["error"]["param"] == "priority"

    asyncio.run(scenario())


def test_a_tenants_own_limit_is_429_and_others_are_served(serve: Serve, tmp_path: Path) -> None:
    async def scenario() -> None:
        config = {"tenants": str(write(tmp_path, TWO))}
        async with serve(config=config) as served:
            served.engine.held = True
            running = [asyncio.create_task(complete(served, "key-a")) for _ in range(2)]
            await until(lambda: len(served.engine.streams) == 2)
            refused = await complete(served, "key-a")
            assert refused.status_code == 429
            error = refused.json()["error"]
            assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
            assert "max_concurrent" in error["message"]
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert refused.headers["x-should-retry"] == "true"
            never = await complete(served, "key-a", n=3)
            assert never.status_code == 429
            assert never.headers["x-should-retry"] == "false"
            assert "retry-after" not in never.headers
            served.engine.held = False
            assert (await complete(served, "key-b")).status_code == 200
            for answer in await asyncio.gather(*running):
                assert answer.status_code == 200
            assert (await complete(served, "key-a")).status_code == 200

    asyncio.run(scenario())


def test_limits_are_told_in_headers_and_only_where_they_are_set(
    serve: Serve, tmp_path: Path
) -> None:
    text = TWO + "[tenants.c]\nkeys=['key-c']\nrequests_per_minute=2\ntokens_per_minute=600\n"

    async def scenario() -> None:
        async with serve(config={"tenants": str(write(tmp_path, text))}) as served:
            first = await complete(served, "key-c")
            assert first.headers["x-ratelimit-limit-requests"] == "2"
            assert first.headers["x-ratelimit-remaining-requests"] == "1"
            assert first.headers["x-ratelimit-reset-requests"] == "30s"
            assert first.headers["x-ratelimit-limit-tokens"] == "600"
            assert 580 < int(first.headers["x-ratelimit-remaining-tokens"]) < 600
            assert (await complete(served, "key-c")).status_code == 200
            refused = await complete(served, "key-c")
            assert refused.status_code == 429
            assert refused.headers["x-ratelimit-remaining-requests"] == "0"
            assert 25 <= int(refused.headers["retry-after"]) <= 30
            other = await complete(served, "key-a")
            assert not [name for name in other.headers if name.startswith("x-ratelimit")]

    asyncio.run(scenario())


def test_a_reload_takes_new_tenants_and_a_wrong_file_changes_nothing(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        file = write(tmp_path, TWO)
        async with serve(config={"tenants": str(file)}) as served:
            file.write_text(TWO.replace("key-a", "key-new"))
            served.service.reload_keys()
            assert (await complete(served, "key-new")).status_code == 200
            assert (await complete(served, "key-a")).status_code == 401
            file.write_text(TWO.replace("weight = 2.5", "weight = -2.5"))
            served.service.reload_keys()
            assert "tenants.a.weight" in caplog.text
            assert (await complete(served, "key-new")).status_code == 200
            file.unlink()
            served.service.reload_keys()
            assert (await complete(served, "key-new")).status_code == 200

    asyncio.run(scenario())


def test_sighup_reads_the_tenants_file_again(serve: Serve, tmp_path: Path) -> None:
    async def scenario() -> None:
        file = write(tmp_path, TWO)
        async with serve(config={"tenants": str(file)}) as served:
            life: Any = _life(served)
            life._handle_signals()
            file.write_text(TWO.replace("key-a", "key-new"))
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0)
            for _ in range(100):
                if (await complete(served, "key-new")).status_code == 200:
                    break
                await asyncio.sleep(0.01)
            else:
                raise AssertionError("SIGHUP was not heard")

    asyncio.run(scenario())


@pytest.mark.parametrize("terminal", [False, True])
def test_without_tenants_the_signal_changes_nothing_and_a_closed_terminal_drains(
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    terminal: bool,
) -> None:
    monkeypatch.setattr(os, "isatty", lambda descriptor: terminal)

    async def scenario() -> None:
        async with serve() as served:
            life: Any = _life(served)
            life._handle_signals()
            for _ in range(2):  # the kernel and the shell may both say so
                os.kill(os.getpid(), signal.SIGHUP)
                await asyncio.sleep(0.05)
            assert life._first.is_set() == terminal
            assert not life._second.is_set()

    with caplog.at_level("INFO", "turnstile.server"):
        asyncio.run(scenario())
    assert ("nothing to reload" in caplog.text) != terminal


def _life(served: Served) -> Any:
    from turnstile.server.run import Life

    async def never() -> Any:
        raise AssertionError

    listener: Any = None
    return Life(served.service, listener, never)


def test_the_ids_of_chats_are_remembered_for_whom_pages_are_shared_with(serve: Serve) -> None:
    async def hits(*others: dict[str, Any], **settings: Any) -> list[int]:
        """Sections found after a chat with a long system prompt, and after each of the others."""
        config = {"api_key": ["a-key", "b-key"], "admin_api_key": ["boss"]}
        async with serve(config=config, max_model_len=4096, num_pages=512, **settings) as served:
            sections = served.service.require_model()[0].sections
            found, prompts = [], []
            for number, body in enumerate(({}, *others)):
                key = body.get("key", "a-key")
                if key == "boss":
                    await served.client.post("/reset_prefix_cache", headers={"x-api-key": key})
                    continue
                system = {"role": "system", "content": "the rules " * 60}
                asked = {"role": "user", "content": f"question {number}"}
                fields = {k: v for k, v in body.items() if k != "key"}
                answer = await served.client.post(
                    "/v1/chat/completions",
                    json={"messages": [system, asked], "max_tokens": 1} | fields,
                    headers={"x-api-key": key},
                )
                assert answer.status_code == 200, answer.text
                found.append(0 if sections is None else sections.hits)
                prompts.append(served.engine.streams[-1].generation.prompt)
            assert len(set(map(tuple, prompts))) == len(prompts), "each had its own question"
            scraped = (await served.client.get("/metrics", headers={"x-api-key": "boss"})).text
            assert f"turnstile_kept_texts_found_total {found[-1]:.1f}\n" in scraped
            kept = 0 if sections is None else sections.num_tokens
            assert f"turnstile_kept_text_tokens {kept:.1f}\n" in scraped
            return found

    async def test() -> None:
        other, salted = {"key": "b-key"}, {"cache_salt": "x"}
        assert await hits({}, other, salted, {}, salted) == [0, 1, 1, 1, 2, 3]
        assert await hits({}, {"key": "boss"}, {}, {}) == [0, 1, 1, 2]
        assert await hits({}, {}, prefix_caching=False) == [0, 0, 0]

    asyncio.run(test())
