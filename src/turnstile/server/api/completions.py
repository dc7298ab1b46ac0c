"""``POST /v1/completions``."""

from __future__ import annotations

from turnstile.engine.params import SamplingParams
from turnstile.server.answer.frames import CompletionFrames
from turnstile.server.answer.intake import Endpoint, answer
from turnstile.server.answer.prompts import TokenizedPrompt, completion_prompts
from turnstile.server.answer.reader import Reader
from turnstile.server.answer.schemas import CompletionRequest
from turnstile.server.config import ServerConfig
from turnstile.server.errors import bad_request, unsupported
from turnstile.server.http.exchange import Exchange
from turnstile.server.service import Service

_MOST_DRAWN = 128


class Completions(Endpoint[CompletionRequest]):
    """One prompt or many, continued."""

    schema = CompletionRequest
    id_prefix = "cmpl"
    prompt_field = "prompt"
    frames = CompletionFrames

    async def read(
        self,
        request: CompletionRequest,
        reader: Reader,
        size: int,
        params: SamplingParams,
        config: ServerConfig,
    ) -> list[TokenizedPrompt]:
        """Tokenize what is text; every prompt, or none."""
        if request.suffix:
            raise unsupported("suffix is not supported.", "suffix")
        return await completion_prompts(request, reader, n=params.n, max_choices=config.max_choices)

    def wants_logprobs(self, request: CompletionRequest) -> bool:
        """A number asks for them, 0 too."""
        return request.logprobs is not None

    def echoes(self, request: CompletionRequest) -> bool:
        """``echo``."""
        return bool(request.echo)

    def draw_more(self, request: CompletionRequest, params: SamplingParams) -> int | None:
        """``best_of``: the likeliest are found by their log-probabilities."""
        n, drawn = params.n, request.best_of
        if drawn is None or drawn == n:
            return None
        if drawn < n:
            raise bad_request(f"best_of ({drawn}) must be at least n ({n}).", "best_of")
        if drawn > _MOST_DRAWN:
            raise bad_request(f"best_of must be at most {_MOST_DRAWN}.", "best_of")
        if request.stream:
            message = "best_of above n cannot be streamed: the best is known last."
            raise bad_request(message, "best_of")
        params.n, params.logprobs = drawn, params.logprobs or 0
        return n

    def default_max_tokens(self, config: ServerConfig) -> int | None:
        """OpenAI's, unless the operator says otherwise."""
        return config.default_max_tokens


_COMPLETIONS = Completions()


async def completions(service: Service, exchange: Exchange) -> None:
    """Complete one prompt or many."""
    await answer(_COMPLETIONS, service, exchange)
