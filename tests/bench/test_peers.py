"""The comparison with other servers: medians, ratios, and a driver that speaks its protocol."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from peers.catalog import Peer, catalog
from peers.tables import losses, medians, ratios, table
from peers.turns import PeerError, Round, take_turn

from turnstile.bench.lengths import Fixed
from turnstile.bench.workloads import choose

OURS = Peer("turnstile-int8", "int8", ())
PEERS = [OURS, Peer("one-int8", "int8", ()), Peer("other-bf16", "bf16", ())]


def figures(throughput: float, ttft: float, failed: int = 0, cut: int = 0) -> dict[str, Any]:
    return {
        "output_throughput": throughput,
        "ttft_ms": {"p50": ttft, "p99": None},
        "failed": failed,
        "incomplete": cut,
        "reasons": {"HTTP 503": failed} if failed else {},
    }


def test_medians_are_of_the_rounds_that_have_the_figure_and_losses_of_one_round_show() -> None:
    rounds = [figures(1, 5), figures(9, 7, failed=4, cut=1), figures(2, 6, failed=2)]
    assert medians(rounds) == {"output tok/s": 2, "TTFT p50 ms": 6, "not completed": 7}
    assert losses(rounds) == {"HTTP 503": 6, "cut off by the time limit": 1}


def test_ratios_are_to_the_best_of_all_and_to_the_best_of_the_same_precision() -> None:
    found = {
        "turnstile-int8": medians([figures(800, 100)]),
        "one-int8": medians([figures(200, 50)]),
        "other-bf16": medians([figures(400, 200)]),
    }
    ours = ratios(found, PEERS)["turnstile-int8"]
    assert ours["any precision"] == {"output tok/s": 2.0, "TTFT p50 ms": 2.0}
    assert ours["int8 only"] == {"output tok/s": 4.0, "TTFT p50 ms": 2.0}
    assert "turnstile-int8 / best peer, any precision" in "\n".join(table(found, PEERS))


def test_what_is_not_installed_is_known_by_its_missing_file(tmp_path: Path) -> None:
    known = catalog(tmp_path, tmp_path / "model.gguf", 8000)
    assert not known["turnstile-int8"].missing
    assert known["llama-bf16"].missing[0] == tmp_path / "llama" / "llama-server"


DRIVER = """
    import json, sys, time
    print("noise"); print("ready", flush=True)
    for number, line in enumerate(sys.stdin):
        if number == int(sys.argv[1]):
            time.sleep(600)
        job = json.loads(line)
        plan = json.load(open(job["plan"]))
        rows = [
            [0.0, 0.0, 0.4, [0.1 * (i + 1) for i in range(n)], n] for _, n in plan["requests"]
        ]
        rows.append([0.0, 0.0, 0.4, [0.1], 2])
        json.dump({"rows": rows, "window": 2.0}, open(job["result"], "w"))
        print("done", flush=True)
"""


class ByWords:
    """A tokenizer in place of a model's."""

    def __init__(self, model: str) -> None: ...

    async def __call__(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]


def test_a_peer_in_process_is_measured_by_its_own_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peers.turns.LocalTokenizer", ByWords)
    workload = choose("W4", requests=3, prompt=Fixed(5), output=Fixed(4))
    command = (sys.executable, "-c", textwrap.dedent(DRIVER), "-1")
    peer = Peer("own", "int8", command, in_process=True)
    round_ = Round(workloads=[workload], port=0, model="", text_seed=0)
    found = dict(take_turn(peer, round_, tmp_path / "own.log"))["W4*"]
    assert (found["completed"], found["failed"]) == (3, 1)
    assert (found["output_tokens"], found["output_throughput"]) == (13, 6.5)
    assert found["ttft_ms"]["p50"] == pytest.approx(100)
    assert found["tpot_ms"]["p50"] == pytest.approx(100)
    broken = replace(peer, command=(sys.executable, "-c", "print('no')"))
    with pytest.raises(PeerError, match="ended before it said ready"):
        list(take_turn(broken, round_, tmp_path / "own.log"))


def test_what_a_peer_has_done_before_it_gets_stuck_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peers.turns.LocalTokenizer", ByWords)
    workload = choose("W4", requests=1, prompt=Fixed(5), output=Fixed(4))
    command = (sys.executable, "-c", textwrap.dedent(DRIVER), "1")
    round_ = Round(workloads=[workload] * 2, port=0, model="", text_seed=0, time_limit=5.0)
    turn = take_turn(Peer("own", "int8", command, in_process=True), round_, tmp_path / "own.log")
    assert next(turn)[1]["completed"] == 1
    with pytest.raises(PeerError, match="longer than 5 s in W4"):
        next(turn)
