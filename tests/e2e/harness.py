"""The real server as a process, and what every case checks after it: :class:`ServerProcess`.

::

    with ServerProcess(model, num_pages=64, max_num_seqs=8) as server:
        status, answer = server.complete(server.tokens(20, seed=1), max_tokens=4)
        server.check()
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import httpx

ROOT = Path(__file__).parents[2]
TURNSTILE = (sys.executable, "-m", "turnstile")
SCRIPTED = (sys.executable, str(ROOT / "tests/e2e/scripted.py"))
"""The engine is a script in the API process; the environment says how it behaves."""
FAKED = (sys.executable, str(ROOT / "tests/e2e/faked.py"))
"""A real engine process without a model; the environment says how fast, and when it is there."""
START_SECONDS = 120.0
PATIENCE = 120.0
"""Seconds to wait for what must come, on any machine."""
CANARY_TOKENS, CANARY_SECONDS = 16, 60.0
INSIDE = tuple(f"turnstile_requests_{state}" for state in ("running", "waiting", "in_flight"))


class Scrape:
    """What ``/metrics`` said at a moment.

    Looked through by name: to parse all of it takes longer than most cases. That it can be parsed
    is tested where the metrics are (``cases/test_metrics.py``).
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels."""
        samples = re.findall(rf"^{re.escape(name)}(?:{{(.*)}})? (\S+)$", self.text, re.MULTILINE)
        wanted = {f'{label}="{value}"' for label, value in labels.items()}
        found = [float(value) for has, value in samples if wanted <= set(has.split(","))]
        assert found, (name, labels)
        return sum(found)


class ServerProcess:
    """A server with a tiny model on a free port.

    Parameters
    ----------
    model
        What to serve.
    command
        The program, up to its verb.
    env
        Environment variables to add.
    wait
        Return once requests are taken; else as soon as it listens.
    canary
        Record the canary's answer at the start, for :meth:`check`.
    settings
        Flags; ``num_pages=64`` is ``--num-pages 64``, ``True`` a bare flag, a list repeats it.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        command: tuple[str, ...] = TURNSTILE,
        env: dict[str, str] | None = None,
        wait: bool = True,
        canary: bool = True,
        **settings: Any,
    ) -> None:
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - closed by kill()
        self._wait, self._canary_wanted = wait, canary
        arguments = [*command, "serve", str(model), *_flags({"port": 0} | settings)]
        keys = settings.get("api_key")
        self.headers = {"authorization": f"Bearer {keys}"} if isinstance(keys, str) else {}
        self.process = subprocess.Popen(
            arguments,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            env={
                **os.environ,
                "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}",
                **(env or {}),
            },
            start_new_session=True,
        )
        self.url = ""
        self.canary: str | None = None

    def __enter__(self) -> Self:
        try:
            self._await_start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    def _await_start(self) -> None:
        end = time.monotonic() + START_SECONDS
        while not self.url:
            found = re.search(r"Listening at (\S+),", self.log)
            if found:
                self.url = found.group(1)
            self._still_starting(end)
        self.reconnect()
        if not self._wait:
            return
        while not self._takes_requests():
            self._still_starting(end)
        if self._canary_wanted:
            self.canary = self._sing()

    def _takes_requests(self) -> bool:
        with contextlib.suppress(httpx.TransportError):  # it may have left: its log says why
            return self.http.get("/readyz").status_code == 200
        return False

    def reconnect(self) -> None:
        """Speak to it over fresh connections; those there were are closed."""
        if hasattr(self, "http"):
            self.http.close()
        uds = self.url.removeprefix("unix:") if self.url.startswith("unix:") else None
        self.http = httpx.Client(
            base_url="http://localhost" if uds else self.url,
            headers=self.headers,
            timeout=httpx.Timeout(PATIENCE),
            transport=httpx.HTTPTransport(uds=uds, limits=httpx.Limits(max_connections=None)),
        )

    def _still_starting(self, end: float) -> None:
        assert self.process.poll() is None, f"the server left while starting:\n{self.log}"
        assert time.monotonic() < end, f"the server does not start:\n{self.log}"
        time.sleep(0.02)

    @property
    def log(self) -> str:
        """What it has written so far."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode("utf-8", "replace")

    # -- speaking to it -----------------------------------------------------------------------

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def complete(self, prompt: Any, **body: Any) -> tuple[int, dict[str, Any]]:
        answer = self.post("/v1/completions", prompt=prompt, **body)
        return answer.status_code, answer.json()

    def chat(self, messages: Any, **body: Any) -> tuple[int, dict[str, Any]]:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        answer = self.post("/v1/chat/completions", messages=messages, **body)
        return answer.status_code, answer.json()

    def stream(self, path: str, **body: Any) -> Iterator[dict[str, Any]]:
        """The events of a stream, its framing checked; ends after ``[DONE]``."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            buffer = ""
            done = False
            for piece in answer.iter_text():
                buffer += piece
                while "\n\n" in buffer:
                    event, _, buffer = buffer.partition("\n\n")
                    assert not done, f"after [DONE]: {event}"
                    if event == "data: [DONE]":
                        done = True
                    elif not event.startswith(":"):
                        assert event.startswith("data: ")
                        yield json.loads(event.removeprefix("data: "))
            assert done
            assert not buffer

    def gather(self, calls: list[Any]) -> list[Any]:
        """Run calls at the same time; their results in order. Who comes first, and whether they
        meet at all, is the machine's business: see :meth:`together`.
        """
        with ThreadPoolExecutor(len(calls)) as pool:
            return [future.result() for future in [pool.submit(call) for call in calls]]

    def together(self, calls: list[Any]) -> list[Any]:
        """The same, but the calls (a prompt each) come in one after another, and all of them are
        inside before the first is computed.
        """
        accepted = self.metric("turnstile_gate_accepted_total")
        with ThreadPoolExecutor(len(calls)) as pool:
            futures = []
            with self.frozen():
                for call in calls:
                    futures.append(pool.submit(call))
                    accepted += 1
                    until(
                        lambda so_many=accepted: (
                            self.metric("turnstile_gate_accepted_total") >= so_many
                        ),
                        "it was not let in",
                    )
            return [future.result() for future in futures]

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """In the block the engine stands still: a machine as slow as can be. The API goes on."""
        engine = self.engine_pid
        os.kill(engine, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine, signal.SIGCONT)

    @property
    def engine_pid(self) -> int:
        """The process that computes."""
        return int(self.http.get("/server_info").json()["engine"]["pid"])

    def tokens(self, count: int, seed: int) -> list[int]:
        """Valid ids that are not special, the same for the same seed."""
        return random.Random(seed).choices(range(3, 259), k=count)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels."""
        return self.scrape().total(name, **labels)

    def scrape(self) -> Scrape:
        """All metrics as they are now."""
        return Scrape(self.http.get("/metrics").text)

    # -- after every case ---------------------------------------------------------------------

    def idle(self, seconds: float = PATIENCE) -> Scrape:
        """Wait until nobody runs or waits; fail if that does not come. Returns what showed it."""
        found: list[Scrape] = []

        def nobody() -> bool:
            found[:] = [self.scrape()]
            return not any(found[0].total(name) for name in INSIDE)

        until(nobody, "requests are left behind", seconds)
        return found[0]

    def check(self) -> None:
        """Alive, healthy, right and soon, and nothing left behind (POST* of the reported cases)."""
        assert self.process.poll() is None, self.log
        assert self.http.get("/health").status_code == 200
        if self.canary is not None:
            assert self._sing() == self.canary
        scrape = self.idle()
        pages = {
            state: scrape.total("turnstile_pages", state=state)
            for state in ("free", "held", "cached")
        }
        total = self.http.get("/server_info").json()["engine"]["num_pages"]
        assert pages["held"] == 0
        assert pages["free"] + pages["cached"] == total
        assert "Traceback" not in self.log

    def _sing(self) -> str:
        body = {"prompt": self.tokens(24, seed=99), "max_tokens": CANARY_TOKENS, "temperature": 0}
        answer = self.http.post("/v1/completions", json=body, timeout=CANARY_SECONDS)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    # -- ending it ----------------------------------------------------------------------------

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = PATIENCE) -> int:
        """Wait for its end; returns the exit code."""
        return self.process.wait(seconds)

    def kill(self) -> None:
        """End it and its children, whatever state they are in."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if hasattr(self, "http"):
            self.http.close()
        self._log.close()


def until(
    condition: Callable[[], object], what: str = "it did not come", seconds: float = PATIENCE
) -> None:
    """Wait until something is true; fail with ``what`` if that does not come."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.005)


def _flags(settings: dict[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            flags.append(flag)
        elif value is False:
            flags.append(f"--no-{flag[2:]}")
        elif isinstance(value, list):
            flags += [part for item in value for part in (flag, str(item))]
        elif value is not None:
            flags += [flag, str(value)]
    return flags


def free_port() -> int:
    """A free port that stays free: below those the kernel hands out, and another each time."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice of a stream."""
    text = ""
    for event in events:
        for choice in event.get("choices", []):
            if choice["index"] == index:
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return text
