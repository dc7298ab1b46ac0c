"""From a checked request to its answer: the gate, the engine, and the two ways to answer."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass

from turnstile.engine.client import Generation
from turnstile.engine.params import SamplingParams
from turnstile.server.answer.choices import Choice, Job
from turnstile.server.answer.follower import Follower
from turnstile.server.answer.frames import Frames
from turnstile.server.answer.parameters import final_max_tokens, prefix_salt
from turnstile.server.answer.prompts import TokenizedPrompt, check_choices
from turnstile.server.answer.usage import Record
from turnstile.server.errors import ApiError, bad_request, from_exception, internal_error
from turnstile.server.gate import enter, make_work, rate_limits
from turnstile.server.http.exchange import Exchange
from turnstile.server.model import ServedModel
from turnstile.server.service import Service
from turnstile.server.watch.trails import RequestTrail
from turnstile.text.echo import echo_prompt
from turnstile.text.output import TextOptions
from turnstile.text.stop import StopAutomaton

logger = logging.getLogger("turnstile.server")

DEADLINE_GRACE = 1.0
"""Seconds after a deadline before the API process enforces it itself: the engine does at a step."""


@dataclass(slots=True, kw_only=True)
class Order:
    """A request, checked and tokenized: what the two endpoints have in common."""

    prompts: list[TokenizedPrompt]
    params: SamplingParams
    default_max_tokens: int | None
    deadline: float | None
    priority: int
    cache_salt: str | None
    prompt_field: str
    """The field that holds the prompts, for errors."""
    grammar_field: str | None = None
    """The field that asked for the grammar, for an error the engine finds in it."""
    echo: bool = False
    keep: int | None = None
    """Of each prompt's samples only the likeliest ``keep`` are returned (``best_of``)."""


def make_jobs(order: Order, service: Service, model: ServedModel, exchange: Exchange) -> list[Job]:
    """One job a prompt. Everything that could be refused is refused here, before any is queued."""
    params = order.params
    check_choices(len(order.prompts), params.n, service.config.max_choices)
    client_stop_ids = params.stop_token_ids
    params.add_end_ids(model.tokenizer.stop_ids.union(model.defaults.eos_ids))
    automaton = StopAutomaton(params.stop) if params.stop else None
    common = os.urandom(16).hex()
    jobs = []
    for place, prompt in enumerate(order.prompts):
        max_tokens = _max_tokens(order, len(prompt.ids), model)
        service.engine.check_fits(len(prompt.ids), max_tokens, params.n)
        if order.echo and prompt.text is None:
            prompt.text = echo_prompt(model.tokenizer, prompt.ids).text
        generation = Generation(
            request_id=common if len(order.prompts) == 1 else f"{common}-{place}",
            prompt=prompt.ids,
            params=params,
            max_tokens=max_tokens,
            seed=service.next_seed() if params.seed is None else params.seed,
            n=params.n,
            tenant=exchange.tenant.name,
            weight=exchange.tenant.weight,
            priority=order.priority,
            arrival=exchange.started,
            deadline=order.deadline,
            salt=prefix_salt(service.config, exchange.tenant, order.cache_salt),
        )
        options = _text_options(params, automaton, len(prompt.text or "") if order.echo else 0)
        jobs.append(
            Job(
                generation,
                prompt,
                client_stop_ids,
                model.tokenizer.vocabulary,
                options,
                first_index=place * (order.keep or params.n),
                grammar_field=order.grammar_field,
            )
        )
    return jobs


def _max_tokens(order: Order, prompt_tokens: int, model: ServedModel) -> int:
    """The output tokens of each sample. Raises :class:`ApiError` 400 where they cannot be had."""
    params = order.params
    most = final_max_tokens(
        params.max_tokens, prompt_tokens, model, order.default_max_tokens, order.prompt_field
    )
    if params.min_tokens > most:
        raise bad_request(
            f"min_tokens ({params.min_tokens}) is more than the {most} tokens that the request may "
            "get; give max_tokens.",
            "min_tokens",
        )
    return most


def _text_options(params: SamplingParams, stop: StopAutomaton | None, offset: int) -> TextOptions:
    """What the request says of its text; ``offset`` characters of prompt are echoed before it."""
    return TextOptions(
        stop=stop,
        include_stop=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        min_tokens=params.min_tokens,
        logprobs=params.logprobs is not None,
        offset=offset,
    )


class Answer:
    """Runs the jobs of one request and writes the answer.

    Use :meth:`run`; whatever happens, the engine and the gate are free of it afterwards.
    """

    def __init__(
        self,
        service: Service,
        exchange: Exchange,
        record: Record,
        frames: Frames,
        *,
        stream: bool,
        keep: int | None = None,
    ) -> None:
        self._service = service
        self._exchange = exchange
        self._record = record
        self._frames = frames
        self._stream = stream
        self._keep = keep
        self._metrics = service.metrics

    async def run(self) -> None:
        """Queue the jobs and answer the client. Raises :class:`ApiError` while that can still be
        a status.
        """
        record = self._record
        self._metrics.request_began()
        try:
            self._accept()
            if self._stream:
                await self._answer_stream()
            else:
                await self._answer_at_once()
        finally:
            now = self._service.clock()
            for job in record.jobs:
                self._service.jobs.pop(job.generation.request_id, None)
                job.release(now)
            self._metrics.request_ended(record, self._outcome())
            trail = self._service.requests.closed(self._frames.answer_id, self._outcome(), now)
            if trail is not None:
                self._metrics.request_closed(trail)
            self._note()

    def _outcome(self) -> str:
        if self._record.accepted is None or any(job.stream is None for job in self._record.jobs):
            return "refused"  # by the gate, or by an engine that takes no work now
        finishes = [choice.finish for job in self._record.jobs for choice in job.choices]
        if "error" in finishes:  # it ended the whole request, whatever the other samples did
            return "error"
        if None in finishes:
            return "timeout" if "timeout" in finishes else "abort"
        return str(finishes[0])

    def _note(self) -> None:
        record = self._record
        self._exchange.notes.update(
            prompt_tokens=record.num_prompt,
            cached_tokens=record.num_cached,
            completion_tokens=record.num_output,
            finish_reason=self._outcome(),
        )
        most = self._service.config.log_prompts
        if most > 0:
            prompts = [job.prompt.text or str(job.prompt.ids[:most]) for job in record.jobs]
            self._exchange.notes["prompts"] = [text[:most] for text in prompts]
        if record.first_token is not None:
            self._exchange.notes["ttft_ms"] = round((record.first_token - record.arrived) * 1e3, 1)

    def _accept(self) -> None:
        """Pass the gate with all jobs or none, and hand them to the engine."""
        service, jobs = self._service, self._record.jobs
        _, gate = service.require_model()
        now = service.clock()
        tenant = self._exchange.tenant
        works = [make_work(job.generation, tenant) for job in jobs]
        places = enter(gate, tenant, works, now)
        if tenant.limits.any:
            self._exchange.common_headers += rate_limits(gate, tenant, now)
        for job, place in zip(jobs, places, strict=True):
            job.place = place
        self._record.accepted = now
        exchange = self._exchange
        service.requests.accepted(
            RequestTrail(
                exchange.id, self._frames.answer_id, exchange.path, exchange.tenant.name,
                self._record, now,
            )
        )  # fmt: skip
        for job in jobs:
            service.jobs[job.generation.request_id] = (job, self._record)
            job.stream = service.engine.submit(job.generation)
            if job.generation.deadline is not None:
                job.expire_in(max(0.0, job.generation.deadline - now) + DEADLINE_GRACE)

    # -- two ways to answer -------------------------------------------------------------------

    async def _answer_at_once(self) -> None:
        await self._follow_all()
        choices = [choice for job in self._record.jobs for choice in self._kept(job)]
        await self._exchange.respond(self._frames.body(choices))

    def _kept(self, job: Job) -> list[Choice]:
        """The choices to return: with ``best_of``, the likeliest per token, best first."""
        if self._keep is None or self._keep >= len(job.choices):
            return job.choices
        ranked = sorted(
            job.choices, key=lambda c: c.logprob_sum / max(1, c.num_tokens), reverse=True
        )[: self._keep]
        first = job.choices[0].index
        for place, choice in enumerate(ranked):
            choice.index = first + place
        return ranked

    async def _answer_stream(self) -> None:
        exchange = self._exchange
        await exchange.start_stream()
        self._service.stream_began(exchange)
        try:
            last = await self._follow_all() + self._frames.ending()
        except Exception as error:
            last = self._frames.failure(self._error(error))
        finally:
            self._service.stream_ended(exchange)
        await exchange.end_stream(last)

    def _error(self, error: Exception) -> ApiError:
        known = from_exception(error)
        if known is None:
            logger.exception("Request %s failed", self._exchange.id, exc_info=error)
            known = internal_error()
        self._exchange.notes["error"] = known.code or known.kind
        return known

    # -- following the tokens -----------------------------------------------------------------

    async def _follow_all(self) -> bytes:
        """Follow every job to its end; returns what a stream has still to send."""
        frames = self._frames if self._stream else None
        followers = [
            Follower(job, self._record, self._exchange, frames, self._service)
            for job in self._record.jobs
        ]
        if len(followers) == 1:
            return await followers[0].run()
        try:
            async with asyncio.TaskGroup() as group:
                for follower in followers:
                    group.create_task(self._follow_one(follower))
        except* Exception as errors:
            raise _first_error(errors) from None
        return b""

    async def _follow_one(self, follower: Follower) -> None:
        """One of several: it ends before the answer does."""
        if data := await follower.run():
            await self._exchange.write(data, self._service.clock())


def _first_error(errors: BaseExceptionGroup[Exception]) -> Exception:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Exception)
    return error
