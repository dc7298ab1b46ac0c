"""How to draw tokens: the sampling parameters of a request, checked once, at the edge."""

from __future__ import annotations

import math
from collections.abc import Collection

import msgspec

MOST_PRIORITY = 1_000_000
"""A request's priority lies within this distance of 0."""

MIN_REPETITION_PENALTY = 0.01
"""Logits are divided by it: far smaller ones would make them infinite."""


class ParameterError(ValueError):
    """A request parameter is out of range. ``param`` names the field."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Sampling parameters, with the names and defaults users of this field know.

    ``temperature`` below 1e-5 means greedy. ``top_k`` 0 or -1 means all. ``seed`` None lets the
    server pick one. ``logprobs`` is the number of alternatives reported beside each drawn token
    (None: none, and no log-probability either). ``grammar`` is a compiled-form description of a
    constraint that :mod:`turnstile.text.grammar` understands.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str | None = None

    def check(self, vocab_size: int, max_logprobs: int = 20) -> None:
        """Raise :class:`ParameterError` for the first value out of its range."""
        _in_range("n", self.n, 1, 128)
        if self.max_tokens is not None:
            least = 0 if self.prompt_logprobs is not None else 1
            _in_range("max_tokens", self.max_tokens, least, 2**31 - 1)
        _in_range("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError(
                f"min_tokens ({self.min_tokens}) is more than max_tokens ({self.max_tokens}).",
                "min_tokens",
            )
        _in_range("temperature", self.temperature, 0.0, 100.0)
        _in_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _in_range("top_k", self.top_k, -1, 2**31 - 1)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 100.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _in_range("seed", self.seed, -(2**63), 2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _in_range(name, value, 0, max_logprobs)
        if self.logit_bias:
            check_length("logit_bias", len(self.logit_bias), vocab_size)
            _ids_in_range("logit_bias", self.logit_bias, vocab_size)
            for bias in self.logit_bias.values():
                _in_range("logit_bias", bias, -100.0, 100.0, what="a bias")
        for name in ("stop_token_ids", "allowed_token_ids"):
            if tokens := getattr(self, name):
                check_length(name, len(tokens), vocab_size)
                _ids_in_range(name, tokens, vocab_size)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ParameterError("allowed_token_ids is empty.", "allowed_token_ids")

    def add_end_ids(self, end_ids: Collection[int]) -> None:
        """Let the model's own end tokens end a sample, beside ``stop_token_ids``, unless
        ``ignore_eos`` says not to. Those of the client stay first.
        """
        if not self.ignore_eos:
            given = self.stop_token_ids
            self.stop_token_ids = [*given, *sorted(set(end_ids).difference(given))]

    @property
    def greedy(self) -> bool:
        """True where the likeliest token is taken."""
        return self.temperature < 1e-5

    @property
    def forgetful(self) -> bool:
        """True where a draw depends on nothing but its logits and its position. Penalties, grammars
        and the like look at the outputs before it; without them a draw can be made while those
        outputs are still guesses.
        """
        return (
            self.repetition_penalty == 1.0
            and not self.presence_penalty
            and not self.frequency_penalty
            and not self.min_tokens
            and self.grammar is None
        )


def check_length(name: str, length: int, vocab_size: int) -> None:
    """Raise :class:`ParameterError` for more token ids than there are. Nothing looks at the ids
    themselves before: a body of ids can hold millions.
    """
    if length > vocab_size:
        raise ParameterError(
            f"{name} has {length} entries; at most {vocab_size} are allowed, the size of the "
            "vocabulary.",
            name,
        )


def _ids_in_range(name: str, ids: Collection[int], vocab_size: int) -> None:
    for token in (min(ids), max(ids)):
        _in_range(name, token, 0, vocab_size - 1, what="a token id")


def _in_range(
    name: str,
    value: float,
    low: float,
    high: float,
    *,
    open_low: bool = False,
    what: str = "",
) -> None:
    bad = isinstance(value, bool) or value > high or value < low or math.isnan(value)
    if bad or (open_low and value <= low):
        subject = f"{name}: {what}" if what else name
        bracket = "above" if open_low else "at least"
        least, most = (f"{end:g}" if isinstance(end, float) else end for end in (low, high))
        raise ParameterError(
            f"{subject} must be {bracket} {least} and at most {most}, not {value!r}.", name
        )
