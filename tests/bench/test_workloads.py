"""Which requests, and when: ramps, groups, files, and the flags for them."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstile.bench.arrivals import OpenLoop, Ramp
from turnstile.bench.corpus import Prose
from turnstile.bench.datasets import DatasetError, FileDataset
from turnstile.bench.lengths import LengthError, parse_lengths
from turnstile.bench.plan import PassageError, Planned, passage, plan
from turnstile.bench.workloads import Workload, choose, load
from turnstile.cli.bench.options import Load
from turnstile.cli.bench.work import Work


async def by_words(text: str) -> list[int]:
    return [hash(word) for word in text.split()]


def planned(workload: Workload, text_seed: int = 0) -> list[Planned]:
    return asyncio.run(plan(workload, by_words, Prose(text_seed), 101))


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_a_ramp_goes_from_its_first_rate_to_its_last(strategy: Any) -> None:
    times = Ramp(strategy, 1.0, 9.0).bend(np.arange(1, 2001, dtype=np.float64))
    gaps = np.diff(times)
    assert 1 / gaps[0] == pytest.approx(1, rel=0.05)
    assert 1 / gaps[-1] == pytest.approx(9, rel=0.02)
    middle = np.searchsorted(times, times[-1] / 2)
    expected = 5.0 if strategy == "linear" else 3.0
    assert 1 / gaps[middle] == pytest.approx(expected, rel=0.02)


@given(
    st.sampled_from(["linear", "exponential"]),
    st.floats(0.1, 100.0),
    st.floats(0.1, 100.0),
    st.lists(st.floats(0.0, 5.0), min_size=1, max_size=50),
)
def test_bent_arrivals_never_go_back(
    strategy: Any, start: float, end: float, gaps: list[float]
) -> None:
    times = Ramp(strategy, start, end).bend(np.cumsum(gaps))
    assert np.all(np.isfinite(times))
    assert np.all(np.diff(times) >= -1e-9)


def test_a_ramp_needs_its_three_flags_and_no_constant_rate() -> None:
    with pytest.raises(ValueError, match="--ramp-up-end-rps"):
        Load(ramp_up_strategy="linear").applied_to(choose("W1"))
    flags = Load(ramp_up_strategy="linear", ramp_up_start_rps=1.0, ramp_up_end_rps=2.0)
    ramped = flags.applied_to(choose("W1"))
    assert (ramped.name, ramped.users, ramped.ramp) == ("W1*", None, Ramp("linear", 1.0, 2.0))
    with pytest.raises(ValueError, match="constant"):
        load(ramped, rate=1.0, ramp=ramped.ramp)


def test_a_rate_with_users_is_an_open_loop_with_a_bound_as_in_vllm() -> None:
    arrivals = choose("W1", rate=5.0, users=3).arrivals(1)
    assert isinstance(arrivals, OpenLoop)
    assert arrivals.max_concurrency == 3
    at_once = choose("W1", rate=math.inf, users=3).arrivals(1)
    assert isinstance(at_once, OpenLoop)
    assert set(at_once.times) == {0.0}


def test_prefix_groups_share_within_and_not_between() -> None:
    work = Work(
        dataset_name="prefix_repetition",
        num_prompts=12,
        prefix_repetition_num_prefixes=3,
        prefix_repetition_prefix_len=40,
        prefix_repetition_suffix_len=5,
    )
    prompts = [tuple(p.prompt) for p in planned(work.chosen("W1"))]
    assert {len(p) for p in prompts} == {45}
    assert len({p[:40] for p in prompts}) == 3
    assert len(set(prompts)) == 12
    assert [prompts[0][:40] == p[:40] for p in prompts[:4]] == [True, False, False, True]


def test_random_lengths_lie_in_their_range_and_the_text_is_prose() -> None:
    work = Work(
        dataset_name="random",
        num_prompts=200,
        random_input_len=100,
        random_output_len=10,
        random_range_ratio=0.5,
    )
    made = planned(work.chosen("W1"))
    lengths = [len(p.prompt) for p in made]
    assert (min(lengths), max(lengths)) == (50, 150)
    assert {p.output_tokens for p in made} <= set(range(5, 16))
    with pytest.raises(ValueError, match="range-ratio"):
        Work(dataset_name="random", random_range_ratio=1.0).chosen("W1")


def test_a_server_that_counts_too_few_tokens_is_told_so_and_not_asked_for_ever() -> None:
    async def one(_: str) -> list[int]:
        return [1]

    with pytest.raises(PassageError, match="fewer than the 32 of a prompt"):
        asyncio.run(passage(one, Prose(0), 32))


def test_a_changed_workload_is_titled_by_what_it_is_now() -> None:
    ten = load(choose("W1"), users=10)
    assert (ten.name, ten.summary) == ("W1*", "10 users, closed loop")
    assert load(ten, users=100) == choose("W1")
    assert choose("W2", requests=9).summary == "9 requests all at once"
    assert (
        choose("W3", users=1).summary
        == "1 user, closed loop, behind one common prefix of 512 tokens"
    )
    bounded = load(choose("W5"), rate=3.0, users=4)
    assert bounded.summary == "Poisson arrivals, at most 4 at a time"


TRACE = [
    {"timestamp": 1000, "input_length": 7, "output_length": 3, "hash_ids": [5, 6]},
    {"timestamp": 1500, "input_length": 9, "output_length": 2, "hash_ids": [5, 7]},
    {"timestamp": 4000, "input_length": 2, "output_length": 1, "hash_ids": [8]},
]


def test_a_trace_is_replayed_with_its_times_lengths_and_shared_blocks(tmp_path: Path) -> None:
    dataset = FileDataset("trace", _write(tmp_path, TRACE), speed=2.0, block_tokens=4)
    workload = Workload("trace", "", 3, dataset=dataset)
    assert workload.arrivals(1) == OpenLoop((0.0, 0.25, 1.5))
    made = planned(workload)
    assert [(len(p.prompt), p.output_tokens) for p in made] == [(7, 3), (9, 2), (2, 1)]
    assert made[0].prompt[:4] == made[1].prompt[:4]
    assert made[0].prompt[4:] != made[1].prompt[4:7]
    assert planned(workload, text_seed=1)[0].prompt != made[0].prompt


def test_a_trace_may_be_sent_at_another_load_and_cut_short(tmp_path: Path) -> None:
    work = Work(trace=_write(tmp_path, TRACE), num_prompts=2).chosen("W1")
    assert isinstance(work.arrivals(1), OpenLoop)
    assert load(work, users=2).users == 2
    assert len(planned(work)) == 2
    with pytest.raises(ValueError, match="holds 3 requests, not 4"):
        planned(Work(trace=_write(tmp_path, TRACE), num_prompts=4).chosen("W1"))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"timestamp": 1, "input_length": 0, "output_length": 1}, "line 1: lengths"),
        ({"timestamp": 1, "output_length": 1}, "line 1: input_length must be a number"),
        ({"input_length": 1, "output_length": 1}, "line 1: arrival must be a number"),
        ([1], "line 1: not an object"),
    ],
)
def test_a_broken_trace_is_told_with_its_line(tmp_path: Path, row: Any, said: str) -> None:
    with pytest.raises(DatasetError, match=said):
        len(FileDataset("trace", _write(tmp_path, [row])))


def test_files_of_prompts_are_held_to_answers_of_a_token_and_turns_that_are_objects(
    tmp_path: Path,
) -> None:
    with pytest.raises(DatasetError, match="line 1: output_tokens must be at least 1"):
        len(FileDataset("custom", _write(tmp_path, [{"prompt": "a", "output_tokens": 0}])))
    with pytest.raises(DatasetError, match="at least 1 token, not 0"):
        FileDataset("custom", "any.jsonl", 0)
    path = tmp_path / "conversations.json"
    path.write_text(json.dumps([{"conversations": ["hello", "there"]}]))
    with pytest.raises(DatasetError, match="a turn of a conversation must be an object"):
        len(FileDataset("sharegpt", str(path)))


@pytest.mark.parametrize("word", ["lognormal:nan:1", "lognormal:5:nan", "lognormal:inf:1"])
def test_a_length_without_a_number_is_refused(word: str) -> None:
    with pytest.raises(LengthError, match="both finite"):
        parse_lengths(word)


def test_conversations_of_sharegpt_give_a_question_and_the_length_of_its_answer(
    tmp_path: Path,
) -> None:
    question, answer = "what is the weather like today", "it is rather sunny I think"
    file = tmp_path / "sharegpt.json"
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    file.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}]))
    workload = Work(dataset_name="sharegpt", dataset_path=str(file)).chosen("W1")
    assert planned(workload) == [Planned([hash(w) for w in question.split()], 6)]
    fixed = Work(dataset_name="sharegpt", dataset_path=str(file), sharegpt_output_len=9)
    assert planned(fixed.chosen("W1"))[0].output_tokens == 9


def test_own_prompts_are_sent_in_an_order_of_the_seed(tmp_path: Path) -> None:
    path = _write(tmp_path, [{"prompt": f"number {n}", "output_tokens": n} for n in range(1, 9)])
    workload = Work(dataset_name="custom", dataset_path=path).chosen("W1")
    made = planned(workload)
    assert sorted(p.output_tokens for p in made) == list(range(1, 9))
    assert made == planned(workload)


def test_contradicting_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give one of"):
        Work(workload="W1", dataset_name="random").chosen("W1")
    with pytest.raises(ValueError, match="needs --dataset-path"):
        Work(dataset_name="custom").chosen("W1")
    path = _write(tmp_path, TRACE)
    with pytest.raises(ValueError, match="names its requests"):
        Work(trace=path, prompt_lengths="5").chosen("W1")


def _write(directory: Path, rows: list[Any]) -> str:
    file = directory / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(file)
