"""A file of requests and their answers, in OpenAI's batch format: :class:`Batch`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_JSON = {"content-type": "application/json"}
_RETRIED = (429, 503)
_LEAST_WAIT, _MOST_WAIT = 0.05, 30.0
"""Seconds before what was refused is asked for again, whatever the refusal says."""
_TOLD_EVERY = 10.0
"""Seconds between two lines of how far it is."""

logger = logging.getLogger("turnstile.batch")


class LineError(ValueError):
    """A line is no request; the message says why. ``custom_id`` is the line's, where it has one."""

    def __init__(self, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.custom_id = custom_id


@dataclass(frozen=True, slots=True)
class Line:
    """One request of the file."""

    custom_id: str
    url: str
    body: bytes
    """What is sent: as it stood in the line, be it nonsense, for the server to say so."""


def read_line(text: str) -> Line:
    """Read a line. Raises :class:`LineError`, which names the field."""
    try:
        value = json.loads(text)
        body = value.get("body") if isinstance(value, dict) else None
        sent = json.dumps(body).encode()
    except (ValueError, RecursionError):
        raise LineError("the line is not valid JSON") from None
    if not isinstance(value, dict):
        raise LineError("the line must be an object")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise LineError("custom_id must be a string that is not empty")
    if value.get("method", "POST") != "POST":
        raise LineError("method must be POST", custom_id)
    if value.get("url") not in URLS:
        raise LineError(f"url must be one of {', '.join(URLS)}", custom_id)
    if not isinstance(body, dict):
        raise LineError("body must be an object", custom_id)
    if body.get("stream"):
        raise LineError("body.stream must not be true in a batch", custom_id)
    return Line(custom_id, value["url"], sent)


def answered(lines: Iterable[str]) -> frozenset[str]:
    """The ids in an output file that have their answer; a last line that was cut off has none."""
    found = set[str]()
    for text in lines:
        try:
            value = json.loads(text)
            if value["response"]["status_code"] == 200:
                found.add(value["custom_id"])
        except (ValueError, KeyError, TypeError):
            continue
    return frozenset(found)


class Batch:
    """Answers the lines of a file, several at a time; each answer is written when it is there.

    The input is read as it is worked off, so that it may be larger than memory; in a thread, as a
    pipe may keep its reader waiting, and those under way must not wait with it.

    Parameters
    ----------
    lines, output
        Where requests come from and answers go.
    done
        Ids to leave out.
    in_flight
        Requests under way at a time.

    Attributes
    ----------
    answered, failed, left_out
        Lines by what became of them.
    """

    def __init__(
        self, lines: Iterable[str], output: IO[str], done: frozenset[str], *, in_flight: int
    ) -> None:
        self._lines = enumerate(lines, start=1)
        self._output = output
        self._done = done
        self._seen: set[str] = set()
        self._reading = asyncio.Lock()
        self._in_flight = in_flight
        self.answered = 0
        self.failed = 0
        self.left_out = 0

    def summary(self) -> str:
        """What came of it, in words."""
        text = f"{self.answered} answered, {self.failed} failed"
        return f"{text}, {self.left_out} answered before" if self.left_out else text

    async def run(self, client: httpx.AsyncClient) -> None:
        """Work off all lines. Raises :class:`OSError` where the output cannot be written."""
        telling = asyncio.create_task(self._tell())
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._in_flight):
                    group.create_task(self._work(client))
        except ExceptionGroup as several:
            raise several.exceptions[0] from None  # one is enough to say: the others are like it
        finally:
            telling.cancel()

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(_TOLD_EVERY)
            logger.info("%s so far", self.summary())

    async def _work(self, client: httpx.AsyncClient) -> None:
        while (line := await self._next()) is not None:
            await self._answer(line, client)

    async def _next(self) -> Line | None:
        """The next request, None at the end. What is wrong with other lines is written down."""
        async with self._reading:
            while (numbered := await asyncio.to_thread(next, self._lines, None)) is not None:
                line = self._taken(*numbered)
                if line is not None:
                    return line
        return None

    def _taken(self, number: int, text: str) -> Line | None:
        """The request in a line; None where there is none to be answered."""
        if not text.strip():
            return None
        try:
            line = read_line(text)
            if line.custom_id in self._seen:
                raise LineError("there was a line with this custom_id before", line.custom_id)
        except LineError as error:
            message = f"Line {number}: {error}."
            self._write(error.custom_id, error={"code": "invalid_line", "message": message})
            return None
        self._seen.add(line.custom_id)
        if line.custom_id in self._done:
            self.left_out += 1
            return None
        return line

    async def _answer(self, line: Line, client: httpx.AsyncClient) -> None:
        import httpx

        while True:
            try:
                answer = await client.post(line.url, content=line.body, headers=_JSON)
            except httpx.HTTPError as error:
                message = f"The connection broke: {error or type(error).__name__}."
                self._write(line.custom_id, error={"code": "connection_error", "message": message})
                return
            if (
                answer.status_code not in _RETRIED
                or answer.headers.get("x-should-retry") == "false"
            ):
                break
            await asyncio.sleep(_wait_of(answer))
        response = {
            "status_code": answer.status_code,
            "request_id": answer.headers.get("x-request-id"),
            "body": _body_of(answer),
        }
        self._write(line.custom_id, response)

    def _write(
        self,
        custom_id: str | None,
        response: dict[str, Any] | None = None,
        error: dict[str, str] | None = None,
    ) -> None:
        answer = {
            "id": f"batch_req_{secrets.token_hex(12)}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
        self._output.write(json.dumps(answer, ensure_ascii=False) + "\n")
        self._output.flush()
        if response is not None and response["status_code"] == 200:
            self.answered += 1
        else:
            self.failed += 1


def _body_of(answer: httpx.Response) -> object:
    with contextlib.suppress(ValueError):
        return answer.json()
    return answer.text  # of something between us and the server


def _wait_of(answer: httpx.Response) -> float:
    try:
        seconds = float(answer.headers.get("retry-after-ms", "")) / 1000
    except ValueError:
        seconds = 1.0
    return min(max(seconds, _LEAST_WAIT), _MOST_WAIT)
