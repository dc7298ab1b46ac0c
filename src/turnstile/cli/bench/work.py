"""The flags that say what to ask for. Names are those of ``vllm bench`` where it has them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from turnstile.bench.datasets import FileDataset
    from turnstile.bench.workloads import Workload


@dataclass(kw_only=True)
class Work:
    """What to ask for."""

    workload: str | None = None
    """W1 to W5. A workload changed by other flags is marked with a star in the table."""
    num_prompts: int | None = None
    """Number of requests (conversations, with --multi-turn), where it is not to be the
    workload's or all of a file."""
    prompt_lengths: Annotated[str | None, Parameter(name=["--prompt-lengths", "--input-len"])] = (
        None
    )
    """128, 16-64, lognormal:MEDIAN:SIGMA[:LOW:HIGH], or a trace such as azure_conv_2023:prompt."""
    output_lengths: Annotated[str | None, Parameter(name=["--output-lengths", "--output-len"])] = (
        None
    )
    """Likewise."""
    prefix_len: int | None = None
    """Tokens in front of every prompt that all requests of a group share."""
    prefix_groups: int | None = None
    """How many different prefixes there are."""
    multi_turn: str | None = None
    """Questions of a conversation (5, 2-8, …), each with all before it as its history."""
    multi_turn_delay: float | None = None
    """Seconds a user takes from an answer to the next question."""
    trace: str | None = None
    """JSON lines with timestamp (ms), input_length, output_length and, if wanted, hash_ids."""
    trace_speed: float = 1.0
    """How many seconds of the trace pass in one."""
    dataset_name: Literal["random", "prefix_repetition", "sharegpt", "custom"] | None = None
    """Requests in place of a workload's, as vLLM's datasets of these names. `random` has lengths
    drawn at random; the text is prose all the same."""
    dataset_path: str | None = None
    """File of `sharegpt` or `custom`."""
    random_input_len: int = 1024
    """Tokens of a prompt of `random`."""
    random_output_len: int = 128
    """Tokens of an answer of `random`."""
    random_range_ratio: float = 0.0
    """Lengths of `random` lie evenly between 1 − and 1 + this share of the given ones."""
    random_prefix_len: int = 0
    """Tokens that all prompts of `random` have in front."""
    prefix_repetition_prefix_len: int = 256
    """Tokens of a prefix of `prefix_repetition`."""
    prefix_repetition_suffix_len: int = 256
    """Tokens of a prompt of `prefix_repetition` behind its prefix."""
    prefix_repetition_num_prefixes: int = 10
    """How many prefixes `prefix_repetition` has."""
    prefix_repetition_output_len: int = 128
    """Tokens of an answer of `prefix_repetition`."""
    sharegpt_output_len: int | None = None
    """Tokens of an answer of `sharegpt`, where not as many as in the file."""
    custom_output_len: int | None = None
    """Tokens of an answer of `custom`, where not as the file says (256 if it does not)."""

    def chosen(self, default: str) -> Workload:
        """The workload, changed as the flags say. Raises ValueError for wrong ones."""
        from turnstile.bench.workloads import WorkloadError, choose

        given = [self.workload, self.dataset_name, self.trace]
        if sum(name is not None for name in given) > 1:
            raise WorkloadError("give one of --workload, --dataset-name and --trace")
        base = self._dataset()
        if base is None:
            return choose(self.workload or default, requests=self.num_prompts, **self._changes())
        changes = {k: v for k, v in self._changes().items() if v is not None}
        if base.dataset is not None and changes:
            raise WorkloadError(f"{base.dataset.path} names its requests: give no lengths or turns")
        if "turns" in changes:
            changes["summary"] = f"{base.summary}, conversations of {self.multi_turn} turns"
        return replace(base, requests=self.num_prompts or base.requests, **changes)

    def _changes(self) -> dict[str, Any]:
        from turnstile.bench.lengths import parse_lengths

        return {
            "prompt": parse_lengths(self.prompt_lengths) if self.prompt_lengths else None,
            "output": parse_lengths(self.output_lengths) if self.output_lengths else None,
            "prefix": self.prefix_len,
            "prefix_groups": self.prefix_groups,
            "turns": parse_lengths(self.multi_turn) if self.multi_turn else None,
            "turn_delay": self.multi_turn_delay,
        }

    def _dataset(self) -> Workload | None:
        """A workload in place of the standard ones, or None. All at once, but for a trace."""
        from turnstile.bench.lengths import Fixed, around
        from turnstile.bench.workloads import Workload

        if self.dataset_name == "random":
            return Workload(
                "random",
                "random lengths",
                1000,
                around(self.random_input_len, self.random_range_ratio),
                around(self.random_output_len, self.random_range_ratio),
                prefix=self.random_prefix_len,
            )
        if self.dataset_name == "prefix_repetition":
            return Workload(
                "prefix_repetition",
                f"{self.prefix_repetition_num_prefixes} prefixes",
                1000,
                Fixed(self.prefix_repetition_suffix_len),
                Fixed(self.prefix_repetition_output_len),
                prefix=self.prefix_repetition_prefix_len,
                prefix_groups=self.prefix_repetition_num_prefixes,
            )
        dataset = self._file()
        if dataset is None:
            return None
        return Workload(dataset.kind, dataset.path, len(dataset), dataset=dataset)

    def _file(self) -> FileDataset | None:
        from turnstile.bench.datasets import DatasetError, FileDataset

        if self.trace is not None:
            return FileDataset("trace", self.trace, speed=self.trace_speed)
        if self.dataset_name not in ("sharegpt", "custom"):
            return None
        if self.dataset_path is None:
            raise DatasetError(f"--dataset-name {self.dataset_name} needs --dataset-path")
        sharegpt = self.dataset_name == "sharegpt"
        output = self.sharegpt_output_len if sharegpt else self.custom_output_len
        return FileDataset(self.dataset_name, self.dataset_path, output)
