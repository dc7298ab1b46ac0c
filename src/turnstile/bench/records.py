"""What became of one request, read from the bytes it brought once the run is over."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import msgspec

Outcome = Literal["completed", "failed", "incomplete"]
Counted = Literal["usage", "events"]
"""Where a number of output tokens comes from: the server's word, or the events with text."""

REJECTIONS = (429, 503)


@dataclass(slots=True)
class Attempt:
    """One request as the generator saw it, all times on ``time.perf_counter``'s clock.

    Parameters
    ----------
    scheduled, sent, ended
        When it was due, when it was written, and when its answer was over.
    wanted
        Tokens the answer must have; None for any number.
    status, pieces
        HTTP status (0 for none) and the timed body bytes.
    error
        Why there was no whole answer; None if there was one.
    cut
        The generator ended the request itself, at its time limit.
    """

    scheduled: float
    sent: float
    wanted: int | None
    ended: float = 0.0
    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    error: str | None = None
    cut: bool = False


@dataclass(slots=True)
class Record:
    """One request, measured.

    Parameters
    ----------
    due, sent, ended
        Seconds since the start of the run.
    times
        When each event with text came, in seconds since the start of the run.
    prompt_tokens, output_tokens
        What the server's usage says. Without usage, `output_tokens` is the number of events with
        text, and `counted` says so.
    reason
        Why the request counts as failed or incomplete.
    status
        HTTP status; 0 if no answer began.
    queue
        Seconds in the server's queue, where its usage event tells them.
    cached_tokens
        Prompt tokens the server had in its prefix cache, where it tells them.
    """

    outcome: Outcome
    due: float
    sent: float
    ended: float
    times: list[float]
    prompt_tokens: int
    output_tokens: int
    wanted: int | None
    counted: Counted
    reason: str | None = None
    status: int = 0
    queue: float | None = None
    cached_tokens: int | None = None

    @property
    def rejected(self) -> bool:
        """Whether the server refused the request for its load; such a request has failed."""
        return self.status in REJECTIONS

    @property
    def ttft(self) -> float | None:
        """Seconds from the moment the request was due to its first text."""
        return self.times[0] - self.due if self.times else None

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first: over tokens, not events; None below two tokens."""
        if self.output_tokens < 2 or not self.times:
            return None
        return (self.times[-1] - self.times[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between one event with text and the next: one less than there are events."""
        return [after - before for before, after in pairwise(self.times)]

    @property
    def worst_gap(self) -> float | None:
        """Mean of the longest tenth of the gaps, at least one: how this stream stuttered."""
        gaps = sorted(self.gaps)
        longest = gaps[-math.ceil(len(gaps) / 10) :] if gaps else []
        return sum(longest) / len(longest) if longest else None

    @property
    def normalised(self) -> float | None:
        """Seconds from due to the end for each output token (Orca, section 6); None without any."""
        return self.e2e / self.output_tokens if self.output_tokens else None

    @property
    def e2e(self) -> float:
        """Seconds from the moment the request was due to the end of its answer."""
        return self.ended - self.due


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None

    @property
    def said(self) -> str:
        """The text of a completion's event, or of a chat's."""
        if self.delta is None:
            return self.text or ""
        return (self.delta.reasoning_content or "") + (self.delta.content or "")


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Metrics(msgspec.Struct):
    queue_time_ms: float | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    metrics: _Metrics | None = None
    error: msgspec.Raw | None = None


_EVENT = msgspec.json.Decoder(_Event)


@dataclass(slots=True)
class _Stream:
    times: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    usage: _Usage | None = None
    queue: float | None = None
    finished: bool = False
    error: str | None = None


def read(attempt: Attempt, start: float) -> Record:
    """Measure a request; `start` is the beginning of the run on the attempt's clock."""
    stream = _read_stream(attempt.pieces) if attempt.status == 200 else _Stream()
    tokens = len(stream.times)
    counted: Counted = "events"
    usage = stream.usage
    details = usage.prompt_tokens_details if usage is not None else None
    if usage is not None and usage.completion_tokens is not None:
        tokens, counted = usage.completion_tokens, "usage"
    reason = _reason(attempt, stream, tokens)
    outcome: Outcome = "completed" if reason is None else "failed"
    if attempt.cut:
        outcome, reason = "incomplete", "time limit"
    return Record(
        outcome=outcome,
        due=attempt.scheduled - start,
        sent=attempt.sent - start,
        ended=attempt.ended - start,
        times=[t - start for t in stream.times],
        prompt_tokens=usage.prompt_tokens if usage else 0,
        output_tokens=tokens,
        wanted=attempt.wanted,
        counted=counted,
        reason=reason,
        status=attempt.status,
        queue=stream.queue,
        cached_tokens=details.cached_tokens if details else None,
    )


def answer_of(attempt: Attempt) -> tuple[list[int], str]:
    """The token ids of an answer, as far as the server tells them, and its text."""
    stream = _read_stream(attempt.pieces)
    return stream.ids, "".join(stream.texts)


def _reason(attempt: Attempt, stream: _Stream, tokens: int) -> str | None:
    if attempt.error is not None:
        return attempt.error
    if attempt.status != 200:
        return f"HTTP {attempt.status}: {_brief(b''.join(p for _, p in attempt.pieces))}"
    if stream.error is not None:
        return f"error in the stream: {stream.error}"
    if not stream.finished:
        return "the stream ended without [DONE]"
    if not stream.times:
        return "empty answer"
    if attempt.wanted is not None and tokens != attempt.wanted:
        # Another amount of work cannot be compared, so it does not count as done.
        return "another number of tokens than asked for"
    return None


def _read_stream(pieces: list[tuple[float, bytes]]) -> _Stream:
    """Read server-sent events; one that came in several reads has the time of the last."""
    stream = _Stream()
    buffer = b""
    for now, data in pieces:
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and stream.error is None:
                _read_event(line[5:].strip(), now, stream)
    return stream


def _read_event(payload: bytes, now: float, stream: _Stream) -> None:
    if payload == b"[DONE]":
        stream.finished = True
        return
    try:
        event = _EVENT.decode(payload)
    except msgspec.MsgspecError:
        stream.error = f"not an event: {_brief(payload)}"
        return
    if event.error is not None and bytes(event.error) != b"null":
        stream.error = _brief(bytes(event.error))
    if event.usage is not None:
        stream.usage = event.usage
    if event.metrics is not None and event.metrics.queue_time_ms is not None:
        stream.queue = event.metrics.queue_time_ms / 1000.0
    text = "".join(choice.said for choice in event.choices)
    stream.ids.extend(i for choice in event.choices for i in choice.token_ids or ())
    if text:
        stream.texts.append(text)
        stream.times.append(now)


def _brief(data: bytes) -> str:
    text = " ".join(data.decode("utf-8", "replace").split())
    return text if len(text) <= 160 else text[:159] + "…"
