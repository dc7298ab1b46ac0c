"""Following one job's tokens, from the engine's rows to the client's bytes: :class:`Follower`."""

from __future__ import annotations

from turnstile.engine.protocol import NOTHING_ALLOWED, Row
from turnstile.server.answer.choices import Choice, Job
from turnstile.server.answer.frames import Frames
from turnstile.server.answer.passage import Passage
from turnstile.server.answer.usage import Record
from turnstile.server.errors import ApiError, bad_request, deadline_exceeded, internal_error
from turnstile.server.http.direct import Direct
from turnstile.server.http.exchange import Exchange
from turnstile.server.service import Service
from turnstile.text.errors import CANNOT_FOLLOW


class Follower:
    """Takes the rows of a job as they come, until its last sample has ended.

    A row takes one of three ways:

    - *At once* (:meth:`_take_at_once`), in the turn of the event loop that read the step's message.
      With a hundred streams this saves a hundred task switches a step, and a switch costs as much
      as everything else a token costs except the write.
    - Through a :class:`Passage`, at once as well, but with all preparations made: where a stream
      carries text alone, once its choice has begun. Nearly all rows go this way.
    - In the task of :meth:`run`, which may await the socket and may raise: last rows, and those for
      a client that does not keep up.

    The first and the last both end in :meth:`_take` and ``frames.step``. Where the answer is
    streamed and ends as it should, its last piece is returned to the caller, who appends to it.

    Parameters
    ----------
    frames
        Makes the bytes of a stream; None where the answer comes in one piece.
    """

    def __init__(
        self,
        job: Job,
        record: Record,
        exchange: Exchange,
        frames: Frames | None,
        service: Service,
    ) -> None:
        self._job = job
        self._record = record
        self._exchange = exchange
        self._frames = frames
        self._metrics = service.metrics
        self._direct = exchange.direct
        self._outbox = service.outbox
        self._clock = service.clock
        self._passages: dict[int, Passage] = {}
        self._error: Exception | None = None
        """What went wrong with a row that was to be taken at once."""

    async def run(self) -> bytes:
        """Follow the job to its end; returns what a stream has still to send.

        Raises
        ------
        ApiError
            It ended without an answer, or with none that could be given.
        """
        job, stream = self._job, self._job.stream
        assert stream is not None
        stream.offer(self._take_at_once)
        try:
            async for rows in stream:
                data, now = self._take_in_turn(rows)
                if not job.unfinished:
                    return data
                if data:
                    self._outbox.flush()
                    await self._exchange.write(data, now)
        finally:
            stream.offer(None)
            self._outbox.flush()  # the answer's end is written next
        if job.unfinished and not job.expired:
            raise internal_error("The engine ended this request without an answer.")
        return self._expire() if job.unfinished else b""

    def _take_in_turn(self, rows: list[Row]) -> tuple[bytes, float]:
        if self._error is not None:
            raise self._error
        now = self._clock()
        pieces: list[bytes] = []
        for row in rows:
            choice = self._job.choices[row.sample_index]
            if choice.finish is None:  # else sent before the engine heard of the stop string
                pieces.append(self._advance(choice, row, now))
        return b"".join(pieces), now

    def _take_at_once(self, row: Row) -> bool:
        """Take a row where no task is needed for it; returns whether it was taken."""
        direct, frames = self._direct, self._frames
        if row.finish is not None or row.error is not None:
            return False
        passage = self._passages.get(row.sample_index)
        if passage is not None:
            taken = passage.take(row.tokens)
            if taken and row.drafted:
                self._job.count_drafts(row)
            return taken
        if frames is not None and (direct is None or not direct.ready):
            return False
        choice = self._job.choices[row.sample_index]
        if choice.finish is not None:
            return True
        try:
            data = self._advance(choice, row, self._outbox.open())
        except Exception as error:
            # Called while a step's rows are handed out, to other requests too: raise in the task.
            self._fail(error)
            return False
        if frames is not None and direct is not None:
            if data:
                self._outbox.add(self._exchange, direct, data)
            self._let_pass(choice, row.sample_index, frames, direct)
        return True

    def _fail(self, error: Exception) -> None:
        self._error = error

    def _let_pass(self, choice: Choice, sample: int, frames: Frames, direct: Direct) -> None:
        """Send the shortest way from now on, where that carries all that is wanted."""
        around = frames.around(choice)
        stream = self._job.stream
        if around is None or choice.finish is not None or stream is None:
            return
        passage = self._passages[sample] = Passage(
            choice, around, self._exchange, direct, self._outbox, self._metrics, self._fail
        )
        stream.pass_tokens(sample, passage.take_token)

    def _advance(self, choice: Choice, row: Row, now: float) -> bytes:
        """Take a row; returns what a stream may send after it."""
        self._take(choice, row, now)
        if self._frames is not None and (row.tokens or choice.finish is not None):
            return self._frames.step(choice)
        return b""

    def _expire(self) -> bytes:
        """End what the engine has not: it is being restarted, or hangs in a step."""
        job, now = self._job, self._clock()
        pieces: list[bytes] = []
        for sample, choice in enumerate(job.choices):
            if choice.finish is None:
                row = Row(job.generation.request_id, sample, choice.text.num_tokens, [])
                row.finish = "timeout"
                pieces.append(self._advance(choice, row, now))
        return b"".join(pieces)

    def _take(self, choice: Choice, row: Row, now: float) -> None:
        job = self._job
        if row.finish is not None or row.error is not None:
            self._refuse_if_failed(choice, row)
        taken = choice.take(row)
        if row.cached_tokens > job.cached_tokens:
            job.cached_tokens = row.cached_tokens
        if row.drafted:
            job.count_drafts(row)
        if row.prompt_logprobs:
            job.prompt_logprobs += row.prompt_logprobs
        if taken:
            self._time(choice, taken, now)
        if not job.computed and (taken or choice.finish in ("stop", "length")):
            job.computed = True
            self._metrics.prompt_computed(job)
            if job.place is not None:
                job.place.first_token(now)
        if choice.finish is not None:
            job.unfinished -= 1
            if row.finish is None and job.stream is not None:
                job.stream.cancel(row.sample_index, "stop")

    def _refuse_if_failed(self, choice: Choice, row: Row) -> None:
        """Raise what the client is to be told where a last row brings no answer."""
        if row.error is not None or row.finish == "error":
            choice.finish, error = "error", self._failure(row.error)
        elif row.finish == "timeout" and not self._record.num_output and not row.tokens:
            choice.finish, error = "timeout", deadline_exceeded()
        else:
            return
        self._job.unfinished -= 1
        raise error

    def _failure(self, message: str | None) -> ApiError:
        if message == NOTHING_ALLOWED:
            return bad_request(message, code="contradictory_constraints")
        if message is not None and message.startswith(CANNOT_FOLLOW):
            return bad_request(message, self._job.grammar_field)
        return internal_error(message or "The engine could not compute this request.")

    def _time(self, choice: Choice, taken: int, now: float) -> None:
        """Note when tokens arrived. k tokens make k - 1 gaps; the first one's wait is TTFT."""
        record, metrics = self._record, self._metrics
        if record.first_token is None:
            record.first_token = now
            metrics.first_token(now - record.arrived)
        if choice.first_tokens:
            metrics.next_tokens(now - choice.last_time, taken)
        else:
            choice.first_time, choice.first_tokens = now, taken
        choice.last_time = now
        metrics.generated_tokens += taken
