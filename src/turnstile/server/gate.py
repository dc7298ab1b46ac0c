"""From HTTP to :mod:`turnstile.core.gate`: what the gate hears, and what clients are told."""

from __future__ import annotations

import math
from collections.abc import Sequence

from turnstile.core.cost import Coefficients, CostModel
from turnstile.core.forecast import EngineView
from turnstile.core.gate import (
    MAX_WAIT,
    REASONS,
    TENANT_REASONS,
    Gate,
    GateConfig,
    Place,
    Refused,
    Work,
)
from turnstile.engine.client import Generation
from turnstile.engine.policies import queue_policy
from turnstile.engine.protocol import EngineInfo, Snapshot
from turnstile.engine.wording import counted
from turnstile.server.config import ServerConfig
from turnstile.server.errors import ApiError, Headers
from turnstile.server.tenants import Tenant


def make_gate(config: ServerConfig, info: EngineInfo) -> Gate:
    """The gate before an engine of these sizes."""
    return Gate(
        GateConfig(
            slots=info.max_num_seqs,
            budget=info.max_num_batched_tokens,
            max_requests=config.max_num_queued_reqs,
            max_tokens=config.max_num_queued_tokens,
            max_wait=config.max_queue_wait or None,
            kv_tokens=info.kv_tokens,
            policy=queue_policy(info.scheduling_policy),
        )
    )


def view_of(snapshot: Snapshot, steps: int, page_size: int) -> EngineView:
    """What a step's snapshot tells the gate. ``steps`` are counted over all engine processes."""
    cost = snapshot.turn if snapshot.turn.samples >= CostModel.WARM else snapshot.cost
    return EngineView(
        steps=steps,
        cost=Coefficients(
            cost.alpha, cost.beta, cost.gamma, cost.delta, cost.epsilon, cost.knee, cost.zeta
        ),
        cost_samples=cost.samples,
        free_tokens=(snapshot.pages_free + snapshot.pages_cached) * page_size,
        prefill_tokens=snapshot.prefill_tokens,
        served=snapshot.tenants,
    )


def make_work(generation: Generation, tenant: Tenant) -> Work:
    """What a request will cost."""
    params = generation.params
    endless = params.ignore_eos and not (params.stop or params.stop_token_ids)
    return Work(
        tenant=generation.tenant,
        weight=generation.weight,
        priority=generation.priority,
        prompt_tokens=len(generation.prompt),
        max_tokens=generation.max_tokens,
        min_tokens=generation.max_tokens if endless else params.min_tokens,
        n=generation.n,
        limits=tenant.limits,
    )


def knock(gate: Gate, tenant: Tenant, priority: int, n: int, now: float) -> None:
    """Refuse what would be refused whatever its prompt is, before anybody tokenizes it or compiles
    its grammar: being overloaded must not cost much.
    """
    work = Work(
        tenant=tenant.name, weight=tenant.weight, priority=priority, limits=tenant.limits,
        prompt_tokens=0, max_tokens=1, n=n,
    )  # fmt: skip
    try:
        gate.check([work], now)
    except Refused as refused:
        raise _answer(gate, tenant, refused, now) from None


def enter(gate: Gate, tenant: Tenant, works: Sequence[Work], now: float) -> list[Place]:
    """:meth:`Gate.enter`, with a refusal as the answer the client gets."""
    try:
        return gate.enter(works, now)
    except Refused as refused:
        raise _answer(gate, tenant, refused, now) from None


def rate_limits(gate: Gate, tenant: Tenant, now: float) -> Headers:
    """``x-ratelimit-*`` for whoever has a limit on requests or tokens."""
    headers: Headers = []
    for name, allowance in gate.allowances(tenant.name, now).items():
        values = (str(allowance.limit), str(allowance.remaining), _duration(allowance.reset))
        for what, value in zip(("limit", "remaining", "reset"), values, strict=True):
            headers.append((f"x-ratelimit-{what}-{name}".encode(), value.encode()))
    return headers


def _duration(seconds: float) -> str:
    """As OpenAI writes it: ``12ms``, ``1s``, ``6m0s``."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


_OWN_LIMITS = {
    "max_concurrent": "may have {bound:g} samples (prompts times n) at once",
    "tokens_per_minute": "may use {bound:g} tokens a minute",
    "requests_per_minute": "may send {bound:g} requests a minute",
}


def _answer(gate: Gate, tenant: Tenant, refused: Refused, now: float) -> ApiError:
    headers = rate_limits(gate, tenant, now)
    if refused.reason not in TENANT_REASONS:
        return _overloaded(refused, headers)
    limit = _OWN_LIMITS[refused.reason].format(bound=refused.bound)
    never = refused.retry_after is None
    return ApiError(
        429,
        f"{tenant.name} {limit} ({refused.reason}), and this request "
        + ("alone is more. Split it." if never else "would be more. Try again later."),
        code="rate_limit_exceeded",
        retry_after=refused.retry_after,
        should_retry=not never,
        headers=headers,
    )


def _overloaded(refused: Refused, headers: Headers) -> ApiError:
    requests = counted(refused.waiting, "request")
    tokens = counted(refused.waiting_tokens, "prompt token")
    verb = "waits" if refused.waiting == 1 else "wait"
    waiting = f"{requests} of {tokens} {verb}"
    if refused.retry_after is None:
        message = (
            f"The request alone is more than the queue holds ({refused.reason} is "
            f"{refused.bound:g}). Split it into smaller ones."
        )
    elif refused.reason == MAX_WAIT and refused.estimate is not None:
        message = (
            f"A request would wait about {refused.estimate.wait:.0f} s to start ({waiting}); "
            f"{refused.reason} is {refused.bound:g} s. Try again later."
        )
    else:
        message = (
            f"The queue is full ({waiting}; {refused.reason} is {refused.bound:g}). "
            "Try again later."
        )
    return ApiError(
        503,
        message,
        code="engine_overloaded",
        kind="overloaded",
        retry_after=refused.retry_after,
        headers=headers,
    )


__all__ = [
    "REASONS",
    "Gate",
    "Place",
    "Work",
    "enter",
    "knock",
    "make_gate",
    "make_work",
    "rate_limits",
    "view_of",
]
