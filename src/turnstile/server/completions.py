"""``POST /v1/completions``."""

from __future__ import annotations

import time
import uuid

from turnstile.server.errors import bad_request, unsupported
from turnstile.server.exchange import Exchange
from turnstile.server.frames import CompletionFrames, Head, Wishes
from turnstile.server.gate import knock
from turnstile.server.generation import Answer, Order, make_jobs
from turnstile.server.grammar import grammar_field, grammar_of
from turnstile.server.json_body import decode
from turnstile.server.model import ServedModel
from turnstile.server.parameters import deadline_of, make_params, priority_of
from turnstile.server.prompts import completion_prompts
from turnstile.server.schemas import CompletionRequest, GenerationRequest
from turnstile.server.service import Service
from turnstile.server.threads import ends_by
from turnstile.server.usage import Record


async def completions(service: Service, exchange: Exchange) -> None:
    """Complete one prompt or many."""
    answer = await _prepare(service, exchange)
    exchange.release_body()
    await answer.run()


async def _prepare(service: Service, exchange: Exchange) -> Answer:
    """Check and tokenize. What the body held ends here: the prompts that are kept fit a context."""
    model, gate = service.require_model()
    config = service.config
    request = decode(await exchange.json_body(service.bodies), CompletionRequest)
    exchange.watch()
    model.check_name(request.model)
    if request.suffix:
        raise unsupported("suffix is not supported.", "suffix")
    params = make_params(request, model, config)
    priority = priority_of(request, exchange.tenant)
    knock(gate, exchange.tenant, priority, params.n, service.clock())
    keep = _best_of(request, params.n)
    if keep is not None:
        params.n, params.logprobs = request.best_of or params.n, params.logprobs or 0
    deadline = deadline_of(request.timeout, exchange, config)
    async with ends_by(deadline):
        params.grammar = await grammar_of(request, service.checks, exchange.tenant)
        prompts = await completion_prompts(
            request,
            service.reader(model, exchange.tenant),
            n=params.n,
            max_choices=config.max_choices,
        )
    order = Order(
        prompts=prompts,
        params=params,
        default_max_tokens=config.default_max_tokens,
        deadline=deadline,
        priority=priority,
        cache_salt=request.cache_salt,
        grammar_field=grammar_field(request),
        echo=bool(request.echo),
        keep=keep,
    )
    record = Record(exchange.started, jobs=make_jobs(order, service, model, exchange))
    wishes = make_wishes(
        request,
        logprobs=request.logprobs is not None,
        echo=order.echo,
        default_interval=config.stream_interval,
    )
    frames = CompletionFrames(make_head("cmpl", model, request), wishes, model.tokenizer, record)
    stream = bool(request.stream)
    return Answer(service, exchange, record, frames, stream=stream, keep=keep)


def _best_of(request: CompletionRequest, n: int) -> int | None:
    """How many of ``best_of`` samples to keep; None where all are kept."""
    if request.best_of is None or request.best_of == n:
        return None
    if request.best_of < n:
        raise bad_request(f"best_of ({request.best_of}) must be at least n ({n}).", "best_of")
    if request.best_of > 128:
        raise bad_request("best_of must be at most 128.", "best_of")
    if request.stream:
        raise bad_request("best_of above n cannot be streamed: the best is known last.", "best_of")
    return n


def make_head(prefix: str, model: ServedModel, request: GenerationRequest) -> Head:
    """The constant part of an answer. The model is called what the client called it."""
    return Head(
        id=f"{prefix}-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=request.model or model.name,
        fingerprint=model.fingerprint,
    )


def make_wishes(
    request: GenerationRequest, *, logprobs: bool, echo: bool, default_interval: int
) -> Wishes:
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
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs is not None,
        echo=echo,
        token_ids=bool(request.return_token_ids),
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        interval=interval,
    )
