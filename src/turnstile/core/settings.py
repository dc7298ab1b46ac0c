"""The limits of a scheduler, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The limits of a scheduler.

    Attributes
    ----------
    max_num_seqs
        Slots: most sequences in a step.
    max_num_batched_tokens
        The token budget of a step; at least ``max_num_seqs``, so that decode never stalls.
    max_model_len
        Most tokens of a sequence, prompt and outputs.
    target_itl
        Seconds a step should take while others stream: the budget for prompt chunks shrinks to
        keep it, by the measured cost of steps. None: always the whole budget.
    neighbour_steps
        While one tenant streams and another's prompts are computed, a step should last at most as
        long as this many steps in which every slot decodes: a neighbour with long prompts is then
        no worse than a full house. None: no such bound.
    min_chunk
        Prompt tokens a step computes whatever the target says, so that newcomers progress.
    chunked_prefill
        False: a prompt is computed in one step, however long (for the lab).
    separate_prefill
        True: while a prompt has something to compute, a step computes prompts alone and everybody
        who streams stands still, as servers did before chunks were mixed in (for the lab).
    max_skips
        How often others may overtake a sequence that does not fit yet.
    reserved_slots
        Slots (and pages for a typical request) kept for tenants that run nothing, once two
        tenants are known; at most an eighth of the slots.
    pin_after
        Preemptions after which a sequence is spared while any other victim is left.
    speculation
        Drafts may come. Sequences then advance unevenly, and admission counts each in full.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 8192
    target_itl: float | None = None
    neighbour_steps: float | None = 2.0
    min_chunk: int = 64
    chunked_prefill: bool = True
    separate_prefill: bool = False
    max_skips: int = 16
    reserved_slots: int = 1
    pin_after: int = 3
    speculation: bool = False

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, not {self.max_num_seqs}.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running sequence gets one token a step."
            )


@dataclass(slots=True)
class Statistics:
    """Counters since the start; they only grow. A request counts once whatever its ``n``."""

    steps: int = 0
    prompt_tokens: int = 0
    """Of admitted requests, cached ones included."""
    cached_tokens: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    failed_rows: int = 0
    repairs: int = 0
