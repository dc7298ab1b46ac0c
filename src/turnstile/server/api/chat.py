"""``POST /v1/chat/completions`` and its ``/render``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from turnstile.engine.params import SamplingParams
from turnstile.server.answer.frames import ChatFrames
from turnstile.server.answer.intake import Endpoint, answer
from turnstile.server.answer.parameters import deadline_of, prefix_salt, wanted_tokens
from turnstile.server.answer.prompts import TokenizedPrompt, truncate
from turnstile.server.answer.reader import Reader
from turnstile.server.answer.schemas import ChatRequest
from turnstile.server.answer.tools import ToolUse, tool_use
from turnstile.server.config import ServerConfig
from turnstile.server.errors import (
    ApiError,
    bad_request,
    message_refusal,
    sentence,
    unsupported,
)
from turnstile.server.http.exchange import Exchange
from turnstile.server.http.json_body import decode
from turnstile.server.model import ServedModel
from turnstile.server.service import Service
from turnstile.server.threads import ends_by
from turnstile.text.chat import ChatInput, ChatPrompt
from turnstile.text.errors import MessageError, TemplateError
from turnstile.text.reasoning import CLOSE

_LOOKED_AT = 10_000
"""Parts of messages whose lengths are added up on the event loop: a millisecond or two."""


class Chats(Endpoint[ChatRequest]):
    """A conversation, and what is said next."""

    schema = ChatRequest
    id_prefix = "chatcmpl"
    prompt_field = "messages"
    frames = ChatFrames

    async def read(
        self,
        request: ChatRequest,
        reader: Reader,
        size: int,
        params: SamplingParams,
        config: ServerConfig,
    ) -> list[TokenizedPrompt]:
        """Render the messages with the model's template, and tokenize them."""
        trust = config.trust_request_chat_template
        salt = prefix_salt(config, reader.tenant, request.cache_salt)
        prompt = await render_chat(request, reader, size, trust=trust, salt=salt)
        return [TokenizedPrompt(prompt.token_ids)]

    def tool_use(
        self, request: ChatRequest, model: ServedModel, config: ServerConfig
    ) -> ToolUse | None:
        """``tools`` and ``tool_choice``."""
        return tool_use(request, model, config)

    def thinks(self, request: ChatRequest, model: ServedModel, config: ServerConfig) -> bool:
        """Models whose template knows the tags do, and those of which the operator says so."""
        parser = config.reasoning_parser
        if parser == "auto":
            return model.chat.mentions(CLOSE, request.chat_template)
        return parser != "none"

    def shows_reasoning(self, request: ChatRequest) -> bool:
        """``include_reasoning``."""
        return request.include_reasoning is not False

    def wants_logprobs(self, request: ChatRequest) -> bool:
        """True asks for them."""
        return bool(request.logprobs)


_CHATS = Chats()


async def chat_completions(service: Service, exchange: Exchange) -> None:
    """Answer a conversation."""
    await answer(_CHATS, service, exchange)


async def render(service: Service, exchange: Exchange) -> None:
    """Show the text and the ids a conversation becomes, without running it."""
    model, _ = service.require_model()
    config = service.config
    body = await exchange.json_body(service.bodies)
    request = decode(body, ChatRequest)
    model.check_name(request.model)
    tool_use(request, model, config)  # what cannot be called is not shown either
    async with ends_by(deadline_of(request.timeout, exchange, config)):
        rendered = await render_chat(
            request,
            service.reader(model, exchange.tenant),
            len(body),
            trust=config.trust_request_chat_template,
        )
    await exchange.respond_json(
        {
            "prompt": rendered.text,
            "prompt_token_ids": rendered.token_ids,
            "count": len(rendered.token_ids),
            "max_model_len": model.max_model_len,
        }
    )


async def render_chat(
    request: ChatRequest, reader: Reader, size: int, *, trust: bool, salt: bytes | None = None
) -> ChatPrompt:
    """Text and ids of a conversation that came in a body of ``size`` bytes. With ``salt`` they may
    be remembered for those who come with the same.

    Raises :class:`ApiError` 400 with the template's own complaint where it has one, and for
    what this server cannot do for a chat.
    """
    _refuse_unsupported(request, trust=trust)
    if request.truncate_prompt_tokens is None:
        wanted = wanted_tokens(request)
        chars = _characters(request.messages, _LOOKED_AT)
        reader.refuse_hopeless(chars, "messages", 1 if wanted is None else wanted)
    continues = bool(request.continue_final_message)
    chat = ChatInput(
        messages=request.messages,
        tools=None if request.tool_choice == "none" else request.tools,
        documents=request.documents,
        add_generation_prompt=request.add_generation_prompt is not False and not continues,
        continue_final_message=continues,
        template=request.chat_template,
        variables=request.chat_template_kwargs or {},
    )
    prompt = await encode_chat(chat, reader, size, salt)
    ids = truncate(prompt.token_ids, request.truncate_prompt_tokens, reader.model)
    return ChatPrompt(prompt.text, ids)


async def encode_chat(
    chat: ChatInput, reader: Reader, size: int, salt: bytes | None = None
) -> ChatPrompt:
    """Render and tokenize, in a thread where a body of ``size`` bytes makes it long. ``salt`` as
    in :func:`render_chat`.

    The whole body counts: a template may render any of it, and all of it is looked through.
    """
    reader.refuse_giant(size, "messages")
    encode, sections = reader.model.chat.encode, reader.model.sections
    whole = None if salt is None or sections is None else partial(sections.encode, salt=salt)
    try:
        prompt = await reader.off_loop(size, lambda: encode(chat, whole))
    except MessageError as error:
        raise message_refusal(error) from None
    except TemplateError as error:
        raise bad_request(sentence(error), "messages") from None
    except RecursionError:
        raise bad_request("The messages are nested too deeply.", "messages") from None
    if not prompt.token_ids:
        raise bad_request("The conversation renders to nothing.", "messages")
    return prompt


def _characters(messages: Sequence[Mapping[str, Any]], most: int) -> int:
    """Characters of the first ``most`` parts of messages: the tokenizer will see at least as many
    bytes.
    """
    return sum(map(len, itertools.islice(_texts(messages), most)))


def _texts(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One text for every part of every message, empty where it has none."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else (content,):
            if isinstance(part, dict):
                part = part.get("refusal" if part.get("type") == "refusal" else "text")
            yield part if isinstance(part, str) else ""


def _refuse_unsupported(request: ChatRequest, *, trust: bool) -> None:
    if request.functions:
        raise unsupported("Functions are not supported; send tools.", "functions")
    if request.modalities not in (None, ["text"]):
        raise unsupported("Only text comes out of this server.", "modalities")
    if request.chat_template is not None and not trust:
        raise ApiError(
            400,
            "Chat templates in requests are not accepted here (--trust-request-chat-template).",
            param="chat_template",
            code="unsupported_parameter",
        )
