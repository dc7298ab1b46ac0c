"""``POST /tokenize`` and ``/detokenize``."""

from __future__ import annotations

from turnstile.server.answer.parameters import deadline_of
from turnstile.server.answer.prompts import check_ids
from turnstile.server.answer.reader import Reader
from turnstile.server.answer.schemas import DetokenizeRequest, TokenizeRequest
from turnstile.server.api.chat import encode_chat
from turnstile.server.errors import bad_request
from turnstile.server.http.exchange import Exchange
from turnstile.server.http.json_body import decode
from turnstile.server.service import Service
from turnstile.server.threads import ends_by
from turnstile.text.chat import ChatInput

_MOST_IDS = 1 << 20
"""Most ids that ``/detokenize`` takes: handing them over keeps the interpreter's lock."""


async def tokenize(service: Service, exchange: Exchange) -> None:
    """Token ids of a text or a conversation."""
    model, _ = service.require_model()
    body = await exchange.json_body(service.bodies)
    request = decode(body, TokenizeRequest)
    model.check_name(request.model)
    reader = service.reader(model, exchange.tenant)
    strings = None
    async with ends_by(deadline_of(request.timeout, exchange, service.config)):
        ids = await _ids_of(request, reader, len(body))
        if request.return_token_strs:
            token_string = model.tokenizer.token_string
            strings = await reader.off_loop(len(ids), lambda: [token_string(i) for i in ids])
    await exchange.respond_json(
        {
            "count": len(ids),
            "max_model_len": model.max_model_len,
            "tokens": ids,
            "token_strs": strings,
        }
    )


async def _ids_of(request: TokenizeRequest, reader: Reader, size: int) -> list[int]:
    """The ids of what is in a body of ``size`` bytes."""
    if (request.prompt is None) == (request.messages is None):
        raise bad_request("Send either prompt or messages.", "prompt")
    if request.prompt is not None:
        text = request.prompt
        reader.refuse_giant(len(text), "prompt")
        encode = reader.model.tokenizer.encode
        add_special = request.add_special_tokens is not False
        return await reader.off_loop(
            len(text), lambda: encode(text, add_special_tokens=add_special)
        )
    continues = bool(request.continue_final_message)
    chat = ChatInput(
        messages=request.messages or [],
        tools=request.tools,
        add_generation_prompt=request.add_generation_prompt is not False and not continues,
        continue_final_message=continues,
        variables=request.chat_template_kwargs or {},
    )
    return (await encode_chat(chat, reader, size)).token_ids


async def detokenize(service: Service, exchange: Exchange) -> None:
    """Text of token ids."""
    model, _ = service.require_model()
    request = decode(await exchange.json_body(service.bodies), DetokenizeRequest)
    model.check_name(request.model)
    ids = request.tokens
    if len(ids) > _MOST_IDS:
        raise bad_request(f"tokens has {len(ids)} ids; at most {_MOST_IDS} are taken.", "tokens")

    def read() -> str:
        check_ids(ids, model.vocab_size, "tokens")
        return model.tokenizer.decode(ids)

    reader = service.reader(model, exchange.tenant)
    async with ends_by(deadline_of(request.timeout, exchange, service.config)):
        text = await reader.off_loop(len(ids), read)
    await exchange.respond_json({"prompt": text})
