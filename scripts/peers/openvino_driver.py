"""Runs workloads on OpenVINO GenAI's continuous batching, in process; needs only its environment.

    python openvino_driver.py MODEL_DIRECTORY --precision bf16 --cache-gb 2

Reads lines of JSON from standard input, each ``{"plan": FILE, "result": FILE}``, and answers each
with the line ``done``; ``ready`` comes first. A plan holds ``requests`` (``[prompt ids, output
tokens]``) and either ``users`` (a closed loop) or ``times`` (seconds, an open one). The result is a
list of ``[due, sent, ended, times of the tokens, tokens wanted]``, in seconds since the start, and
the window.

There is no HTTP, JSON or detokenisation in what is timed: an upper bound for a server on top.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import openvino
import openvino_genai


class Running:
    """A request in the pipeline."""

    def __init__(self, handle, due, sent, wanted):
        self.handle = handle
        self.row = [due, sent, None, [], wanted]

    def read(self, now):
        """Take the tokens that have come; returns whether it has ended."""
        while self.handle.can_read():
            for output in self.handle.read().values():
                self.row[3].extend([now] * len(output.generated_ids))
        over = self.handle.get_status() != openvino_genai.GenerationStatus.RUNNING
        if over:
            self.row[2] = now
        return over


class Driver:
    """One pipeline, and what is asked of it."""

    def __init__(self, options):
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = options.cache_gb
        scheduler.max_num_seqs = 256
        scheduler.max_num_batched_tokens = options.batched_tokens
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        properties = {"INFERENCE_PRECISION_HINT": options.precision}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            options.model, scheduler, "CPU", properties
        )
        self.number = 0

    def add(self, prompt, wanted, due, start):
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = wanted
        config.ignore_eos = True
        config.do_sample = False
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        sent = time.perf_counter() - start
        handle = self.pipeline.add_request(self.number, ids, config)
        self.number += 1
        return Running(handle, sent if due is None else due, sent, wanted)

    def run(self, plan):
        """Send the plan's requests at their moments; returns rows and window."""
        waiting = list(enumerate(plan["requests"]))[::-1]
        users, times = plan.get("users"), plan.get("times")
        running, rows = [], []
        start = time.perf_counter()
        while waiting or running:
            now = time.perf_counter() - start
            while waiting and self._is_due(waiting[-1][0], now, len(running), users, times):
                index, (prompt, wanted) = waiting.pop()
                due = None if users else times[index]
                running.append(self.add(prompt, wanted, due, start))
            if not running:
                time.sleep(min(max(times[waiting[-1][0]] - now, 0.0), 0.01))
                continue
            self.pipeline.step()
            now = time.perf_counter() - start
            over = [request for request in running if request.read(now)]
            rows += [request.row for request in over]
            running = [request for request in running if request.row[2] is None]
        return {"rows": rows, "window": time.perf_counter() - start}

    @staticmethod
    def _is_due(index, now, running, users, times):
        return running < users if users else times[index] <= now


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--cache-gb", type=int, default=2)
    parser.add_argument("--batched-tokens", type=int, default=512)
    driver = Driver(parser.parse_args())
    driver.run({"requests": [[list(range(100, 132)), 8]] * 2, "users": 1})
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        result = driver.run(json.loads(Path(job["plan"]).read_text()))
        Path(job["result"]).write_text(json.dumps(result))
        print("done", flush=True)


if __name__ == "__main__":
    main()
