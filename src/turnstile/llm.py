"""Turnstile from Python, without a server: :class:`LLM` and :class:`AsyncLLM`.

::

    from turnstile import LLM, SamplingParams

    with LLM() as llm:
        for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
            print(output.outputs[0].text)

Batching, paging and the prefix cache are those of the server; the engine runs in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from turnstile.engine.client import Generation, Stream
from turnstile.engine.config import EngineConfig
from turnstile.engine.local import LocalEngine
from turnstile.engine.params import ParameterError, SamplingParams
from turnstile.engine.protocol import Snapshot
from turnstile.inputs import (
    Messages,
    Prompt,
    checked_priority,
    list_of_prompts,
    one_each,
    own_params,
    text_and_ids,
)
from turnstile.models.source import ModelSource, resolve
from turnstile.outputs import OutputBuilder, RequestOutput
from turnstile.text.chat import ChatEncoder, ChatInput
from turnstile.text.tokenizer import Tokenizer

_T = TypeVar("_T")


class AsyncLLM:
    """An engine in this process, for programs that use asyncio.

    Parameters
    ----------
    model
        A .gguf file, a Hugging Face directory or id, or the default model's name.
    tokenizer
        Where the tokenizer is, if not with the model.
    chat_template
        Jinja source used in place of the model's own.
    seed
        Of the seeds given to requests that name none; None: they differ from run to run.
    settings
        Fields of :class:`EngineConfig`: ``dtype``, ``max_model_len``, ``num_pages``…
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        tokenizer: str | None = None,
        chat_template: str | None = None,
        seed: int | None = None,
        **settings: Any,
    ) -> None:
        if model is not None:
            settings["model"] = model
        self.config = EngineConfig(**settings)
        self.config.check()
        self._source: ModelSource = resolve(self.config.model, revision=self.config.revision)
        self._tokenizer = Tokenizer.from_path(tokenizer or self._source.tokenizer_path)
        self._chat = ChatEncoder(self._tokenizer, chat_template)
        self._engine = LocalEngine(self.config)
        self._streams: dict[str, Stream] = {}
        self._random = random.Random(seed)
        self._closed = False

    async def start(self) -> None:
        """Load the model. Raises :class:`EngineUnavailableError` with the reason if it cannot."""
        await self._engine.start()

    async def aclose(self) -> None:
        """End what runs, and the engine. May be called again."""
        self._closed = True
        await self._engine.stop(0.0)

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *details: object) -> None:
        await self.aclose()

    # -- what is served ---------------------------------------------------------------------------

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used where no parameters are given: the model makers' recommendation."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        values = {name: getattr(self._source.generation, name) for name in names}
        return SamplingParams(**{name: v for name, v in values.items() if v is not None})

    def get_metrics(self) -> Snapshot:
        """Counters and gauges at the end of the last step."""
        return self._engine.snapshot

    def reset_prefix_cache(self) -> None:
        """Forget every cached page that nobody holds."""
        self._engine.reset_prefix_cache()

    # -- generation -------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the output as it grows, whole each time (the same object, brought up to date).

        Leaving the loop, or :meth:`abort`, ends the request.

        Raises
        ------
        ParameterError, NeverFitsError
            What was asked for is out of range, or larger than the context or the page pool.
        EngineUnavailableError
            The engine has failed, or was never started.
        RuntimeError
            After :meth:`aclose`.
        """
        builder, generation = self._prepare(prompt, sampling_params, request_id, priority)
        async for _ in self._follow(builder, generation):
            yield builder.update()

    async def generate_final(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> RequestOutput:
        """The finished output. Raises what :meth:`generate` raises."""
        builder, generation = self._prepare(prompt, sampling_params, None, priority)
        async for _ in self._follow(builder, generation):
            pass
        return builder.update()

    def abort(self, request_id: str) -> None:
        """End a request; unknown ids are ignored. Its generator ends with what there is."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.cancel()

    def encode_chat(self, messages: Messages, **fields: Any) -> dict[str, Any]:
        """A chat as a prompt; ``fields`` are those of :class:`ChatInput`."""
        prompt = self._chat.encode(ChatInput(messages=messages, **fields))
        return {"prompt": prompt.text, "prompt_token_ids": prompt.token_ids}

    async def _follow(self, builder: OutputBuilder, generation: Generation) -> AsyncIterator[None]:
        name = builder.output.request_id
        if name in self._streams:
            raise ParameterError(f"A request with the id {name!r} is running.", "request_id")
        stream = self._streams[name] = self._engine.submit(generation)
        try:
            async for rows in stream:
                for row in rows:
                    output = builder.output.outputs[row.sample_index]
                    if output.finish_reason is None and builder.take(row):
                        stream.cancel(row.sample_index, "stop")
                yield
            if builder.abort_unfinished():
                yield
        finally:
            del self._streams[name]
            stream.cancel()

    def _prepare(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        priority: int,
    ) -> tuple[OutputBuilder, Generation]:
        if self._closed:
            raise RuntimeError("This AsyncLLM has been closed.")
        priority = checked_priority(priority)
        text, ids = text_and_ids(prompt)
        if ids is None:
            ids = self._tokenizer.encode(text or "")
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = own_params(sampling_params)
        info = self._engine.info
        vocab_size = info.vocab_size if info is not None else self._source.config.vocab_size
        params.check(vocab_size)
        bad = next((i for i in ids if not 0 <= i < vocab_size), None)
        if not ids:
            raise ParameterError("The prompt is empty.", "prompt")
        if bad is not None:
            raise ParameterError(
                f"The prompt has the token id {bad}; ids go from 0 to {vocab_size - 1}.", "prompt"
            )
        client_stop_ids = params.stop_token_ids
        params.add_end_ids(self._tokenizer.stop_ids.union(self._source.generation.eos_ids))
        room = (info.max_model_len if info is not None else len(ids) + 1) - len(ids)
        generation = Generation(
            # Never used before: rows of an aborted request may still be on their way.
            request_id=uuid.uuid4().hex,
            prompt=ids,
            params=params,
            max_tokens=max(1, room) if params.max_tokens is None else params.max_tokens,
            seed=self._random.getrandbits(63) if params.seed is None else params.seed,
            n=params.n,
            priority=priority,
            arrival=time.monotonic(),
        )
        builder = OutputBuilder(generation, text, self._tokenizer, client_stop_ids)
        builder.output.request_id = request_id or generation.request_id
        return builder, generation


class LLM:
    """An engine in this process, for scripts: every call waits for its answers.

    Takes what :class:`AsyncLLM` takes, and loads the model at once. Close it (or use ``with``) to
    free its memory before the program ends. May be used from several threads.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        self._llm = AsyncLLM(model, **settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="turnstile-llm", daemon=True
        )
        self._thread.start()
        self._closed = False
        try:
            self._wait(self._llm.start())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the engine and free its memory. May be called again."""
        if not self._closed:
            self._wait(self._llm.aclose())
            self._closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """One output for each prompt, in their order; they are computed together.

        Parameters
        ----------
        prompts
            One prompt, or a list of them (a list of integers is one prompt).
        sampling_params
            For all, or one for each prompt; None: :meth:`get_default_sampling_params`.
        use_tqdm
            Show a progress bar, where there is a terminal to show it on.
        priority
            Lower is earlier; for all, or one for each prompt.

        Raises
        ------
        ParameterError, NeverFitsError
            A request is out of range, or larger than the context or the page pool. Nothing has
            been generated then. A request that fails later has ``finish_reason`` ``error``.
        """
        chosen = list_of_prompts(prompts)
        params = one_each(sampling_params, len(chosen), "sampling_params")
        priorities = one_each(priority, len(chosen), "priority")
        return self._wait(self._generate_all(chosen, params, priorities, use_tqdm))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """The answer to one chat, or to each of several, in their order.

        Raises :class:`MessageError` and :class:`TemplateError` beside what :meth:`generate` raises.
        """
        given: list[Any] = list(messages)
        chats: list[Messages] = [given] if given and isinstance(given[0], Mapping) else given
        prompts = [
            self._llm.encode_chat(
                chat,
                template=chat_template,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                tools=tools,
                variables=dict(chat_template_kwargs or {}),
            )
            for chat in chats
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._llm.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used where no parameters are given: the model makers' recommendation."""
        return self._llm.get_default_sampling_params()

    def get_metrics(self) -> Snapshot:
        """Counters and gauges at the end of the last step."""
        return self._llm.get_metrics()

    def reset_prefix_cache(self) -> None:
        """Forget every cached page that nobody holds. Raises RuntimeError after :meth:`close`."""
        self._refuse_closed()
        self._loop.call_soon_threadsafe(self._llm.reset_prefix_cache)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError("This LLM has been closed.")

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        try:
            self._refuse_closed()
        except RuntimeError:
            work.close()  # or Python warns that nobody awaited it
            raise
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C too: what was begun must not go on
            future.cancel()
            raise

    async def _generate_all(
        self,
        prompts: list[Prompt],
        params: list[SamplingParams | None],
        priorities: list[int | None],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        with _progress(len(prompts), use_tqdm) as advance:

            async def one(i: int) -> RequestOutput:
                asked = priorities[i]
                output = await self._llm.generate_final(
                    prompts[i], params[i], priority=0 if asked is None else asked
                )
                advance()
                return output

            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(one(i)) for i in range(len(prompts))]
            except ExceptionGroup as several:
                raise several.exceptions[0] from None
            return [task.result() for task in tasks]


@contextlib.contextmanager
def _progress(total: int, wanted: bool) -> Iterator[Any]:
    """A bar on standard error if it is a terminal; yields the way to advance it by one."""
    if not wanted or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("Generating", total=total)
        yield lambda: bar.advance(task)


__all__ = ["LLM", "AsyncLLM", "Messages", "Prompt"]
