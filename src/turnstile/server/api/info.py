"""The routes that tell: models, health, metrics, load, version, configuration."""

from __future__ import annotations

from typing import Any

import msgspec

from turnstile import __version__
from turnstile.engine.client import EngineState
from turnstile.server.errors import ApiError
from turnstile.server.http.auth import require_admin
from turnstile.server.http.exchange import Exchange
from turnstile.server.service import Phase, Service
from turnstile.server.watch.exposition import render as render_metrics

_TEXT = b"text/plain; charset=utf-8"


async def models(service: Service, exchange: Exchange) -> None:
    """List the names the model answers to."""
    model = service.model
    data = [] if model is None else [model.card(name) for name in model.names]
    await exchange.respond_json({"object": "list", "data": data})


async def model_card(service: Service, exchange: Exchange) -> None:
    """Describe one model, or 404."""
    name = exchange.scope["path_params"]["name"]
    model, _ = service.require_model()
    model.check_name(name)
    await exchange.respond_json(model.card(name))


async def health(service: Service, exchange: Exchange) -> None:
    """200 while the engine is alive and either idle or ended a step recently; 503 otherwise."""
    loading = service.engine.loading
    if service.phase is Phase.LOADING and loading is not None:
        told = {"status": "loading", "stage": loading.stage, "fraction": loading.fraction}
        await exchange.respond_json(told, 503)
    elif service.phase is Phase.LOADING:
        await _status(exchange, 503, "loading")
    elif service.phase is Phase.FAILED or not service.engine.healthy:
        state = service.engine.state
        stuck = service.phase is not Phase.FAILED and state is EngineState.READY
        await _status(exchange, 503, "stuck" if stuck else str(state))
    else:
        await _status(exchange, 200, "ok")


async def livez(service: Service, exchange: Exchange) -> None:
    """200 unless the process should be restarted: loading and draining are life."""
    alive = service.alive
    await _status(exchange, 200 if alive else 503, "ok" if alive else "dead")


async def readyz(service: Service, exchange: Exchange) -> None:
    """200 while requests are taken."""
    if service.accepting:
        await _status(exchange, 200, "ok")
        return
    engine = service.engine.state
    if service.phase is not Phase.READY:
        await _status(exchange, 503, str(service.phase))
    else:
        await _status(exchange, 503, "stuck" if engine is EngineState.READY else str(engine))


async def _status(exchange: Exchange, status: int, word: str) -> None:
    await exchange.respond(b'{"status":"%b"}' % word.encode(), status)


async def version(service: Service, exchange: Exchange) -> None:
    """Say which Turnstile this is."""
    await exchange.respond_json({"version": __version__})


async def metrics(service: Service, exchange: Exchange) -> None:
    """Expose the metrics to Prometheus."""
    accept = (exchange.header(b"accept") or b"").decode("latin-1")
    body, kind = await render_metrics(
        service.metrics, vllm=service.config.metrics_compat == "vllm", accept=accept
    )
    await exchange.respond(body, content_type=kind.encode())


async def load(service: Service, exchange: Exchange) -> None:
    """How many requests are inside."""
    snapshot = service.metrics.snapshot
    await exchange.respond_json(
        {
            "server_load": service.metrics.in_flight,
            "running": snapshot.running,
            "waiting": snapshot.waiting,
            "kv_usage": snapshot.pages_held / snapshot.pages_total if snapshot.pages_total else 0.0,
        }
    )


async def server_info(service: Service, exchange: Exchange) -> None:
    """The effective configuration, without secrets, and what the engine says of itself. Only
    administrators are told of files and processes.
    """
    admin = exchange.tenant.admin
    names = service.model.names if service.model else None
    told: dict[str, Any] = {
        "version": __version__,
        "phase": str(service.phase),
        "engine_state": str(service.engine.state),
        "model": names,
        "engine": None,
        "server": service.config.redacted(admin=admin),
        **service.environment,
    }
    if service.engine.info is not None:
        told["engine"] = msgspec.structs.asdict(service.engine.info)
    if not admin:
        (told["engine"] or {}).pop("pid", None)
        if "engine_config" in told:
            told["engine_config"] = {**told["engine_config"], "model": names[0] if names else None}
    await exchange.respond_json(told)


async def reset_prefix_cache(service: Service, exchange: Exchange) -> None:
    """Forget the cached pages nobody holds, and the ids of chats. Administrators only."""
    require_admin(exchange.tenant)
    refuse_foreign_page(service, exchange)
    model, _ = service.require_model()
    if service.engine.state is not EngineState.READY:
        raise ApiError(503, "The engine is not ready.", code="model_loading", retry_after=1.0)
    service.engine.reset_prefix_cache()
    if model.sections is not None:
        model.sections.clear()
    await exchange.respond_json({"status": "ok"})


def refuse_foreign_page(service: Service, exchange: Exchange) -> None:
    """Without a key a web page could reach this route by a plain form; its Origin gives it away."""
    origin = exchange.header(b"origin")
    if origin is None or service.cors.allows(origin):
        return
    host = exchange.header(b"host") or b""
    if origin.partition(b"://")[2] != host:
        raise ApiError(403, "Pages of this origin may not call this route.", code="origin_refused")


async def tokenizer_info(service: Service, exchange: Exchange) -> None:
    """What a client needs to tokenize as this server does."""
    model, _ = service.require_model()
    tokenizer = model.tokenizer
    await exchange.respond_json(
        {
            "model": model.name,
            "tokenizer_class": "TurnstileTokenizer",
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": model.max_model_len,
            "bos_token_id": tokenizer.bos_id,
            "eos_token_id": tokenizer.eos_id,
            "pad_token_id": tokenizer.pad_id,
            "stop_token_ids": sorted(tokenizer.stop_ids),
            **tokenizer.special_tokens,
            "chat_template": tokenizer.chat_templates.get("default"),
        }
    )
