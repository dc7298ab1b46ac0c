"""The official client, unmodified, through a real socket."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from server.fake_engine import Failure
from server.served import Serve, listening, until


def client(port: int, **settings: Any) -> openai.AsyncOpenAI:
    settings = {"api_key": "k", "max_retries": 0} | settings
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", **settings)


def test_completions_and_chats_streamed_and_not(serve: Serve) -> None:
    async def test() -> None:
        async with (
            serve("hello world", config={"api_key": ["k"]}) as served,
            listening(served) as port,
            client(port) as api,
        ):
            models = [model.id async for model in api.models.list()]
            assert models == ["tiny", "alias"]
            assert (await api.models.retrieve("tiny")).id == "tiny"
            whole = await api.completions.create(model="tiny", prompt="hi", max_tokens=5, n=2)
            assert [choice.index for choice in whole.choices] == [0, 1]
            assert whole.usage is not None
            assert whole.usage.completion_tokens == 10
            assert whole._request_id
            stream = await api.completions.create(
                model="tiny", prompt="hi", max_tokens=5, stream=True
            )
            text = "".join([chunk.choices[0].text async for chunk in stream])
            assert text == whole.choices[0].text
            messages: Any = [{"role": "user", "content": "hi"}]
            chat = await api.chat.completions.create(
                model="tiny", messages=messages, max_tokens=4, logprobs=True, top_logprobs=2
            )
            assert chat.choices[0].logprobs is not None
            assert len(chat.choices[0].logprobs.content or []) == 4
            chunks = await api.chat.completions.create(
                model="tiny",
                messages=messages,
                max_tokens=4,
                stream=True,
                stream_options={"include_usage": True},
            )
            seen = [chunk async for chunk in chunks]
            said = "".join(c.choices[0].delta.content or "" for c in seen if c.choices)
            assert said == chat.choices[0].message.content
            assert seen[-1].usage is not None
            assert seen[-1].usage.completion_tokens == 4

    asyncio.run(test())


def test_errors_are_the_clients_own_exceptions(serve: Serve) -> None:
    async def test() -> None:
        async with (
            serve(config={"api_key": ["k"]}) as served,
            listening(served) as port,
            client(port) as api,
        ):
            with pytest.raises(openai.BadRequestError) as bad:
                await api.completions.create(model="tiny", prompt="x" * 5000)
            assert bad.value.code == "context_length_exceeded"
            with pytest.raises(openai.NotFoundError):
                await api.completions.create(model="other", prompt="x")
            async with client(port, api_key="wrong") as stranger:
                with pytest.raises(openai.AuthenticationError):
                    await stranger.models.list()
            served.engine.failures[0] = Failure("NaN", 2)
            stream = await api.completions.create(model="tiny", prompt="x", stream=True)
            with pytest.raises(openai.APIError, match="NaN"):
                async for _ in stream:
                    pass

    asyncio.run(test())


# B81: the client obeys Retry-After, and gets through.
def test_an_overloaded_server_is_retried_as_it_asks(serve: Serve) -> None:
    async def test() -> None:
        config = {"max_num_queued_reqs": 0}
        async with (
            serve(config=config, max_num_seqs=1) as served,
            listening(served) as port,
            client(port, max_retries=5) as api,
        ):
            gate: Any = served.service.gate
            served.engine.held = True
            asked = [
                asyncio.create_task(api.completions.create(model="tiny", prompt="x", max_tokens=50))
                for _ in "ab"
            ]
            await until(lambda: gate.rejections["max_num_queued_reqs"] >= 1)
            served.engine.held = False
            answers = await asyncio.gather(*asked)
            assert all(answer.choices[0].finish_reason == "length" for answer in answers)

    asyncio.run(test())
