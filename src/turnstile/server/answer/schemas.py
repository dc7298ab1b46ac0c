"""The requests clients may send, as msgspec structs: OpenAI's fields and vLLM's beside them.

Types are checked while parsing; ranges in :mod:`turnstile.server.answer.parameters`. The OpenAPI
document is generated from these structs.
"""

from __future__ import annotations

from typing import Any

import msgspec

Prompt = str | list[str | int | list[int]]


class StreamOptions(msgspec.Struct):
    """``include_usage``: one more chunk with the usage; ``continuous_usage_stats``: on each."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What completions and chat completions have in common."""

    model: str | None = None
    """A name from ``/v1/models``; omitted means the one that is served."""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = 1
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """Wins over ``max_tokens``."""
    min_tokens: int | None = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = False
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    """Keep only this many of the prompt's last tokens; -1 means as many as fit."""
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    stream_interval: int | None = None
    """Tokens between two chunks of a stream."""
    response_format: dict[str, Any] | None = None
    """``{"type": "text" | "json_object"}``, or ``json_schema`` with its schema."""
    structured_outputs: dict[str, Any] | None = None
    """One of ``json``, ``regex``, ``choice``, ``grammar``, ``json_object``."""
    priority: int | None = None
    """Lower is earlier, among the requests of one tenant. Default: the tenant's, or 0."""
    timeout: float | None = None
    """Seconds after which the request ends with what there is (header: ``x-request-timeout``)."""
    cache_salt: str | None = None
    """Prefix-cache pages are shared only among requests with equal salts."""
    user: str | None = None
    use_beam_search: bool | None = False
    length_penalty: float | None = None
    bad_words: list[str] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of ``POST /v1/completions``."""

    prompt: Prompt | None = None
    """Text, a list of texts, token ids, or a list of lists of token ids."""
    best_of: int | None = None
    """Samples drawn, of which the ``n`` likeliest are returned; at least ``n``, not streamed."""
    echo: bool | None = False
    logprobs: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = True


Message = dict[str, Any]
"""``role``, ``content`` and the rest; :mod:`turnstile.text.messages` checks them."""


class ChatRequest(GenerationRequest, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[Message]
    logprobs: bool | None = False
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    add_special_tokens: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    """Functions that may be called, each ``{"type": "function", "function": {"name": …}}``."""
    tool_choice: str | dict[str, Any] | None = None
    """``auto``, ``none``, ``required``, or ``{"type": "function", "function": {"name": …}}``."""
    parallel_tool_calls: bool | None = True
    """Whether an answer may have several calls, where they are demanded."""
    include_reasoning: bool | None = True
    """Whether the answer shows what the model thought before it."""
    functions: list[Any] | None = None
    modalities: list[str] | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /v1/responses``."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    """What a user says, or the conversation: messages, calls and their outputs."""
    instructions: str | None = None
    """A system message before the input."""
    stream: bool | None = False
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    text: dict[str, Any] | None = None
    """``{"format": {"type": "text" | "json_object"}}``, or ``json_schema`` with its schema."""
    tools: list[dict[str, Any]] | None = None
    """Functions that may be called, each ``{"type": "function", "name": …}``."""
    tool_choice: str | dict[str, Any] | None = None
    """``auto``, ``none``, ``required``, or ``{"type": "function", "name": …}``."""
    parallel_tool_calls: bool | None = True
    metadata: dict[str, str] | None = None
    user: str | None = None
    priority: int | None = None
    timeout: float | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = False
    truncation: str | None = None
    top_logprobs: int | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /v1/messages/count_tokens``."""

    model: str | None = None
    messages: list[Message]
    """Turns of ``user`` and ``assistant``: text, ``tool_use`` and ``tool_result`` blocks."""
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    """Functions that may be called, each ``{"name": …, "input_schema": …}``."""
    tool_choice: dict[str, Any] | None = None
    """``{"type": "auto" | "any" | "none"}``, or ``tool`` with a ``name``."""
    thinking: dict[str, Any] | None = None
    """``{"type": "enabled"}`` shows what the model thought."""


class MessagesRequest(CountRequest, kw_only=True):
    """Body of ``POST /v1/messages``."""

    max_tokens: int
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = None
    seed: int | None = None
    priority: int | None = None
    timeout: float | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /tokenize``: a ``prompt``, or ``messages`` to render first."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    timeout: float | None = None
    """Seconds after which the request is refused (header: ``x-request-timeout``)."""


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /detokenize``."""

    tokens: list[int]
    model: str | None = None
    timeout: float | None = None
    """Seconds after which the request is refused (header: ``x-request-timeout``)."""
