"""What the Python API takes: every form of a prompt, and a refusal by name for all else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from turnstile.engine.params import ParameterError, SamplingParams
from turnstile.inputs import checked_priority, list_of_prompts, own_params, text_and_ids


@pytest.mark.parametrize(
    "prompts",
    [[7, 8], (7, 8), range(7, 9), np.array([7, 8]), [np.int64(7), np.int64(8)],
     {"prompt_token_ids": [7, 8]}, {"prompt_token_ids": np.array([7, 8])}],
)  # fmt: skip
def test_integers_in_a_row_are_one_prompt(prompts: Any) -> None:
    (prompt,) = list_of_prompts(prompts)
    text, ids = text_and_ids(prompt)
    assert (text, ids) == (None, [7, 8])
    assert all(type(token) is int for token in ids or ())


def test_several_prompts_may_come_from_anything_that_can_be_gone_through() -> None:
    assert list_of_prompts(text for text in ["a", "b"]) == ["a", "b"]
    rows = list_of_prompts(np.array([[1, 2], [3, 4]]))  # type: ignore[arg-type]
    assert [text_and_ids(row)[1] for row in rows] == [[1, 2], [3, 4]]
    assert list_of_prompts([]) == []


@pytest.mark.parametrize("prompts", [None, 5, 1.5])
def test_what_is_neither_one_prompt_nor_several_is_refused(prompts: Any) -> None:
    with pytest.raises(ParameterError, match=f"not {type(prompts).__name__} {prompts}") as refused:
        list_of_prompts(prompts)
    assert refused.value.param == "prompt"


@pytest.mark.parametrize(
    "prompt",
    [None, 5, b"abc", [1.5], ["a"], [None], [[1]], {"prompt": 5}, {"prompt_token_ids": "abc"},
     {"prompt_token_ids": 5}, {}, {"text": "a"}],
)  # fmt: skip
def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(ParameterError, match="prompt") as refused:
        text_and_ids(prompt)
    assert refused.value.param == "prompt"


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", "x"), ("n", 1.5), ("n", True), ("top_k", 1.5), ("seed", 1.5),
     ("max_tokens", "5"), ("stop", [1]), ("stop", 5), ("stop", [""]), ("stop", ""),
     ("stop_token_ids", [1.5]), ("stop_token_ids", ["a"]), ("logit_bias", {"5": 1.0}),
     ("logit_bias", {5: "x"}), ("grammar", 5), ("skip_special_tokens", "no")],
)  # fmt: skip
def test_a_parameter_of_another_type_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=f"^{field}: ") as refused:
        own_params(SamplingParams(**{field: value}))
    assert refused.value.param == field


@pytest.mark.parametrize("given", [None, {"max_tokens": 3}, "greedy"])
def test_parameters_that_are_none_are_refused(given: Any) -> None:
    with pytest.raises(ParameterError, match="must be SamplingParams"):
        own_params(given)


def test_numbers_of_numpy_and_a_lone_stop_string_are_taken() -> None:
    given: dict[str, Any] = {
        "temperature": np.float32(0.5),
        "seed": np.int64(3),
        "stop": "ab",
        "stop_token_ids": np.array([4]),
    }
    assert own_params(SamplingParams(**given)) == SamplingParams(
        temperature=0.5, seed=3, stop=["ab"], stop_token_ids=[4]
    )
    nothing: Any = None
    assert own_params(SamplingParams(stop=nothing, stop_token_ids=nothing)) == SamplingParams()


def test_the_callers_parameters_are_copied() -> None:
    mine = SamplingParams(stop=["a"])
    own_params(mine).stop.append("b")
    assert mine.stop == ["a"]


@pytest.mark.parametrize("priority", ["a", 1.5, None, 2**80, -(10**7)])
def test_a_priority_that_cannot_be_compared_or_kept_is_refused(priority: Any) -> None:
    with pytest.raises(ParameterError, match="integer within ±1000000") as refused:
        checked_priority(priority)
    assert refused.value.param == "priority"
