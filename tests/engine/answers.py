"""Requests for a fake engine, what they must answer, and how to collect it."""

from __future__ import annotations

from turnstile.engine.client import EngineClient, Generation, Stream
from turnstile.engine.config import EngineConfig
from turnstile.engine.fake import fake_token
from turnstile.engine.journal import Journal
from turnstile.engine.params import SamplingParams
from turnstile.engine.protocol import Row, StepResult

VOCABULARY = 1000


def config(seconds_per_step: float = 0.0, **changes: object) -> EngineConfig:
    values: dict[str, object] = {"num_pages": 1024, "max_num_seqs": 64, "step_timeout": 20.0}
    return EngineConfig(model=f"fake:{seconds_per_step}", **(values | changes))  # type: ignore[arg-type]


def generation(name: str, prompt: list[int], max_tokens: int = 20, **changes: object) -> Generation:
    values: dict[str, object] = {
        "params": SamplingParams(temperature=1.0), "seed": len(name) + sum(prompt)
    }  # fmt: skip
    return Generation(
        request_id=name,
        prompt=prompt,
        max_tokens=max_tokens,
        **(values | changes),  # type: ignore[arg-type]
    )


def expected(request: Generation) -> list[list[int]]:
    """The tokens of each sample, computed without any engine."""
    answers = []
    for index in range(request.n):
        history = list(request.prompt)
        for _ in range(request.max_tokens):
            history.append(fake_token(history, request.params, request.seed, index, VOCABULARY))
        answers.append(history[len(request.prompt) :])
    return answers


class Answer:
    """What came of a stream. Fails where rows are not in order and without gaps."""

    def __init__(self, n: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(n)]
        self.finish: list[str | None] = [None] * n
        self.errors: list[str] = []
        self.charged = [0.0] * n
        self.prompt_logprobs: list[float] = []


async def collect(stream: Stream, n: int = 1, into: Answer | None = None) -> Answer:
    answer = into or Answer(n)
    async for rows in stream:
        assert rows
        for row in rows:
            k = row.sample_index
            assert answer.finish[k] is None
            assert row.first == len(answer.tokens[k])
            answer.tokens[k] += row.tokens
            answer.finish[k] = row.finish
            answer.charged[k] = row.charged
            answer.prompt_logprobs += [each.logprob for each in row.prompt_logprobs or ()]
            if row.error:
                answer.errors.append(row.error)
    return answer


async def ask(engine: EngineClient, request: Generation) -> Answer:
    return await collect(engine.submit(request), request.n)


def rows_of(journal: Journal, result: StepResult) -> list[Row]:
    """All that a step says of its samples as rows, in order."""
    rows = []
    for number, first, token, charged in result.draws or ():
        entry = journal.find(number)
        if entry is not None:
            index = number - entry.number
            request_id = entry.generation.request_id
            rows.append(Row(request_id, index, first, [token], charged=charged))
    return rows + result.rows
