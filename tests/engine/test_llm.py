"""The Python API: the shapes users know, over a real engine in a thread."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import turnstile
from tiny_models import make_tiny_llama
from turnstile import LLM, AsyncLLM, SamplingParams
from turnstile.core.admission import NeverFitsError
from turnstile.engine.params import ParameterError
from turnstile.kernels.native import available

SETTINGS = {
    "dtype": "float32", "backend": "reference", "threads": 1, "num_pages": 200,
    "max_num_seqs": 16, "max_num_batched_tokens": 256,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), **SETTINGS) as llm:
        yield llm


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"prompt number {i}" * (1 + i % 3) for i in range(40)]
    together = llm.generate(prompts, GREEDY)
    assert [output.prompt for output in together] == prompts
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in prompts[::9]]
    assert [o.outputs for o in together[::9]] == [o.outputs for o in alone]
    for output in together:
        (completion,) = output.outputs
        assert output.finished
        assert completion.finish_reason == "length"
        assert len(completion.token_ids) == 12
        assert completion.text == llm.get_tokenizer().decode(
            completion.token_ids, skip_special_tokens=True
        )


def test_every_spelling_of_a_prompt_means_the_same(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("hello there")
    spellings = ["hello there", ids, {"prompt": "hello there"}, {"prompt_token_ids": ids}]
    outputs = [llm.generate(each, GREEDY)[0] for each in spellings]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert [output.prompt_token_ids for output in outputs] == [ids] * 4


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    whole = llm.generate("hello", GREEDY)[0].outputs[0].text
    stop = whole[5:8]
    at = whole.index(stop)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=[stop])
    (completion,) = llm.generate("hello", params)[0].outputs
    assert completion.text == whole[:at]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_parameters_are_the_requests_own(llm: LLM) -> None:
    params = [
        SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=4, logprobs=2, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=7, prompt_logprobs=1, ignore_eos=True),
    ]
    first, second = llm.generate(["one", "two"], params)
    assert [completion.index for completion in first.outputs] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in first.outputs}) > 1
    for completion in first.outputs:
        assert completion.logprobs is not None
        chosen = [completion.logprobs[i][t].logprob for i, t in enumerate(completion.token_ids)]
        assert completion.cumulative_logprob == pytest.approx(sum(chosen))
        assert all(len(entry) in (2, 3) for entry in completion.logprobs)
    assert llm.generate("one", params[0])[0].outputs == first.outputs
    assert second.prompt_logprobs is not None
    assert second.prompt_logprobs[0] is None
    assert len(second.prompt_logprobs) == len(second.prompt_token_ids)
    assert len(second.outputs[0].token_ids) == 7
    assert params[1].stop_token_ids == [], "the caller's parameters are left as they are"


def test_a_chat_is_its_template_filled_in(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(messages, GREEDY)
    assert output.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    both = llm.chat([messages, [{"role": "user", "content": "ho"}]], GREEDY)
    assert both[0].outputs == output.outputs
    assert len(both) == 2


def test_what_cannot_be_done_is_said_and_the_engine_goes_on(llm: LLM) -> None:
    with pytest.raises(ParameterError, match="empty"):
        llm.generate([[]], GREEDY)
    with pytest.raises(ParameterError, match="99999"):
        llm.generate([99999], GREEDY)
    with pytest.raises(ParameterError, match="temperature"):
        llm.generate("x", SamplingParams(temperature=float("nan")))
    with pytest.raises(NeverFitsError):
        llm.generate([["x"], [5] * 600][1], GREEDY)
    with pytest.raises(ParameterError, match="2 prompts but 1"):
        llm.generate(["a", "b"], [GREEDY])
    wrong: Any = "high"
    with pytest.raises(ParameterError, match="priority"):
        llm.generate("x", GREEDY, priority=[wrong])
    with pytest.raises(ParameterError, match="top_k"):
        llm.generate("x", SamplingParams(top_k=wrong))
    assert llm.generate("x", GREEDY)[0].finished
    assert llm.get_metrics().pages_held == 0


def test_a_closed_engine_says_so(model: Path) -> None:
    llm = LLM(str(model), **SETTINGS)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("x")
    with pytest.raises(RuntimeError, match="This LLM has been closed"):
        llm.reset_prefix_cache()


def test_async_outputs_grow_and_can_be_aborted(model: Path) -> None:
    async def scenario() -> None:
        async with AsyncLLM(str(model), **SETTINGS) as llm:
            more = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
            growing = llm.generate("hello", more)
            lengths = [len(output.outputs[0].token_ids) async for output in growing]
            assert lengths == sorted(lengths)
            assert lengths[-1] == 60
            assert len(lengths) > 3
            long = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
            async for output in llm.generate("hello", long, "mine"):
                if len(output.outputs[0].token_ids) >= 5:
                    llm.abort("mine")
            assert output.outputs[0].finish_reason == "abort"
            assert output.finished
            assert len(output.outputs[0].token_ids) < 400
            # Leaving the loop ends the request too.
            generator = llm.generate("hello", long, "mine")
            async for _ in generator:
                break
            await generator.aclose()
            await llm.generate_final("x", GREEDY)
            assert llm.get_metrics().running <= 1
            assert not llm._streams
        with pytest.raises(RuntimeError, match="This AsyncLLM has been closed"):
            await llm.generate_final("x", GREEDY)

    with asyncio.Runner() as runner:
        runner.run(scenario())


def said_by(code: str) -> list[str]:
    """What a fresh interpreter prints."""
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return found.stdout.split()


def test_importing_turnstile_imports_nothing_heavy() -> None:
    code = "import sys, turnstile; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert said_by(code) == ["False", "False"]


def test_the_side_that_serves_clients_needs_no_torch() -> None:
    code = (
        "import sys; import turnstile.engine.client, turnstile.engine.supervisor,"
        " turnstile.engine.journal, turnstile.engine.config, turnstile.engine.local,"
        " turnstile.llm; print('torch' in sys.modules)"
    )
    assert said_by(code) == ["False"]


@pytest.mark.skipif(not available()[0], reason="the native kernels are not installed")
def test_native_kernels_serve_without_torch(model: Path) -> None:
    """A draw, filters, penalties, a bias and log-probabilities included."""
    code = f"""
import sys
from turnstile import LLM, SamplingParams
params = SamplingParams(max_tokens=4, seed=1, top_k=5, top_p=0.9, presence_penalty=0.5,
                        logit_bias={{9: 1.0}}, logprobs=2, prompt_logprobs=1, ignore_eos=True)
with LLM({str(model)!r}, backend="native", num_pages=64, threads=1) as llm:
    (output,) = llm.generate("hello there", params)
print(len(output.outputs[0].token_ids), 'torch' in sys.modules)
"""
    assert said_by(code) == ["4", "False"]


def test_what_can_be_imported_is_listed_before_it_is_imported() -> None:
    names = dir(turnstile)
    assert {*turnstile.__all__} <= {*names}
    assert "TYPE_CHECKING" not in names
    for name in turnstile.__all__:
        assert hasattr(turnstile, name)
