"""What the users ask for, right and wrong, and what an answer to it must look like."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import msgspec

from turnstile.bench.http import Server
from turnstile.bench.soak.asking import Answer
from turnstile.engine.faults import Fault, fault_prompt

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WORDS = """the a of river town light old small green walks opens because under never seven
    market bread letter winter door""".split()  # noqa: SIM905


@dataclass(frozen=True, slots=True)
class Order:
    """A well-formed request for generation."""

    path: str
    body: dict[str, Any]

    @property
    def stream(self) -> bool:
        """Whether it asks for a stream."""
        return bool(self.body.get("stream"))

    @property
    def n(self) -> int:
        """The samples it asks for."""
        return int(self.body.get("n", 1))

    def request(self, server: Server) -> bytes:
        """Its bytes."""
        return server.request("POST", self.path, msgspec.json.encode(self.body))


def random_order(rng: random.Random, *, longest: int = 48) -> Order:
    """Anything the server takes: both routes, every sampling feature, short prompts and long."""
    words = rng.choices(WORDS, k=rng.choice((3, 10, 40, 80)))
    body: dict[str, Any] = {"max_tokens": rng.randint(1, longest), "seed": rng.getrandbits(32)}
    body["temperature"] = rng.choice((0, 0.7, 1.0))
    path = rng.choice((COMPLETIONS, CHAT))
    text = " ".join(words)
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = text
    for feature in rng.sample(_FEATURES, k=rng.randint(0, 2)):
        feature(rng, body, path)
    if rng.random() < 0.7:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return Order(path, body)


def _penalties(rng: random.Random, body: dict[str, Any], path: str) -> None:
    body |= {"presence_penalty": rng.random(), "repetition_penalty": 1 + rng.random() / 3}


def _stops(rng: random.Random, body: dict[str, Any], path: str) -> None:
    body["stop"] = rng.choices((" the", ".", "\n", "e", "qz"), k=2)


def _samples(rng: random.Random, body: dict[str, Any], path: str) -> None:
    body["n"] = rng.randint(2, 3)


def _logprobs(rng: random.Random, body: dict[str, Any], path: str) -> None:
    body |= {"logprobs": True, "top_logprobs": 3} if path == CHAT else {"logprobs": 3}


def _grammar(rng: random.Random, body: dict[str, Any], path: str) -> None:
    body["structured_outputs"] = {"regex": r"[a-z ]{5,40}\."}


def _no_end(rng: random.Random, body: dict[str, Any], path: str) -> None:
    body["ignore_eos"] = True


_FEATURES = (_penalties, _stops, _samples, _logprobs, _grammar, _no_end)


def samples(count: int) -> list[Order]:
    """The deterministic sample: the same orders whatever the seed of the run, so that their
    answers can be compared with those of a server that does nothing else.
    """
    rng = random.Random("sample")
    return [random_order(rng) for _ in range(count)]


def failing_order(rng: random.Random) -> Order:
    """A request that fails in its step, at a random token, for a server with faults switched on."""
    fault = rng.choice((Fault.ERROR, Fault.RAISE))
    prompt = fault_prompt(fault, rng.randint(0, 4), *rng.choices(range(100, 200), k=20))
    body = {"prompt": prompt, "max_tokens": 9, "ignore_eos": True, "stream": rng.random() < 0.5}
    return Order(COMPLETIONS, body)


def hurried_order(rng: random.Random) -> Order:
    """A request whose time is short."""
    order = random_order(rng, longest=200)
    return Order(order.path, {**order.body, "timeout": rng.choice((0.05, 0.5, 2.0))})


# -- what an answer must look like ----------------------------------------------------------------

ENDS = ("stop", "length", "timeout")


def outcome(order: Order, answer: Answer) -> str:
    """``answered``, ``refused``, ``timeout`` or ``failed``; raises ValueError with what is wrong
    with an answer that is none of these.
    """
    if answer.status == 503:
        if not answer.retry_after:
            raise ValueError("a 503 without Retry-After")
        return "refused"
    if answer.status == 504:
        return "timeout"
    if answer.status == 500:
        return "failed"
    if answer.status != 200:
        raise ValueError(f"status {answer.status}: {answer.body}")
    return _stream_outcome(order, answer) if order.stream else _body_outcome(order, answer)


def _stream_outcome(order: Order, answer: Answer) -> str:
    if answer.done != 1 or answer.trailing:
        raise ValueError(f"{answer.done} times [DONE], or something after it")
    errors = [event["error"] for event in answer.events if "error" in event]
    if errors:
        return "timeout" if errors[0].get("code") == "deadline_exceeded" else "failed"
    ends: dict[int, list[str]] = {}
    for event in answer.events:
        for choice in event["choices"]:
            if choice["finish_reason"] is not None:
                ends.setdefault(choice["index"], []).append(choice["finish_reason"])
    _check_ends(order, ends)
    return "answered"


def _body_outcome(order: Order, answer: Answer) -> str:
    ends: dict[int, list[str]] = {}
    for choice in answer.body["choices"]:
        ends.setdefault(choice["index"], []).append(choice["finish_reason"])
    _check_ends(order, ends)
    return "answered"


def _check_ends(order: Order, ends: dict[int, list[str]]) -> None:
    if sorted(ends) != list(range(order.n)):
        raise ValueError(f"{order.n} choices asked for, {sorted(ends)} ended")
    for reasons in ends.values():
        if len(reasons) != 1 or reasons[0] not in ENDS:
            raise ValueError(f"a choice ended with {reasons}")


def content(order: Order, answer: Answer) -> list[Any]:
    """What of an answer must be the same every time: for each choice its text, how it ended, and
    its log-probabilities; and the tokens used.
    """
    found: list[Any] = [["", None, []] for _ in range(order.n)]
    usage = None
    for event in answer.events or [answer.body]:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            mine = found[choice["index"]]
            message = choice.get("delta") or choice.get("message") or {}
            mine[0] += choice.get("text") or message.get("content") or ""
            mine[1] = choice["finish_reason"] or mine[1]
            mine[2] += _values(choice.get("logprobs"))
    tokens = usage and (usage["prompt_tokens"], usage["completion_tokens"])
    return [*found, tokens]


def _values(logprobs: dict[str, Any] | None) -> list[Any]:
    if not logprobs:
        return []
    if "content" in logprobs:
        return [entry["logprob"] for entry in logprobs["content"]]
    return list(logprobs["token_logprobs"])


# -- what is wrong from the start -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Nonsense:
    """Bytes that are no good request, and the statuses that say so (0: the connection ends)."""

    request: bytes
    statuses: frozenset[int] = field(default_factory=lambda: frozenset((400,)))


def nonsense(rng: random.Random, server: Server) -> Nonsense:
    """A request that is wrong in a random way."""

    def post(body: bytes, path: str = COMPLETIONS) -> bytes:
        return server.request("POST", path, body)

    def field_of(name: str, value: object) -> Nonsense:
        fields = {"prompt": "x", "max_tokens": 2, name: value}
        return Nonsense(post(msgspec.json.encode(fields)))

    wrong = (
        lambda: Nonsense(post(rng.randbytes(rng.randint(0, 200)))),
        lambda: Nonsense(post(b'{"prompt": "x"')),
        lambda: Nonsense(post(b"[" * 5000)),
        lambda: Nonsense(post(b'{"messages": []}', CHAT)),
        lambda: Nonsense(post(b"{}", "/v1/nothing"), frozenset((404,))),
        lambda: Nonsense(server.request("DELETE", COMPLETIONS), frozenset((405,))),
        lambda: Nonsense(rng.randbytes(64) + b"\r\n\r\n", frozenset((400, 0))),
        lambda: Nonsense(post(b'{"model": "other", "prompt": "x"}'), frozenset((404,))),
        lambda: field_of("prompt", "word " * 20_000),
        lambda: field_of("prompt", [10**9]),
        lambda: field_of("max_tokens", rng.choice((-1, "many", 1e9, 10**30))),
        lambda: field_of("temperature", rng.choice((-1, "hot"))),
        lambda: field_of("n", rng.choice((0, -3, 5000))),
        lambda: field_of("logit_bias", {"x": 1}),
        lambda: field_of("stop", ["", "x"]),
        lambda: field_of("structured_outputs", {"regex": "([unclosed"}),
        lambda: field_of("structured_outputs", {"json": {"type": "nonsense"}}),
    )
    return rng.choice(wrong)()
