"""CPU time of the API process for a streamed token: 64 streams, a scripted engine in the process.

    python scripts/measure_token_cost.py [ROOT] [--trace] [--rounds 5] [--tokens 250]

ROOT is a checkout, this one by default: run it in turns with another one to compare the two. The
clients are a process of their own; the engine says one token a stream every 20 ms, and what that
costs is in the figure.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STREAMS = 64
STEP = 0.02
CLIENTS = """
import asyncio, json, sys
port, streams, tokens = map(int, sys.argv[1:])
body = {"prompt": "hi", "max_tokens": tokens, "ignore_eos": True, "stream": True}
body = json.dumps(body).encode()
head = b"POST /v1/completions HTTP/1.1\\r\\nhost: x\\r\\ncontent-type: application/json\\r\\n"
head += b"connection: close\\r\\ncontent-length: %d\\r\\n\\r\\n" % len(body)

async def one():
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head + body)
    while await reader.read(65536):
        pass
    writer.close()

async def all_of_them():
    await asyncio.gather(*(one() for _ in range(streams)))

asyncio.run(all_of_them())
"""


def make_service(trace: bool) -> Any:
    """A service over a scripted engine, and the engine."""
    from server.fake_engine import FakeEngine
    from tiny_models import make_tiny_llama
    from turnstile.models.generation import GenerationDefaults
    from turnstile.server.config import ServerConfig
    from turnstile.server.model import ServedModel
    from turnstile.server.service import Service
    from turnstile.text.chat import ChatEncoder
    from turnstile.text.tokenizer import Tokenizer

    folder = Path(tempfile.mkdtemp())
    tokenizer = Tokenizer.from_directory(make_tiny_llama(folder))
    ids = tokenizer.encode("hello world", add_special_tokens=False)
    engine = FakeEngine(
        lambda generation, sample: ids,
        delay=STEP, max_num_seqs=STREAMS, max_model_len=4096, num_pages=100_000,
    )  # fmt: skip
    more = {}
    if trace:
        from turnstile.server.trace import Trace

        more["trace"] = Trace(str(folder / "trace.json"), 2**28)
    service = Service(ServerConfig(disable_access_log=True), engine, **more)
    engine.info, engine.state = engine.ready_info, type(engine.state).READY
    model = ServedModel(
        names=["tiny"], tokenizer=tokenizer, chat=ChatEncoder(tokenizer),
        defaults=GenerationDefaults(), info=engine.info,
    )  # fmt: skip
    service.ready(model)
    return service


async def measure(trace: bool, rounds: int, tokens: int) -> list[float]:
    """Microseconds a token, of each round."""
    import uvicorn

    from turnstile.server.app import App
    from turnstile.server.head_limits import BoundedHttpProtocol
    from turnstile.server.run import _Server

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = _Server(
        uvicorn.Config(
            App(make_service(trace)), log_config=None, access_log=False, lifespan="off", ws="none",
            http=BoundedHttpProtocol,
        )
    )  # fmt: skip
    serving = asyncio.create_task(server.serve([listener]))
    port = listener.getsockname()[1]
    found = []
    for _ in range(rounds):
        began = time.process_time()
        clients = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CLIENTS, str(port), str(STREAMS), str(tokens)
        )
        await clients.wait()
        found.append((time.process_time() - began) / (STREAMS * tokens) * 1e6)
    server.should_exit = True
    await serving
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", default=str(Path(__file__).resolve().parent.parent))
    parser.add_argument("--trace", action="store_true", help="write a timeline meanwhile")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=250)
    options = parser.parse_args()
    sys.path[:0] = [f"{options.root}/src", f"{options.root}/tests"]
    import uvloop

    found = uvloop.run(measure(options.trace, options.rounds, options.tokens))
    each = " ".join(f"{value:.1f}" for value in found)
    print(
        f"{statistics.median(found):.1f} µs of CPU a token (median), {min(found):.1f} at least: "
        f"{each}"
    )


if __name__ == "__main__":
    main()
