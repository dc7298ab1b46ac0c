"""Reported faults of kind c about the fields of a request: lengths, samples, biases, heat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from safetensors.numpy import load_file, save_file

from cases.servers import text
from e2e.harness import ServerProcess, text_of
from e2e.pool import Srv
from e2e.raw import Raw
from tiny_models import make_tiny_llama

pytestmark = pytest.mark.e2e

BASE: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
CHAT = [{"role": "user", "content": "abc"}]


# B47 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "completion", "chat"),
    [
        ({"max_completion_tokens": 50}, 50, 50),
        ({"max_completion_tokens": 3}, 3, 3),
        ({"max_tokens": 7}, 7, 7),
        ({"max_tokens": 7, "max_completion_tokens": 5}, 5, 5),  # the newer name wins
        ({"max_tokens": 5, "max_completion_tokens": 7}, 7, 7),
        ({"max_tokens": None, "max_completion_tokens": 4}, 4, 4),
        ({"max_tokens": 4, "max_completion_tokens": None}, 4, 4),
        ({}, 16, None),  # a chat gets the room that is left
    ],
)
def test_b47_both_names_of_the_length_work_on_both_endpoints(
    srv: Srv, fields: dict[str, Any], completion: int, chat: int | None
) -> None:
    server = srv(pages=64, ctx=256)
    _, answer = server.complete("abc", **BASE, **fields)
    assert answer["usage"]["completion_tokens"] == completion
    _, answer = server.chat("abc", **BASE, **fields)
    room = 256 - answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == (room if chat is None else chat)


def test_b47_a_least_length_above_what_the_request_gets_is_refused(srv: Srv) -> None:
    server = srv(pages=64, ctx=256)
    for fields in ({"min_tokens": 20}, {"min_tokens": 9, "max_tokens": 8}, {"min_tokens": 5000}):
        status, answer = server.complete("abc", **BASE, **fields)
        assert status == 400, fields
        assert answer["error"]["param"] == "min_tokens"
    assert server.chat("abc", min_tokens=300)[0] == 400
    _, answer = server.complete("abc", temperature=0, min_tokens=20, max_tokens=20)
    assert answer["usage"]["completion_tokens"] == 20


# B49 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"stream_options": {"include_usage": True}},
                                    {"logprobs": True, "n": 2}, {"stop": ["e"]}])  # fmt: skip
@pytest.mark.parametrize("chat", [True, False])
def test_b49_every_chunk_has_every_field(
    server: ServerProcess, chat: bool, fields: dict[str, Any]
) -> None:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    prompt: dict[str, Any] = {"messages": CHAT} if chat else {"prompt": "abc"}
    if not chat and "logprobs" in fields:
        fields = fields | {"logprobs": 1}
    raw = Raw(server, path, **prompt, **BASE, **fields, max_tokens=12, stream=True)
    data = raw.until(b"0\r\n\r\n")
    raw.close()
    head, _, body = data.partition(b"\r\n\r\n")
    assert b"content-type: text/event-stream" in head.lower()
    # Take the chunked coding off.
    content = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        content += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]
    frames = content.decode().split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    finishes: dict[int, list[str]] = {}
    roles: list[int] = []
    for chunk in chunks:
        assert all(frame.count("\n") == 0 for frame in frames)
        for choice in chunk["choices"]:
            assert {"index", "finish_reason", "logprobs"} <= set(choice)
            reason = choice["finish_reason"]
            assert reason in (None, "stop", "length"), "never an empty string"
            if reason:
                finishes.setdefault(choice["index"], []).append(reason)
            else:
                assert choice["index"] not in finishes, "nothing follows the reason"
            if chat and "role" in choice["delta"]:
                roles.append(choice["index"])
    width = fields.get("n", 1)
    assert sorted(finishes) == list(range(width))
    assert all(len(reasons) == 1 for reasons in finishes.values())
    if chat:
        assert roles[:1] == [chunks[0]["choices"][0]["index"]]
        assert sorted(roles) == list(range(width))
    if "stream_options" in fields:
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 12
        assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_b49_the_official_client_reads_the_stream(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        name = client.models.list().data[0].id
        messages: Any = CHAT
        chunks = list(
            client.chat.completions.create(
                model=name, messages=messages, n=2, max_tokens=8, temperature=0, stream=True,
                stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
            )
        )  # fmt: skip
    reasons = [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert reasons == ["length", "length"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 16


# B51 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""], None, "absent", [[], [70]]])
def test_b51_an_empty_prompt_is_refused(server: ServerProcess, prompt: Any) -> None:
    body = {} if prompt == "absent" else {"prompt": prompt}
    for more in ({}, {"stream": True}, {"n": 2}, {"echo": True, "max_tokens": 0}):
        answer = server.post("/v1/completions", **body, **more)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith("prompt")


@pytest.mark.parametrize(
    ("messages", "status"),
    [
        ([], 400),
        ([{"role": "user", "content": ""}], 200),
        ([{"role": "user", "content": None}], 400),
        ([{"role": "user", "content": []}], 200),
        ([{"role": "system", "content": "be kind"}], 200),
        (None, 400),
    ],
)
def test_b51_an_empty_conversation_is_answered_or_refused(
    server: ServerProcess, messages: Any, status: int
) -> None:
    answer = server.post("/v1/chat/completions", messages=messages, max_tokens=2)
    assert answer.status_code == status, answer.text


# B53 ---------------------------------------------------------------------------------------------

BAD_BIASES = [
    {"320": 1}, {"-1": 1}, {"abc": 1}, {"1.5": 1}, {"": 1}, {" 1": 1}, {"１": 1}, {"1": None},
    {"1": True}, {"1": "x"}, {"1": 101}, {"1": -101}, {"1": [1]}, [], [1], "1", 5, True,
    {str(k): 1 for k in range(50_000)}, {str(10**30): 1},
]  # fmt: skip


@pytest.mark.parametrize("bias", BAD_BIASES, ids=lambda bias: str(bias)[:24])
def test_b53_a_bias_that_makes_no_sense_is_refused(server: ServerProcess, bias: Any) -> None:
    for path, prompt in (
        ("/v1/completions", {"prompt": "abc"}),
        ("/v1/chat/completions", {"messages": CHAT}),
    ):
        answer = server.post(path, **prompt, logit_bias=bias, max_tokens=2)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "logit_bias"


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity"])
def test_b53_numbers_that_are_not_finite_are_refused(server: ServerProcess, number: str) -> None:
    headers = {"content-type": "application/json"}
    for field in ('"logit_bias": {"1": %s}', '"temperature": %s', '"top_p": %s', '"seed": %s'):
        content = '{"prompt": "abc", "max_tokens": 2, ' + field % number + "}"
        answer = server.http.post("/v1/completions", content=content.encode(), headers=headers)
        assert answer.status_code == 400, field


def test_b53_biases_do_what_they_say_to_their_own_request_only(server: ServerProcess) -> None:
    prompt = server.tokens(10, seed=4)
    _, plain = server.complete(prompt, **BASE, max_tokens=4, return_token_ids=True)
    own = plain["choices"][0]["token_ids"]
    bodies: list[dict[str, Any]] = [
        {"logit_bias": {"77": 100}},
        {"logit_bias": {str(own[0]): -100}},
        {"logit_bias": {str(k): -100 for k in range(320)}},
        {"logit_bias": {}},
        {"logit_bias": None},
        {"logit_bias": {"77": 100}, "temperature": 1.5, "seed": 1},
        {"logit_bias": {"77": 100}, "n": 2},
        {"allowed_token_ids": [88]},
        {},
    ]
    calls = [
        lambda body=body: server.complete(
            prompt, **{**BASE, "max_tokens": 4, "return_token_ids": True} | body
        )
        for body in bodies
    ]
    ids = [[c["token_ids"] for c in answer["choices"]] for _, answer in server.gather(calls)]
    assert ids[0] == [[77] * 4]
    assert ids[1][0][0] != own[0]
    assert len(ids[2][0]) == 4
    assert ids[3] == ids[4] == ids[8] == [own]
    assert ids[5] == [[77] * 4]
    assert ids[6] == [[77] * 4] * 2
    assert ids[7] == [[88] * 4]


CONTRADICTIONS: list[dict[str, Any]] = [
    {"allowed_token_ids": [2], "structured_outputs": {"choice": ["yes"]}},
    {"structured_outputs": {"choice": ["7"]}, "min_tokens": 8},
    {"allowed_token_ids": [2], "min_tokens": 2, "ignore_eos": False},
]


@pytest.mark.parametrize("fields", CONTRADICTIONS, ids=str)
def test_b53_constraints_that_leave_no_token_are_the_clients_fault(
    server: ServerProcess, fields: dict[str, Any]
) -> None:
    body = {"prompt": "abc", "max_tokens": 20, "temperature": 1.0, **fields}
    answer = server.post("/v1/completions", **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "contradictory_constraints"
    last = list(server.stream("/v1/completions", **body))[-1]
    assert last["error"]["code"] == "contradictory_constraints"


# B55 ---------------------------------------------------------------------------------------------


def test_b55_tiny_temperatures_are_greedy_and_hot_ones_disturb_nobody(
    server: ServerProcess,
) -> None:
    prompt = server.tokens(10, seed=5)
    body: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "seed": 3}
    greedy = text(server.complete(prompt, **body, temperature=0))
    table = [
        (temperature, top_p)
        for temperature in (0, 1e-45, 1e-10, 1e-6, 1e-4, 0.01, 2, 100, None)
        for top_p in (1e-4, 1)
    ]
    calls = [
        lambda t=t, p=p: server.complete(prompt, **body, temperature=t, top_p=p) for t, p in table
    ]
    for (temperature, top_p), answer in zip(table, server.gather(calls), strict=True):
        said = text(answer)
        assert answer[1]["usage"]["completion_tokens"] == 12
        if top_p < 1 or (temperature is not None and temperature < 1e-5):
            assert said == greedy, (temperature, top_p)
    for temperature in (-0.1, -1e-45, 100.5, "NaN", "0.5", True, [1], 10**400):
        status, _ = server.complete(prompt, **body, temperature=temperature)
        assert status == 400, temperature


# B57 ---------------------------------------------------------------------------------------------

POISON = 300
"""A token whose embedding is NaN in the model of this case."""


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_tiny_llama(
        tmp_path_factory.mktemp("poisoned"), max_positions=2048, tie_embeddings=False
    )
    weights = path / "model.safetensors"
    tensors = {name: np.array(tensor) for name, tensor in load_file(weights).items()}
    tensors["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(tensors, weights)
    return path


def test_b57_not_a_number_ends_its_own_request_only(srv: Srv, poisoned: Path) -> None:
    server = srv(poisoned, pages=128, chunk=64, dtype="float32")
    prompts = [server.tokens(12 + k, seed=k) for k in range(6)]
    expected = [text(server.complete(p, **BASE, max_tokens=40)) for p in prompts]
    rows = server.metric("turnstile_bad_rows_total")
    errors = server.metric("turnstile_requests_total", outcome="error")
    bad = [*server.tokens(6, seed=9), POISON, 70]

    def at_once() -> None:
        status, answer = server.complete(bad, **BASE, max_tokens=8)
        assert status == 500
        assert answer["error"]["code"] == "internal_error"

    def later() -> None:
        # It draws the poison itself, and fails in the step after that.
        bias = {"logit_bias": {str(POISON): 100}}
        events = list(server.stream("/v1/completions", prompt=[70], **BASE, **bias, max_tokens=8))
        assert "error" in events[-1]
        assert not any(c["finish_reason"] for e in events[:-1] for c in e["choices"])

    def scored() -> None:
        assert server.complete(bad, echo=True, logprobs=1, max_tokens=0)[0] == 500

    def several() -> None:
        assert server.complete(bad, n=3, max_tokens=4)[0] == 500
        assert server.complete([bad, prompts[0]], max_tokens=4)[0] == 500

    def good(k: int) -> None:
        assert text(server.complete(prompts[k], **BASE, max_tokens=40)) == expected[k]

    for _ in range(3):
        server.gather([at_once, later, scored, several, *(lambda k=k: good(k) for k in range(6))])
    assert server.metric("turnstile_bad_rows_total") == rows + 15
    assert server.metric("turnstile_requests_total", outcome="error") == errors + 15


# B59 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [228, 255, 1])
def test_b59_generation_ends_with_the_context(srv: Srv, length: int) -> None:
    server = srv(pages=64, ctx=256)
    prompt = server.tokens(length, seed=59)
    body = {"stream_options": {"include_usage": True}, "max_tokens": 256 - length, **BASE}
    events = list(server.stream("/v1/completions", prompt=prompt, **body))
    assert events[-1]["usage"]["completion_tokens"] == 256 - length
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    # A chat that names no length gets all the room, and not a token more.
    rendered = server.post("/v1/chat/completions/render", messages=CHAT).json()["count"]
    _, answer = server.chat("abc", **BASE)
    assert answer["usage"]["completion_tokens"] == 256 - rendered
    assert answer["choices"][0]["finish_reason"] == "length"
    # A completion that names none gets 16, or what is left.
    _, answer = server.complete(prompt, **BASE)
    assert answer["usage"]["completion_tokens"] == min(16, 256 - length)


# B61 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [True, False])
def test_b61_n_samples_differ_and_stream_as_they_are(server: ServerProcess, chat: bool) -> None:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    rendered = server.post("/v1/chat/completions/render", messages=CHAT).json()["count"]
    prompt: dict[str, Any] = {"messages": CHAT} if chat else {"prompt": server.tokens(64, seed=6)}
    body = {"n": 3, "temperature": 1, "seed": 7, "max_tokens": 12, "ignore_eos": True}
    whole = server.post(path, **prompt, **body).json()
    texts = [text((200, whole), k) for k in range(3)]
    assert len(set(texts)) == 3
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert whole["usage"]["prompt_tokens"] == (rendered if chat else 64)
    assert whole["usage"]["completion_tokens"] == 36
    events = list(server.stream(path, **prompt, **body))
    assert [text_of(events, k) for k in range(3)] == texts
    # A stop string that only one of them says.
    only = next(c for c in "".join(texts) if sum(c in each for each in texts) == 1)
    stopped = list(server.stream(path, **prompt, **body, stop=only))
    assert [text_of(stopped, k) for k in range(3)] == [each.partition(only)[0] for each in texts]
    greedy = server.post(path, **prompt, **{**body, "temperature": 0}).json()
    assert len({text((200, greedy), k) for k in range(3)}) == 1
    again = server.post(path, **prompt, **body).json()
    assert [text((200, again), k) for k in range(3)] == texts


def test_b61_several_prompts_with_several_samples_are_numbered(server: ServerProcess) -> None:
    prompts = [server.tokens(64, seed=6), server.tokens(20, seed=7)]
    body = {"n": 2, "temperature": 1, "seed": 7, "max_tokens": 6, "ignore_eos": True}
    _, both = server.complete(prompts, **body)
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert both["usage"]["prompt_tokens"] == 84
    assert both["usage"]["completion_tokens"] == 24
    for k, prompt in enumerate(prompts):
        _, alone = server.complete(prompt, **body)
        for sample in range(2):
            assert text((200, alone), sample) == text((200, both), 2 * k + sample)
    events = list(server.stream("/v1/completions", prompt=prompts, **body))
    assert [text_of(events, k) for k in range(4)] == [text((200, both), k) for k in range(4)]


def test_b61_best_of_is_at_least_n_and_returns_the_likeliest(server: ServerProcess) -> None:
    prompt = server.tokens(20, seed=8)
    body: dict[str, Any] = {"temperature": 1, "seed": 7, "max_tokens": 6, "ignore_eos": True}
    for wrong in ({"n": 3, "best_of": 2}, {"best_of": 0}, {"best_of": 129}):
        assert server.complete(prompt, **body, **wrong)[0] == 400
    assert server.complete(prompt, **body, best_of=3, stream=True)[0] == 400
    _, best = server.complete(prompt, **body, best_of=4, logprobs=0)
    _, every = server.complete(prompt, **body, n=4, logprobs=0)
    sums = [sum(c["logprobs"]["token_logprobs"]) for c in every["choices"]]
    assert len(best["choices"]) == 1
    assert text((200, best)) == text((200, every), sums.index(max(sums)))
    assert best["usage"]["completion_tokens"] == 24, "all that was drawn is charged"


def test_b61_more_samples_than_slots_are_refused(srv: Srv) -> None:
    server = srv(pages=64)
    for fields in ({"n": 9}, {"best_of": 9}, {"n": 129}, {"n": 0}, {"n": -1}, {"n": "2"}):
        status, answer = server.complete("abc", max_tokens=1, **fields)
        assert status == 400
        assert answer["error"]["param"] in ("n", "best_of")
    assert len(server.complete("abc", max_tokens=1, n=8)[1]["choices"]) == 8


def test_b61_samples_share_the_pages_of_their_prompt(srv: Srv) -> None:
    # A prompt of 30 pages: four of it would be 120, more than the pool.
    server = srv(pages=64)
    prompt = server.tokens(480, seed=9)
    status, answer = server.complete(prompt, n=4, temperature=1, max_tokens=40, ignore_eos=True)
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == 160


# B63 ---------------------------------------------------------------------------------------------


def test_b63_unknown_fields_are_ignored(server: ServerProcess) -> None:
    plain = server.complete("abc", temperature=0, max_tokens=4)
    for fields in (
        {"foo": 1},
        {"max_token": 3},
        {"extra_body": {"a": [1, {"b": None}]}},
        {f"key{k}": k for k in range(10_000)},
        {"stream_options": None, "store": True, "metadata": {"a": "b"}, "service_tier": "auto",
         "parallel_tool_calls": True, "user": "u"},
    ):  # fmt: skip
        answer = server.complete("abc", temperature=0, max_tokens=4, **fields)
        assert text(answer) == text(plain)
    message = {"role": "user", "content": "abc", "id": 5, "opts": {"a": 1}, "name": "x"}
    assert text(server.chat([message], temperature=0, max_tokens=4)) == text(
        server.chat("abc", temperature=0, max_tokens=4)
    )


@pytest.mark.parametrize("depth", [100, 100_000])
def test_b63_deep_nesting_is_no_server_error(server: ServerProcess, depth: int) -> None:
    nested = "[" * depth + "]" * depth
    objects = '{"a":' * depth + "1" + "}" * depth
    headers = {"content-type": "application/json"}
    for value in (nested, objects):
        for path, content in (
            ("/v1/completions", '{"prompt": "abc", "max_tokens": 2, "foo": %s}'),
            ("/v1/completions", '{"max_tokens": 2, "prompt": %s}'),
            ("/v1/completions", '{"prompt": "abc", "structured_outputs": {"json": %s}}'),
            ("/v1/chat/completions", '{"messages": [{"role": "user", "content": %s}]}'),
            ("/v1/chat/completions",
             '{"max_tokens": 2, "messages": [{"role": "user", "content": "a", "x": %s}]}'),
            ("/v1/chat/completions",
             '{"max_tokens": 2, "messages": [{"role": "user", "content": "a"}],'
             ' "chat_template_kwargs": {"x": %s}}'),
        ):  # fmt: skip
            sent = (content % value).encode()
            answer = server.http.post(path, content=sent, headers=headers)
            assert answer.status_code in (200, 400), (path, content, answer.text[:300])
            if depth > 1000:
                assert answer.status_code == 400
