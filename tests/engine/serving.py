"""Runs requests through the real step loop, without a process or a socket."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from turnstile.engine.build import build_engine
from turnstile.engine.config import EngineConfig
from turnstile.engine.loop import StepLoop
from turnstile.engine.params import SamplingParams
from turnstile.engine.protocol import Snapshot, StepResult, Submit, TokenLogprobs


@dataclass
class Answer:
    """What one sample got."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None
    cached: int = 0


class Engine:
    """A step loop and everything that came out of it."""

    def __init__(self, model: Path | str, **config: object) -> None:
        settings: dict[str, object] = {
            "model": str(model), "threads": 1, "num_pages": 400, "max_num_seqs": 64,
            "max_num_batched_tokens": 256, "backend": "reference", "dtype": "float32",
        }  # fmt: skip
        settings.update(config)
        make, self.info = build_engine(EngineConfig(**settings), 1, lambda stage, share: None)  # type: ignore[arg-type]
        self.results: list[StepResult] = []
        self.answers: dict[tuple[str, int], Answer] = {}
        self.loop: StepLoop = make(self._take)

    @property
    def snapshot(self) -> Snapshot:
        return self.loop.snapshot()

    def submit(
        self,
        name: str,
        prompt: list[int],
        *,
        max_tokens: int = 12,
        seed: int = 0,
        priority: int = 0,
        **params: object,
    ) -> None:
        n = int(params.pop("n", 1))  # type: ignore[call-overload]
        given = {"temperature": 0.0, "logprobs": 2, **params}
        self.loop.apply(
            Submit(
                name, prompt, SamplingParams(**given), max_tokens, seed, n=n,  # type: ignore[arg-type]
                priority=priority, arrival=time.monotonic(),
            )
        )  # fmt: skip

    def run(self) -> dict[tuple[str, int], Answer]:
        while self.loop.has_work:
            self.loop.step()
            self.loop.scheduler.audit()
        return self.answers

    def _take(self, result: StepResult) -> None:
        self.results.append(result)
        for row in result.rows:
            answer = self.answers.setdefault((row.request_id, row.sample_index), Answer())
            assert row.first == len(answer.tokens)
            answer.tokens += row.tokens
            answer.logprobs += row.logprobs or []
            answer.prompt_logprobs += row.prompt_logprobs or []
            answer.finish = row.finish
            answer.error = row.error
            answer.cached = row.cached_tokens
