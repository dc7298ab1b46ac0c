"""What changes logits before a draw: penalties, biases, bans and grammars of one sequence.

A :class:`Job` follows its sequence by difference: it reads the tokens that were drawn since it
last looked, so executing a step twice, preemption and resumption need no care.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from turnstile.core.request import Sequence
from turnstile.engine.params import SamplingParams

if TYPE_CHECKING:
    from turnstile.text.grammar import GrammarState

Logits = npt.NDArray[np.float32]


class Job:
    """How to draw for one sequence."""

    __slots__ = (
        "_allowed_ids",
        "_bias_ids",
        "_biases",
        "_counts",
        "_grammar",
        "_mask",
        "_prompt_ids",
        "_seen",
        "_stop_ids",
        "constrained",
        "params",
        "plain",
        "seed",
        "sequence",
    )

    def __init__(
        self,
        sequence: Sequence,
        params: SamplingParams,
        seed: int,
        grammar: GrammarState | None = None,
    ) -> None:
        self.sequence = sequence
        self.params = params
        self.seed = seed
        self._grammar = grammar
        self._mask: npt.NDArray[np.int32] | None = None
        self._seen = 0
        self._counts: dict[int, int] = {}
        self._prompt_ids: npt.NDArray[np.int64] | None = None
        # Arrays once, not at each draw: a list as long as the vocabulary takes as long to convert
        # as many steps, and everybody in the batch would wait for it.
        self._stop_ids = np.asarray(sorted(sequence.request.stop_ids), dtype=np.int64)
        self._allowed_ids = np.unique(np.asarray(params.allowed_token_ids or (), dtype=np.int64))
        bias = params.logit_bias or {}
        self._bias_ids = np.fromiter(bias, np.int64, len(bias))
        self._biases = np.fromiter(bias.values(), np.float32, len(bias))
        self.constrained = bool(
            params.repetition_penalty != 1.0
            or params.presence_penalty
            or params.frequency_penalty
            or params.logit_bias
            or params.allowed_token_ids
            or (params.min_tokens and len(self._stop_ids))
            or grammar is not None
        )
        self.plain = params.greedy and params.logprobs is None and not self.constrained
        """Whether the likeliest token is all it wants."""

    def constrain(self, logits: Logits) -> None:
        """Apply everything, in place, to a copy of one row ``[vocab]``.

        Raises
        ------
        GrammarError
            The grammar cannot be followed any further.
        """
        self._catch_up()
        params = self.params
        self._penalize(logits)
        if len(self._bias_ids):
            logits[self._bias_ids] += self._biases
        if len(self._allowed_ids):
            allowed = np.full(len(logits), -np.inf, dtype=np.float32)
            allowed[self._allowed_ids] = 0.0
            logits += allowed
        if self.sequence.num_outputs < params.min_tokens and len(self._stop_ids):
            logits[self._stop_ids] = -np.inf
        if self._grammar is not None:
            self._apply_grammar(logits)

    def _catch_up(self) -> None:
        outputs = self.sequence.tokens[self.sequence.num_prompt + self._seen :]
        for token in outputs:
            self._counts[token] = self._counts.get(token, 0) + 1
            if self._grammar is not None:
                self._grammar.advance(token)
        self._seen += len(outputs)

    def _penalize(self, logits: Logits) -> None:
        params = self.params
        if params.repetition_penalty != 1.0:
            if self._prompt_ids is None:
                self._prompt_ids = np.unique(np.asarray(self.sequence.request.prompt))
            ids = np.union1d(self._prompt_ids, np.fromiter(self._counts, np.int64))
            values = logits[ids]
            penalty = np.float32(params.repetition_penalty)
            logits[ids] = np.where(values > 0, values / penalty, values * penalty)
        if self._counts and (params.presence_penalty or params.frequency_penalty):
            ids = np.fromiter(self._counts, np.int64, len(self._counts))
            counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
            logits[ids] -= (
                np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * counts
            )

    def _apply_grammar(self, logits: Logits) -> None:
        from turnstile.text.grammar import mask_words, unpack_mask

        assert self._grammar is not None
        if self._mask is None:
            self._mask = np.zeros(mask_words(len(logits)), dtype=np.int32)
        self._grammar.fill_mask(self._mask)
        logits[~unpack_mask(self._mask, len(logits))] = -np.inf
