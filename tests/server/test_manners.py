"""Keys, origins, request ids, phases: what surrounds every route."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from server.served import Serve, events, until
from turnstile.engine.client import EngineState
from turnstile.server.routes import ROUTES

PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type",
}


def test_a_key_is_needed_everywhere_but_at_the_probes(serve: Serve) -> None:
    async def test() -> None:
        async with serve(config={"api_key": ["secret", "other"]}) as served:
            client = served.client
            for path in ("/v1/models", "/metrics", "/server_info", "/docs", "/nowhere"):
                answer = await client.get(path)
                assert answer.status_code == 401, path
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
            for path in ("/health", "/livez", "/readyz", "/ping"):
                assert (await client.get(path)).status_code == 200
            good = [
                {"authorization": "Bearer secret"},
                {"authorization": "bearer other"},
                {"x-api-key": "secret"},
            ]
            bad = [
                {"authorization": "Bearer wrong"},
                {"authorization": "Basic secret"},
                {"authorization": "secret"},
                {"x-api-key": ""},
                {"authorization": "Bearer "},
            ]
            for headers in good:
                assert (await client.get("/v1/models", headers=headers)).status_code == 200
            for headers in bad:
                assert (await client.get("/v1/models", headers=headers)).status_code == 401

    asyncio.run(test())


def test_the_key_is_checked_before_the_body_is_read(serve: Serve) -> None:
    async def test() -> None:
        async with serve(config={"api_key": ["secret"]}) as served:

            async def never() -> Any:
                raise AssertionError("the body was read")
                yield b""

            answer = await served.client.post("/v1/completions", content=never())
            assert answer.status_code == 401

    asyncio.run(test())


def test_holders_of_different_keys_are_different_tenants(serve: Serve) -> None:
    async def test() -> None:
        async with serve(config={"api_key": ["a-key", "b-key"]}) as served:
            for key in ("a-key", "b-key"):
                answer = await served.client.post(
                    "/v1/completions",
                    json={"prompt": "hi", "max_tokens": 1},
                    headers={"x-api-key": key},
                )
                assert answer.status_code == 200
            one, two = (stream.generation for stream in served.engine.streams)
            assert one.tenant != two.tenant
            assert one.salt != two.salt
            assert "a-key" not in one.tenant

    asyncio.run(test())


def test_cache_salt_and_sharing_decide_who_shares_pages(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served:
            await served.complete(max_tokens=1)
            await served.complete(max_tokens=1, cache_salt="x")
            await served.complete(max_tokens=1, cache_salt="x")
            salts = [stream.generation.salt for stream in served.engine.streams]
            assert salts[0] == b""
            assert salts[1] == salts[2] != b""

    asyncio.run(test())


def test_admin_routes_need_an_admin_key(serve: Serve) -> None:
    async def test() -> None:
        config = {"api_key": ["user"], "admin_api_key": ["boss"]}
        async with serve(config=config) as served:
            for key, status in (("user", 403), ("boss", 200)):
                headers = {"x-api-key": key}
                answer = await served.client.post("/reset_prefix_cache", headers=headers)
                assert answer.status_code == status
            assert served.engine.resets == 1

    asyncio.run(test())


def test_a_foreign_page_cannot_reset_the_cache_of_an_open_server(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served:
            for origin, status in (("http://evil.example", 403), ("http://localhost:8000", 200)):
                headers = {"origin": origin, "host": "localhost:8000"}
                answer = await served.client.post("/reset_prefix_cache", headers=headers)
                assert answer.status_code == status

    asyncio.run(test())


# The name of a page that points at 127.0.0.1 now: to the browser it and the server are one origin.
@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/v1/completions"])
def test_a_rebound_name_reaches_no_server_without_keys(serve: Serve, path: str) -> None:
    async def statuses(hosts: list[str], **config: Any) -> list[int]:
        async with serve(config=config) as served:
            key = {"x-api-key": "k"}
            asked = {"json": {"prompt": "hello", "max_tokens": 1}}
            return [
                (
                    await served.client.post(
                        path, headers=key | {"host": host, "origin": f"http://{host}"}, **asked
                    )
                ).status_code
                for host in hosts
            ]

    async def test() -> None:
        names = ["evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", ""]
        own = ["localhost", "ui.localhost:80", "127.0.0.1:8000", "[::1]:8000", "192.0.2.1"]
        assert await statuses(names) == [403] * 4
        assert await statuses(own) == [200] * 5
        allowed = ["http://evil.example:8000"]
        assert await statuses(names[:2], allowed_origins=allowed) == [200, 403]
        # With a key the page would need one; on another address names are what it is reached by.
        assert await statuses(names[:1], api_key=["k"]) == [200]
        assert await statuses(names[:1], host="0.0.0.0", allow_unauthenticated=True) == [200]
        async with serve() as served:
            # Programs send no origin, and may use any name: a proxy's, for example.
            plain = await served.client.post(
                "/v1/completions", json={"prompt": "a", "max_tokens": 1}
            )
            assert plain.status_code == 200

    asyncio.run(test())


@pytest.mark.parametrize(
    "path", ["/v1/requests", "/metrics", "/v1/models", "/server_info", "/docs", "/load", "/live"]
)
def test_a_rebound_name_reads_nothing_of_a_server_without_keys(serve: Serve, path: str) -> None:
    """A browser names no origin to what it takes for the page's own server, so ``Host`` must do."""

    async def status(name: str, method: str = "GET", **config: Any) -> int:
        headers = {"host": name, "x-api-key": "k"}
        async with serve(config=config) as served:
            # The head tells of /live, which does not end.
            method = "HEAD" if path == "/live" else method
            return (await served.client.request(method, path, headers=headers)).status_code

    async def test() -> None:
        for method in ("GET", "HEAD"):
            assert await status("evil.example:8000", method) == 403
            assert await status("localhost.evil.example", method) == 403
            assert await status("127.0.0.1:8000", method) == 200
        # A proxy's name is one that the operator tells.
        proxy = {"allowed_origins": ["https://llm.example"]}
        assert await status("LLM.example", **proxy) == 200
        assert await status("evil.example", **proxy) == 403
        # A page has no key; and on another address names are what it is reached by.
        assert await status("llm.example", api_key=["k"]) == 200
        assert await status("llm.example", host="0.0.0.0", allow_unauthenticated=True) == 200
        assert await status("llm.example", uds="/run/x.sock") == 200

    asyncio.run(test())


def test_probes_may_use_any_name(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served:
            answer = await served.client.get("/health", headers={"host": "llm.example"})
            assert answer.status_code == 200

    asyncio.run(test())


def test_preflights_of_allowed_origins_pass_without_a_key(serve: Serve) -> None:
    async def test() -> None:
        config = {"api_key": ["k"], "allowed_origins": ["https://good.example"]}
        async with serve(config=config) as served:
            path = "/v1/chat/completions"
            good = {"origin": "https://good.example"}
            answer = await served.client.options(path, headers=good | PREFLIGHT)
            assert answer.status_code == 204
            assert answer.headers["access-control-allow-origin"] == "https://good.example"
            assert "authorization" in answer.headers["access-control-allow-headers"]
            methods = answer.headers["access-control-allow-methods"].split(", ")
            assert {method for method, _, _ in ROUTES} <= set(methods)
            assert "access-control-allow-credentials" not in answer.headers
            # A page must be able to read that there is no such route.
            answer = await served.client.options("/nowhere", headers=good | PREFLIGHT)
            assert answer.status_code == 204
            bad = {"origin": "https://bad.example"}
            answer = await served.client.options("/nowhere", headers=bad | PREFLIGHT)
            assert answer.status_code == 404
            answer = await served.client.options(path, headers=bad | PREFLIGHT)
            assert not [name for name in answer.headers if name.startswith("access-control")]
            answer = await served.client.post(path, json={}, headers=good)
            assert answer.status_code == 401
            assert answer.headers["access-control-allow-origin"] == "https://good.example"

    asyncio.run(test())


def test_by_default_no_page_may_call(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served:
            headers = {"origin": "https://any.example"} | PREFLIGHT
            answer = await served.client.options("/v1/completions", headers=headers)
            assert not [name for name in answer.headers if name.startswith("access-control")]

    asyncio.run(test())


def test_request_ids_are_echoed_or_made(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served:
            for path in ("/health", "/nowhere"):
                answer = await served.client.get(path, headers={"x-request-id": "mine-1"})
                assert answer.headers["x-request-id"] == "mine-1"
                assert (await served.client.get(path)).headers["x-request-id"].startswith("req-")
            for unfit in ("a" * 200, "a b", "é"):
                headers = {"x-request-id": unfit.encode("latin-1")}
                answer = await served.client.get("/health", headers=headers)
                assert answer.headers["x-request-id"].startswith("req-")
            stream = await served.complete(stream=True, max_tokens=1)
            assert stream.headers["x-request-id"].startswith("req-")
            assert stream.headers["cache-control"] == "no-cache"
            assert stream.headers["x-accel-buffering"] == "no"

    asyncio.run(test())


def test_the_access_log_names_tokens_and_never_the_prompt(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with serve() as served:
            caplog.set_level("DEBUG")
            await served.complete("my secret words", max_tokens=3)
            await served.chat("my secret words", stop=["secret stop"], max_tokens=3)
            await served.client.get("/health")
            await served.client.get("/v1/no%1b[31mroute")

    asyncio.run(test())
    lines = [record for record in caplog.records if record.name == "turnstile.access"]
    assert len(lines) == 3
    fields = lines[0].fields  # type: ignore[attr-defined]
    assert fields["completion_tokens"] == 3
    assert fields["status"] == 200
    assert fields["request_id"].startswith("req-")
    assert "secret" not in caplog.text
    assert "\x1b" not in caplog.text


# B89: while loading, 503 and not a hang.
def test_while_loading_requests_are_told_to_come_back(serve: Serve) -> None:
    async def test() -> None:
        async with serve(ready=False) as served:
            answer = await served.complete()
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "model_loading"
            assert answer.headers["retry-after"] == "1"
            assert answer.headers["x-should-retry"] == "true"
            assert (await served.client.get("/health")).status_code == 503
            assert (await served.client.get("/readyz")).status_code == 503
            assert (await served.client.get("/livez")).status_code == 200
            assert (await served.client.get("/v1/models")).json()["data"] == []
            assert (await served.client.get("/metrics")).status_code == 200

    asyncio.run(test())


# B81: draining is told by its code, and the connection is closed.
def test_while_draining_new_requests_are_sent_elsewhere(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served:
            served.service.drain()
            answer = await served.complete()
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "shutting_down"
            assert answer.headers["connection"] == "close"
            assert (await served.client.get("/readyz")).status_code == 503
            assert (await served.client.get("/health")).status_code == 200

    asyncio.run(test())


def test_a_recovering_engine_is_a_503_with_a_retry(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served:
            served.engine.state = EngineState.RECOVERING
            answer = await served.complete()
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "engine_recovering"
            assert int(answer.headers["retry-after-ms"]) >= 1
            assert (await served.client.get("/readyz")).status_code == 503

    asyncio.run(test())


def test_an_unhealthy_engine_shows_at_the_probes(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served:
            served.engine.alive = False
            for path in ("/health", "/readyz", "/ping"):
                assert (await served.client.get(path)).status_code == 503
            # Streams survive a restart of the engine, but none of the whole process.
            assert (await served.client.get("/livez")).status_code == 200
            served.engine.state = EngineState.DEAD
            assert (await served.client.get("/livez")).status_code == 503

    asyncio.run(test())


def test_models_are_listed_under_all_their_names(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served:
            listed = (await served.client.get("/v1/models")).json()
            assert [card["id"] for card in listed["data"]] == ["tiny", "alias"]
            assert listed["data"][0]["max_model_len"] == 256
            assert (await served.client.get("/v1/models/alias")).json()["id"] == "alias"
            answer = await served.client.get("/v1/models/org/other")
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "model_not_found"

    asyncio.run(test())


def test_tokenize_and_detokenize_agree(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served:
            answer = await served.post("/tokenize", prompt="the é🙂", return_token_strs=True)
            tokens = answer.json()
            assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
            assert tokens["max_model_len"] == 256
            back = await served.post("/detokenize", tokens=tokens["tokens"])
            assert back.json() == {"prompt": "the é🙂"}
            messages = [{"role": "user", "content": "hi"}]
            chat = (await served.post("/tokenize", messages=messages)).json()
            usage = (await served.chat("hi", max_tokens=1)).json()["usage"]
            assert chat["count"] == usage["prompt_tokens"]
            assert (await served.post("/tokenize")).status_code == 400
            assert (await served.post("/detokenize", tokens=[320])).status_code == 400
            info = (await served.client.get("/tokenizer_info")).json()
            assert info["eos_token_id"] == 2

    asyncio.run(test())


def test_server_info_hides_secrets(serve: Serve) -> None:
    async def test() -> None:
        async with serve(config={"api_key": ["s3cret"]}) as served:
            headers = {"x-api-key": "s3cret"}
            answer = await served.client.get("/server_info", headers=headers)
            assert "s3cret" not in answer.text
            assert answer.json()["server"]["api_key"] == ["***"]
            assert answer.json()["engine"]["page_size"] == 16

    asyncio.run(test())


def test_only_administrators_are_told_of_files_processes_and_the_seed(serve: Serve) -> None:
    config = {"api_key": ["user"], "admin_api_key": ["boss"], "seed": 1234567, "trace": None}

    async def test() -> None:
        async with serve(config=config) as served:
            served.service.environment = {
                "engine_config": {"model": "/secret/place", "page_size": 16}
            }
            told = {
                key: (await served.client.get("/server_info", headers={"x-api-key": key})).json()
                for key in ("user", "boss")
            }
            assert told["boss"]["server"]["seed"] == 1234567
            assert told["boss"]["engine_config"]["model"] == "/secret/place"
            assert "pid" in told["boss"]["engine"]
            assert not {"seed", "tenants", "trace", "uds"} & {*told["user"]["server"]}
            assert told["user"]["engine_config"] == {
                "model": told["user"]["model"][0],
                "page_size": 16,
            }
            assert "pid" not in told["user"]["engine"]
            assert told["user"]["engine"]["page_size"] == 16  # what a simulation is made from

    asyncio.run(test())


def test_the_docs_need_nothing_from_elsewhere(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served:
            document = (await served.client.get("/openapi.json")).json()
            assert document["openapi"] == "3.1.0"
            schema = document["components"]["schemas"]["CompletionRequest"]["properties"]
            assert {"prompt", "temperature", "echo"} <= set(schema)
            page = await served.client.get("/docs")
            assert page.headers["content-type"].startswith("text/html")
            assert "http://" not in page.text
            assert "https://" not in page.text
        async with serve(config={"enable_docs": False}) as served:
            assert (await served.client.get("/docs")).status_code == 404

    asyncio.run(test())


def test_priority_deadline_and_seed_reach_the_engine(serve: Serve) -> None:
    async def test() -> None:
        async with serve() as served:
            headers = {"x-request-timeout": "9"}
            body = {"prompt": "hi", "max_tokens": 1, "priority": -3, "seed": 11}
            await served.client.post("/v1/completions", json=body, headers=headers)
            await served.client.post("/v1/completions", json=body | {"timeout": 5})
            await served.complete(max_tokens=1)
            first, second, third = (stream.generation for stream in served.engine.streams)
            assert (first.priority, first.seed) == (-3, 11)
            assert first.deadline is not None
            assert first.deadline - first.arrival == pytest.approx(9)
            assert second.deadline is not None
            assert second.deadline - second.arrival == pytest.approx(5)
            assert third.deadline is None
            assert third.seed != 0

    asyncio.run(test())


def test_a_deadline_that_passes_in_the_queue_is_a_504(serve: Serve) -> None:
    async def test() -> None:
        async with serve(max_num_seqs=1, delay=0.01) as served:
            long = asyncio.create_task(served.complete(max_tokens=100))
            await until(lambda: served.engine.snapshot.running == 1)
            answer = await served.complete(timeout=0.05)
            assert answer.status_code == 504
            assert answer.json()["error"]["code"] == "deadline_exceeded"
            assert answer.headers["x-should-retry"] == "false"
            assert (await long).status_code == 200
            running = await served.complete(max_tokens=240, timeout=0.5, ignore_eos=True)
            assert running.json()["choices"][0]["finish_reason"] == "timeout"
            assert 0 < running.json()["usage"]["completion_tokens"] < 240

    asyncio.run(test())


def test_a_deadline_is_kept_while_the_engine_is_silent(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnstile.server.answer.generation.DEADLINE_GRACE", 0.05)

    async def test() -> None:
        async with serve("hello", delay=0.001) as served:
            served.engine.held = True
            answer = await served.complete(timeout=0.05)
            assert answer.status_code == 504
            assert served.engine.streams[0].cancelled
            served.engine.held = False

            def hold(result: Any) -> None:
                served.engine.held = result.snapshot.generated_tokens >= 3

            served.engine.subscribe(hold)
            for stream in (False, True):
                served.engine.held = False
                served.engine._generated = 0
                answer = await served.complete(
                    max_tokens=50, timeout=1.0, n=2, stream=stream, ignore_eos=True
                )
                if stream:
                    ends = [c["finish_reason"] for e in events(answer) for c in e["choices"]]
                    assert [end for end in ends if end is not None] == ["timeout", "timeout"]
                else:
                    ends = [c["finish_reason"] for c in answer.json()["choices"]]
                    assert ends == ["timeout", "timeout"]
                    assert answer.json()["usage"]["completion_tokens"] >= 3
            gate: Any = served.service.gate
            assert gate.load == 0

    asyncio.run(test())


def test_a_failed_row_is_a_status_before_the_head_and_an_event_after_it(serve: Serve) -> None:
    from server.fake_engine import Failure

    async def test() -> None:
        async with serve() as served:
            served.engine.failures = {0: Failure("NaN"), 1: Failure("NaN", 2), 2: Failure("NaN", 2)}
            assert (await served.complete(max_tokens=5)).status_code == 500
            assert (await served.complete(max_tokens=5)).status_code == 500
            answer = await served.complete(max_tokens=5, stream=True)
            chunks = events(answer)
            assert chunks[-1]["error"]["message"] == "NaN"
            assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None, None]
            assert (await served.complete(max_tokens=5)).status_code == 200

    asyncio.run(test())
