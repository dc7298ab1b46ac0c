"""``POST /tokenize`` and ``/detokenize``."""

from __future__ import annotations

from turnstile.server.chat import encode_chat
from turnstile.server.errors import bad_request
from turnstile.server.exchange import Exchange
from turnstile.server.json_body import decode
from turnstile.server.prompts import check_ids, off_loop, refuse_giant
from turnstile.server.schemas import DetokenizeRequest, TokenizeRequest
from turnstile.server.service import Service
from turnstile.text.chat import ChatInput

_MOST_IDS = 1 << 20
"""Most ids that ``/detokenize`` takes: handing them over keeps the interpreter's lock."""


async def tokenize(service: Service, exchange: Exchange) -> None:
    """Token ids of a text or a conversation."""
    model, _ = service.require_model()
    body = await exchange.json_body(service.bodies)
    request = decode(body, TokenizeRequest)
    exchange.watch()
    model.check_name(request.model)
    tokenizer = model.tokenizer
    if (request.prompt is None) == (request.messages is None):
        raise bad_request("Send either prompt or messages.", "prompt")
    if request.prompt is not None:
        text = request.prompt
        refuse_giant(len(text), model, "prompt")
        add_special = request.add_special_tokens is not False
        ids = await off_loop(
            len(text), lambda: tokenizer.encode(text, add_special_tokens=add_special)
        )
    else:
        continues = bool(request.continue_final_message)
        chat = ChatInput(
            messages=request.messages or [],
            add_generation_prompt=request.add_generation_prompt is not False and not continues,
            continue_final_message=continues,
            variables=request.chat_template_kwargs or {},
        )
        ids = (await encode_chat(chat, model, len(body))).token_ids
    strings = None
    if request.return_token_strs:
        strings = await off_loop(len(ids), lambda: [tokenizer.token_string(i) for i in ids])
    await exchange.respond_json(
        {
            "count": len(ids),
            "max_model_len": model.max_model_len,
            "tokens": ids,
            "token_strs": strings,
        }
    )


async def detokenize(service: Service, exchange: Exchange) -> None:
    """Text of token ids."""
    model, _ = service.require_model()
    request = decode(await exchange.json_body(service.bodies), DetokenizeRequest)
    exchange.watch()
    model.check_name(request.model)
    if len(request.tokens) > _MOST_IDS:
        raise bad_request(
            f"tokens has {len(request.tokens)} ids; at most {_MOST_IDS} are taken.", "tokens"
        )
    check_ids(request.tokens, model.vocab_size, "tokens")
    text = await off_loop(len(request.tokens), lambda: model.tokenizer.decode(request.tokens))
    await exchange.respond_json({"prompt": text})
