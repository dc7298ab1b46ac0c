"""From a request's bytes to an :class:`Answer` that can run: what all endpoints have in common.

An :class:`Endpoint` says what is its own; :func:`answer` does the rest, in an order that refuses
what costs least to refuse first: size, syntax, the name, parameters, the gate, and only then text.
"""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from turnstile.engine.params import SamplingParams
from turnstile.server.answer.frames import Frames, Head, Outline, Wishes
from turnstile.server.answer.generation import Answer, Order, make_jobs
from turnstile.server.answer.grammar import check, constraint_of
from turnstile.server.answer.parameters import deadline_of, make_params, priority_of
from turnstile.server.answer.parsed import ParsedFrames
from turnstile.server.answer.prompts import TokenizedPrompt
from turnstile.server.answer.reader import Reader
from turnstile.server.answer.schemas import ChatRequest, CompletionRequest, GenerationRequest
from turnstile.server.answer.tools import ToolUse
from turnstile.server.answer.usage import Record
from turnstile.server.config import ServerConfig
from turnstile.server.errors import bad_request, unsupported
from turnstile.server.gate import knock
from turnstile.server.http.exchange import Exchange
from turnstile.server.http.json_body import decode
from turnstile.server.model import ServedModel
from turnstile.server.service import Service
from turnstile.server.threads import ends_by

R = TypeVar("R", CompletionRequest, ChatRequest)


class Endpoint(ABC, Generic[R]):
    """What tells one way to ask for a generation from the other.

    Attributes
    ----------
    schema
        The request's body.
    id_prefix
        What the ``id`` of its answers begins with.
    prompt_field
        The field of the body that holds the prompt.
    frames
        Who writes its answers.
    """

    schema: type[R]
    id_prefix: str
    prompt_field: str
    frames: type[Frames]

    def parse(self, body: bytes) -> R:
        """Read the body. Raises :class:`ApiError` 400."""
        return decode(body, self.schema)

    def naming(self, request: R) -> contextlib.AbstractContextManager[None]:
        """Around what may raise :class:`ApiError`: where the client has other names for fields."""
        return contextlib.nullcontext()

    def make_frames(
        self, request: R, outline: Outline, use: ToolUse | None, *, thinks: bool
    ) -> Frames:
        """Who writes the answer: plainly, or taken apart, where there is more in it than text."""
        if use is None and not thinks:
            return self.frames(outline)
        return ParsedFrames(outline, use, thinks=thinks)

    @abstractmethod
    async def read(
        self, request: R, reader: Reader, size: int, params: SamplingParams, config: ServerConfig
    ) -> list[TokenizedPrompt]:
        """The prompts of a request that came in a body of ``size`` bytes. Raises
        :class:`ApiError` for what is wrong with them, or cannot be done with them here.
        """

    @abstractmethod
    def wants_logprobs(self, request: R) -> bool:
        """Whether log-probabilities are part of the answer."""

    def tool_use(self, request: R, model: ServedModel, config: ServerConfig) -> ToolUse | None:
        """What may be called in the answer, if anything. Raises :class:`ApiError` 400."""
        return None

    def thinks(self, request: R, model: ServedModel, config: ServerConfig) -> bool:
        """Whether the model may think aloud before it answers."""
        return False

    def shows_reasoning(self, request: R) -> bool:
        """Whether what is thought is part of the answer."""
        return True

    def echoes(self, request: R) -> bool:
        """Whether the prompt is part of the answer."""
        return False

    def draw_more(self, request: R, params: SamplingParams) -> int | None:
        """Have more samples drawn than returned, by changing ``params``. Returns how many of each
        prompt's are returned; None where all are. Raises :class:`ApiError` 400.
        """
        return None

    def default_max_tokens(self, config: ServerConfig) -> int | None:
        """Output tokens of who asks for no number; None for all that the context has room for."""
        return None


async def answer(endpoint: Endpoint[R], service: Service, exchange: Exchange) -> None:
    """Answer a request to ``endpoint``."""
    prepared = await _prepare(endpoint, service, exchange)
    exchange.release_body()
    await prepared.run()


async def _prepare(endpoint: Endpoint[R], service: Service, exchange: Exchange) -> Answer:
    """Read a body. What it held ends here: the prompts that are kept fit a context."""
    service.require_model()
    body = await exchange.json_body(service.bodies)
    request = endpoint.parse(body)
    with endpoint.naming(request):
        return await _take_in(endpoint, request, len(body), service, exchange)


async def _take_in(
    endpoint: Endpoint[R], request: R, size: int, service: Service, exchange: Exchange
) -> Answer:
    """Check a request that came in ``size`` bytes, and tokenize it."""
    model, gate = service.require_model()
    config, tenant = service.config, exchange.tenant
    model.check_name(request.model)
    params = make_params(request, model, config)
    priority = priority_of(request, tenant)
    knock(gate, tenant, priority, params.n, service.clock())
    keep = endpoint.draw_more(request, params)
    deadline = deadline_of(request.timeout, exchange, config)
    wishes = make_wishes(endpoint, request, config.stream_interval)
    use = endpoint.tool_use(request, model, config)
    constraint = use.constraint() if use is not None else None
    constraint = constraint or constraint_of(request)  # a demanded call leaves no other output
    if use is not None and use.shows_control_tokens(model.tokenizer):
        params.skip_special_tokens = False
    async with ends_by(deadline):
        if constraint is not None:
            await check(constraint, service.checks, tenant)
            params.grammar = constraint.grammar
        reader = service.reader(model, tenant)
        prompts = await endpoint.read(request, reader, size, params, config)
    order = Order(
        prompts=prompts,
        prompt_field=endpoint.prompt_field,
        params=params,
        default_max_tokens=endpoint.default_max_tokens(config),
        deadline=deadline,
        priority=priority,
        cache_salt=request.cache_salt,
        grammar_field=None if constraint is None else constraint.field,
        echo=wishes.echo,
        keep=keep,
    )
    record = Record(exchange.started, jobs=make_jobs(order, service, model, exchange))
    head = make_head(endpoint.id_prefix, model, request)
    outline = Outline(head, wishes, model.tokenizer, record)
    thinks = constraint is None and endpoint.thinks(request, model, config)
    frames = endpoint.make_frames(request, outline, use, thinks=thinks)
    return Answer(service, exchange, record, frames, stream=bool(request.stream), keep=keep)


def make_head(prefix: str, model: ServedModel, request: GenerationRequest) -> Head:
    """The constant part of an answer. The model is called what the client called it."""
    return Head(
        id=f"{prefix}-{os.urandom(16).hex()}",
        created=int(time.time()),
        model=request.model or model.name,
        fingerprint=model.fingerprint,
    )


def make_wishes(endpoint: Endpoint[R], request: R, default_interval: int) -> Wishes:
    """What the client wants to see. Raises :class:`ApiError` 400 for what makes no sense."""
    options = request.stream_options
    if options is not None and not request.stream:
        raise bad_request("stream_options needs stream: true.", "stream_options")
    interval = request.stream_interval or default_interval
    if interval < 1:
        raise bad_request("stream_interval must be at least 1.", "stream_interval")
    if request.prompt_logprobs is not None and request.stream:
        raise unsupported("prompt_logprobs cannot be streamed; use echo.", "prompt_logprobs")
    return Wishes(
        logprobs=endpoint.wants_logprobs(request),
        prompt_logprobs=request.prompt_logprobs is not None,
        echo=endpoint.echoes(request),
        token_ids=bool(request.return_token_ids),
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        interval=interval,
        reasoning=endpoint.shows_reasoning(request),
    )
