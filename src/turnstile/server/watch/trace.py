"""``--trace FILE``: the timeline of steps and requests, for Perfetto. :class:`Trace`.

Chrome's trace event format, in its array form: open the file at ui.perfetto.dev or in
chrome://tracing. The file is valid JSON after every write, so also after a ``kill -9``; at
``--trace-max-bytes`` it is turned over to ``FILE.1``, so that the disk is bounded too. Events are
made where they happen and written by a thread: a slow disk delays nobody, and what it cannot keep
up with is dropped and counted, never hoarded.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from turnstile.core.events import AnyEvent, Repaired, Stepped
from turnstile.engine.protocol import Snapshot, StepResult
from turnstile.server.config import ConfigError
from turnstile.server.watch.trails import Part, RequestTrail, SampleKey

logger = logging.getLogger("turnstile.server")

MAX_PENDING = 100_000
"""Events that may wait for the disk."""
_GATHER = 0.25
"""Seconds of events written at once."""
_ENGINE, _REQUESTS = 1, 2
"""The two groups of tracks: Chrome calls them processes."""
_END = b"\n]\n"
BEGAN = "ts 0 is second "
"""Begins the label that says when that was on ``time.monotonic``'s clock."""

_encode = msgspec.json.Encoder().encode


class TraceFile:
    """An array of JSON objects on disk, complete after every :meth:`append`.

    Parameters
    ----------
    head
        Written first into every new file: what names the tracks.
    max_bytes
        Size at which the file is turned over to ``<path>.1``, replacing the one before.
    """

    def __init__(self, path: Path, max_bytes: int, head: Iterable[bytes]) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._head = list(head)
        self._file = -1
        self._end = 0
        self._open()

    def _open(self) -> None:
        # A pipe would block here until somebody reads it, and nothing but a file is turned over.
        if self.path.exists() and not self.path.is_file():
            raise OSError(errno.EINVAL, "it is no regular file")
        flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NONBLOCK
        self._file = os.open(self.path, flags, 0o600)
        self._end = 0
        self._put(b"[\n" + b",\n".join(self._head))

    def _put(self, data: bytes) -> None:
        """Write over the end of the array, and end it anew."""
        rest, at = memoryview(data + _END), self._end
        while rest:
            written = os.pwrite(self._file, rest, at)
            rest, at = rest[written:], at + written
        self._end += len(data)

    def append(self, objects: Iterable[bytes]) -> None:
        """Add encoded objects. Raises :class:`OSError`."""
        data = b"".join(b",\n" + each for each in objects)
        if self._end + len(data) > self._max_bytes and self._end > self._max_bytes // 2:
            self.close()
            os.replace(self.path, f"{self.path}.1")
            self._open()
        self._put(data)

    def close(self) -> None:
        """Let go of the file. May be said again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Trace:
    """Turns what happens into trace events, and has a thread write them.

    Raises :class:`ConfigError` where the file cannot be written.
    """

    def __init__(self, path: str, max_bytes: int, began: float | None = None) -> None:
        self._began = time.monotonic() if began is None else began
        self._counters: dict[str, object] = {}
        self._epochs: set[int] = set()
        self._pending: list[bytes] = []
        self._ready = threading.Condition()
        self._closing = False
        self.dropped = 0
        """Events the disk was too slow for."""
        try:
            self._file = TraceFile(Path(path).expanduser(), max_bytes, self._head())
        except OSError as error:
            raise ConfigError(f"Cannot write the trace {path}: {error.strerror}.") from None
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
        self._thread.start()

    def _head(self) -> list[bytes]:
        """The names of the tracks; and when ``ts`` was 0, for who has times of another process."""
        told = [
            (_ENGINE, "process_name", {"name": "engine"}),
            (_REQUESTS, "process_name", {"name": "requests"}),
            (_ENGINE, "process_labels", {"labels": f"{BEGAN}{self._began:.6f}"}),
        ]
        return [
            _encode({"ph": "M", "pid": pid, "name": name, "args": args}) for pid, name, args in told
        ]

    # -- what happens -------------------------------------------------------------------------

    def on_step(self, result: StepResult, happened: Iterable[AnyEvent]) -> None:
        """Note the steps that ended, and the counters where they changed."""
        for event in happened:
            if isinstance(event, Stepped):
                self._step(result.epoch, event)
            elif isinstance(event, Repaired):
                self._add(
                    ph="i", s="p", pid=_ENGINE, tid=result.epoch, name="pool repaired",
                    ts=self._us(event.time),
                    args={"recomputed": event.recomputed, "kept_pages": event.pages},
                )  # fmt: skip
        self._count(result.snapshot)

    def _step(self, epoch: int, event: Stepped) -> None:
        if epoch not in self._epochs:
            self._epochs.add(epoch)
            name = {"name": f"steps of engine {epoch}"}
            self._add(ph="M", pid=_ENGINE, tid=epoch, name="thread_name", args=name)
        kind = "prefill" if not event.draws else "mixed" if event.prefill_tokens else "decode"
        self._add(
            ph="X", pid=_ENGINE, tid=epoch, cat="step", name=kind,
            ts=self._us(event.time - event.seconds), dur=round(event.seconds * 1e6),
            args={
                "step": event.step, "tokens": event.tokens,
                "prefill_tokens": event.prefill_tokens, "sequences": event.sequences,
                "draws": event.draws,
            },
        )  # fmt: skip

    def _count(self, now: Snapshot) -> None:
        for name, values in (
            ("pages", {"held": now.pages_held, "cached": now.pages_cached, "free": now.pages_free}),
            ("sequences", {"running": now.running, "waiting": now.waiting}),
        ):
            if self._counters.get(name) != values:
                self._counters[name] = values
                self._add(ph="C", pid=_ENGINE, name=name, ts=self._us(now.time), args=values)

    def request_began(self, trail: RequestTrail) -> None:
        """A request is inside: a span around all of its parts begins."""
        about: dict[str, object] = {"tenant": trail.tenant, "path": trail.path, **trail.tokens()}
        self._request("b", f"{trail.answer_id}", trail.id, trail.arrived, about)

    def part_began(self, trail: RequestTrail, key: SampleKey, part: Part, now: float) -> None:
        """A sample enters a part of its way: a span on its track begins."""
        self._request("b", _track(trail, key), str(part), now)

    def part_ended(self, trail: RequestTrail, key: SampleKey, part: Part, now: float) -> None:
        """A sample leaves a part of its way."""
        self._request("e", _track(trail, key), str(part), now)

    def request_ended(self, trail: RequestTrail) -> None:
        """A request has ended."""
        assert trail.ended is not None
        about: dict[str, object] = {"finish_reason": trail.outcome, **trail.counts}
        self._request("e", trail.answer_id, trail.id, trail.ended, about)

    def engine_lost(self, now: float) -> None:
        """The engine died: a mark across all tracks."""
        self._add(ph="i", pid=_ENGINE, tid=0, s="g", name="engine lost", ts=self._us(now))

    def _request(
        self, phase: str, track: str, name: str, now: float, args: dict[str, object] | None = None
    ) -> None:
        """One end of a span. What has not ended yet when the file is read shows as unfinished."""
        self._add(
            ph=phase, pid=_REQUESTS, tid=0, cat="request", id=track, name=name, ts=self._us(now),
            args=args or {},
        )  # fmt: skip

    def _us(self, seconds: float) -> int:
        return max(0, round((seconds - self._began) * 1e6))

    # -- to the disk --------------------------------------------------------------------------

    def _add(self, **event: object) -> None:
        with self._ready:
            if self._closing or len(self._pending) >= MAX_PENDING:
                self.dropped += 1
                return
            self._pending.append(_encode(event))
            if len(self._pending) == 1:
                self._ready.notify()

    def _run(self) -> None:
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._pending or self._closing)
                # Not at once: a write for every step would be a write too many.
                self._ready.wait_for(lambda: self._closing, _GATHER)
                events, self._pending = self._pending, []
                closing = self._closing
            try:
                if events:
                    self._file.append(events)
            except OSError as error:
                logger.error("The trace ends here: %s cannot be written (%s).",
                             self._file.path, error.strerror)  # fmt: skip
                with self._ready:
                    self._closing, self._pending = True, []
                closing = True
            if closing:
                self._file.close()
                return

    def close(self) -> None:
        """Write what is left. May be said again."""
        with self._ready:
            self._closing = True
            self._ready.notify()
        self._thread.join()
        if self.dropped:
            logger.warning("The trace lacks %d events: the disk was too slow.", self.dropped)


def _track(trail: RequestTrail, key: SampleKey) -> str:
    """Where the spans of a sample are drawn: beside those of its request."""
    return f"{trail.answer_id} {key[0]}/{key[1]}"
