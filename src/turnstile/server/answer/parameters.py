"""From a request's fields to :class:`SamplingParams`: defaults filled in, ranges checked."""

from __future__ import annotations

import math

from turnstile.engine.params import MOST_PRIORITY, SamplingParams, check_length
from turnstile.models.generation import GenerationDefaults
from turnstile.server.answer.schemas import ChatRequest, CompletionRequest, GenerationRequest
from turnstile.server.config import ServerConfig
from turnstile.server.errors import ApiError, bad_request, unsupported
from turnstile.server.http.exchange import Exchange
from turnstile.server.model import ServedModel
from turnstile.server.tenants import Tenant

_MAX_STOP_LENGTH = 1024
_MAX_SALT_LENGTH = 1024
_MAX_TIMEOUT = 86_400.0
_REMOVED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


def make_params(
    request: CompletionRequest | ChatRequest, model: ServedModel, config: ServerConfig
) -> SamplingParams:
    """The checked sampling parameters of a request.

    ``max_tokens`` is what the client asked for, None where it asked for nothing. Raises
    :class:`ApiError` 400 or :class:`ParameterError` for the first field that is wrong.
    """
    _refuse_unsupported(request)
    if request.cache_salt is not None and len(request.cache_salt) > _MAX_SALT_LENGTH:
        raise bad_request(
            f"cache_salt has {len(request.cache_salt)} characters; at most {_MAX_SALT_LENGTH} may "
            "be given. Send a hash of it.",
            "cache_salt",
        )
    defaults = model.defaults if config.generation_config == "auto" else GenerationDefaults()

    def pick(value: float | None, recommended: float | None, otherwise: float) -> float:
        if value is not None:
            return value
        return otherwise if recommended is None else recommended

    logprobs, prompt_logprobs = _logprob_counts(request, config)
    params = SamplingParams(
        n=_or(request.n, 1),
        max_tokens=wanted_tokens(request),
        min_tokens=_or(request.min_tokens, 0),
        temperature=pick(request.temperature, defaults.temperature, 1.0),
        top_p=pick(request.top_p, defaults.top_p, 1.0),
        top_k=int(pick(request.top_k, defaults.top_k, 0)),
        min_p=pick(request.min_p, defaults.min_p, 0.0),
        repetition_penalty=pick(request.repetition_penalty, defaults.repetition_penalty, 1.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        logit_bias=_logit_bias(request.logit_bias, model.vocab_size),
        allowed_token_ids=request.allowed_token_ids,
        seed=request.seed,
        stop=_stop_strings(request.stop, config.max_stop_strings),
        stop_token_ids=request.stop_token_ids or [],
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        ignore_eos=bool(request.ignore_eos),
        skip_special_tokens=request.skip_special_tokens is not False,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    params.check(model.vocab_size, config.max_logprobs)
    return params


def _or(value: float | None, otherwise: float) -> int:
    """The value, or what stands for null. Typed as int: msgspec has checked the real type."""
    return otherwise if value is None else value  # type: ignore[return-value]


def wanted_tokens(request: GenerationRequest) -> int | None:
    """The output tokens the client asked for; ``max_completion_tokens`` wins."""
    if request.max_completion_tokens is not None:
        if request.max_completion_tokens < 0:
            raise bad_request(
                "max_completion_tokens must not be negative.", "max_completion_tokens"
            )
        return request.max_completion_tokens
    return request.max_tokens


def _logprob_counts(
    request: CompletionRequest | ChatRequest, config: ServerConfig
) -> tuple[int | None, int | None]:
    """Alternatives beside each output token and each prompt token; None for none at all."""
    if isinstance(request, ChatRequest):
        if request.top_logprobs is not None and not request.logprobs:
            raise bad_request("top_logprobs needs logprobs: true.", "top_logprobs")
        if (
            request.top_logprobs is not None
            and not 0 <= request.top_logprobs <= config.max_logprobs
        ):
            raise bad_request(
                f"top_logprobs must be from 0 to {config.max_logprobs}.", "top_logprobs"
            )
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        return logprobs, request.prompt_logprobs
    scoring = request.echo and (request.logprobs is not None or wanted_tokens(request) == 0)
    if scoring and request.prompt_logprobs is None:
        return request.logprobs, request.logprobs or 0
    return request.logprobs, request.prompt_logprobs


def _logit_bias(given: dict[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    if not given:
        return None
    check_length("logit_bias", len(given), vocab_size)
    bias: dict[int, float] = {}
    for key, value in given.items():
        digits = key.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 20):
            raise bad_request(
                f"logit_bias: {key[:40]!r} is not a token id in decimal digits.", "logit_bias"
            )
        bias[int(key)] = value
    return bias


def _stop_strings(given: str | list[str] | None, most: int) -> list[str]:
    stops = [given] if isinstance(given, str) else list(given or ())
    if len(stops) > most:
        raise bad_request(f"stop has {len(stops)} strings; at most {most} are allowed.", "stop")
    for stop in stops:
        if not stop:
            raise bad_request("stop must not contain an empty string.", "stop")
        if len(stop) > _MAX_STOP_LENGTH:
            raise bad_request(
                f"A stop string has {len(stop)} characters; at most {_MAX_STOP_LENGTH} may.",
                "stop",
            )
    return list(dict.fromkeys(stops))


def _refuse_unsupported(request: GenerationRequest) -> None:
    """Say no to what this server knows and cannot do; ignoring it would be a lie."""
    if request.use_beam_search:
        raise unsupported("Beam search is not supported; use n with sampling.", "use_beam_search")
    if request.length_penalty not in (None, 1.0):
        raise unsupported("length_penalty belongs to beam search.", "length_penalty")
    if request.bad_words:
        raise unsupported("bad_words is not supported; use logit_bias.", "bad_words")
    for name in _REMOVED:
        if getattr(request, name) is not None:
            raise unsupported(
                f"{name} is not supported; use response_format or structured_outputs.", name
            )


def final_max_tokens(
    wanted: int | None,
    prompt_tokens: int,
    model: ServedModel,
    default: int | None,
    where: str = "prompt",
) -> int:
    """The output tokens a sample may get: what was asked, or ``default`` (None: all the room).

    Raises :class:`ApiError` 400 ``context_length_exceeded`` where prompt and output do not fit
    the context together; ``where`` is the field that holds the prompt.
    """
    limit = model.max_model_len
    room = limit - prompt_tokens
    if wanted is not None:
        if wanted > room:
            raise context_error(prompt_tokens, limit, wanted, where)
        return wanted
    if room < 1:
        raise context_error(prompt_tokens, limit, 1, where)
    return room if default is None else min(default, room)


def context_error(
    prompt_tokens: int, limit: int, wanted: int, where: str = "prompt", *, at_least: bool = False
) -> ApiError:
    """400 for a prompt that leaves no room for its output. ``at_least``: it was not tokenized, and
    is known not to be shorter.
    """
    least = "at least " if at_least else ""
    or_lower = " or lower max_tokens" if prompt_tokens < limit else ""
    return ApiError(
        400,
        f"The context is {limit} tokens, but the request needs {least}{prompt_tokens + wanted}: "
        f"{least}{prompt_tokens} for the prompt and {wanted} for the output. Shorten the "
        f"prompt{or_lower}.",
        param="max_tokens" if prompt_tokens < limit else where,
        code="context_length_exceeded",
        extra={"n_prompt_tokens": prompt_tokens, "n_ctx": limit},
    )


def deadline_of(timeout: float | None, exchange: Exchange, config: ServerConfig) -> float | None:
    """When the request must have ended, on ``time.monotonic()``'s clock.

    The body's ``timeout`` wins over the header ``x-request-timeout``; both are seconds.
    """
    where = "timeout"
    header = exchange.header(b"x-request-timeout")
    if timeout is None and header is not None:
        where = "x-request-timeout"
        try:
            timeout = float(header)
        except ValueError:
            raise bad_request(f"{where} is not a number of seconds.", where) from None
    if timeout is None:
        timeout = config.default_timeout
    if timeout is None:
        return None
    if not math.isfinite(timeout) or not 0 < timeout <= _MAX_TIMEOUT:
        raise bad_request(f"{where} must be above 0 and at most {_MAX_TIMEOUT:.0f} seconds.", where)
    return exchange.started + timeout


def priority_of(request: GenerationRequest, tenant: Tenant) -> int:
    """The request's priority; lower is earlier. It may not be ahead of what its tenant has."""
    first = tenant.priority
    if request.priority is None:
        return first or 0
    if abs(request.priority) > MOST_PRIORITY:
        raise bad_request(f"priority must be within ±{MOST_PRIORITY}.", "priority")
    if first is not None and request.priority < first:
        raise bad_request(
            f"priority is {request.priority}, but this key may ask for {first} at most urgent "
            "(lower is earlier).",
            "priority",
        )
    return request.priority


def prefix_salt(config: ServerConfig, tenant: Tenant, own: str | None) -> bytes:
    """Who may share with a request what is remembered of prompts, pages and ids: equal salts only.

    ``own`` is the request's ``cache_salt``.
    """
    shares = config.prefix_sharing == "all" or tenant.share_cache
    name = "" if shares or tenant.name == "default" else tenant.name
    return f"{name}\0{own}".encode() if own else name.encode()
