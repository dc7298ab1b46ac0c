"""How a step's budget is shared among prompts.

Tenants first: equal shares by weight, and what one does not need goes to the others. Within a
tenant the shortest remainder goes first (a short question does not wait for somebody's novel), but
a quarter of the share belongs to the oldest, so that the novel is computed too.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from turnstile.core.cost import CostModel, StepCost
from turnstile.core.request import Sequence
from turnstile.core.settings import SchedulerConfig

TYPICAL_CONTEXT = 256
STRANGERS_LINGER = 64
"""Steps for which tenants that decoded beside each other's prompts count as still doing so."""
OLDEST_SHARE = 4
"""One part in this many of a tenant's share belongs to its oldest prompt."""


def prompt_budget(
    config: SchedulerConfig,
    cost: CostModel,
    decodes: StepCost,
    behind: Seq[Sequence],
    *,
    strangers: bool = False,
) -> int:
    """Prompt tokens that a step may compute beside ``decodes``; 0 or less where there is no room.

    Two bounds on the step's time make it smaller, but never less than ``min_chunk``:
    ``target_itl`` while any sequence decodes, and ``neighbour_steps`` while ``strangers`` do, now
    or lately: sequences of other tenants than those of the prompts.
    """
    largest = config.max_num_batched_tokens
    budget = largest
    seconds = config.target_itl
    if strangers and config.neighbour_steps is not None and cost.warm:
        bound = config.neighbour_steps * _full_house(config, cost, decodes.batch)
        seconds = bound if seconds is None else min(seconds, bound)
    if seconds is not None and (decodes.tokens or strangers):
        budget = cost.budget(seconds, decodes, largest, _context(behind))
    return min(max(budget - decodes.tokens, config.min_chunk), largest - decodes.tokens)


def _full_house(config: SchedulerConfig, cost: CostModel, batch: int) -> float:
    """Seconds of a step with a token in every slot, at contexts such as chats have.

    ``batch`` is the present batch size, not the full one: the fitted cost of a sequence cannot be
    extrapolated from small batches to a hundred, that of a token can.
    """
    slots = config.max_num_seqs
    pairs = slots * TYPICAL_CONTEXT
    return cost.predict(StepCost(slots, pairs, batch, pairs, pairs))


def _context(behind: Seq[Sequence]) -> float:
    """How many tokens those to be computed next attend to, in the mean."""
    weighted = sum((s.computed + s.total) / 2 * need(s) for s in behind)
    return weighted / max(1, sum(need(s) for s in behind))


def share_budget(
    behind: Seq[Sequence], budget: int, *, whole: bool = False
) -> Iterator[tuple[Sequence, int]]:
    """Split ``budget`` tokens among sequences with more than their newest token to compute.

    Parameters
    ----------
    behind
        In order of admission, at least one.
    budget
        At least 1.
    whole
        Give a sequence all it needs or nothing (no chunking).

    Yields
    ------
    Sequences in order of admission, each with its tokens (at least 1, at most what it needs).
    """
    shares: dict[int, int] = {}
    if whole:
        _whole_prompts(behind, budget, shares)
    else:
        # The one admitted first gets a token in every step, however small the shares.
        shares[id(behind[0])] = 1
        tenants: dict[str, list[Sequence]] = {}
        for sequence in behind:
            tenants.setdefault(sequence.request.tenant, []).append(sequence)
        for group, tokens in _by_tenant(list(tenants.values()), budget - 1, shares):
            _within_tenant(group, tokens, shares)
    for sequence in behind:
        tokens = shares.get(id(sequence), 0)
        if tokens:
            yield sequence, tokens


def need(sequence: Sequence) -> int:
    """Tokens the sequence has still to compute before its next output."""
    return sequence.total - sequence.computed


def _wanted(sequence: Sequence, shares: dict[int, int]) -> int:
    return need(sequence) - shares.get(id(sequence), 0)


def _by_tenant(
    groups: list[list[Sequence]], budget: int, shares: dict[int, int]
) -> Iterator[tuple[list[Sequence], int]]:
    """Water-filling: whoever needs least for its weight is satisfied first."""
    if len(groups) == 1:
        yield groups[0], budget
        return
    needs = [
        (sum(_wanted(s, shares) for s in group), group[0].request.weight, group) for group in groups
    ]
    needs.sort(key=lambda item: item[0] / item[1])
    weight_left = sum(weight for _, weight, _ in needs)
    for wanted, weight, group in needs:
        # The last one takes what rounding left over.
        share = budget if weight >= weight_left else int(budget * weight / weight_left)
        tokens = min(wanted, share)
        weight_left -= weight
        budget -= tokens
        if tokens:
            yield group, tokens


def _within_tenant(group: list[Sequence], budget: int, shares: dict[int, int]) -> None:
    if len(group) > 1:
        budget -= _give(group[0], min(budget, max(1, budget // OLDEST_SHARE)), shares)
    for sequence in sorted(group, key=need):
        if budget <= 0:
            break
        budget -= _give(sequence, budget, shares)


def _give(sequence: Sequence, most: int, shares: dict[int, int]) -> int:
    tokens = min(_wanted(sequence, shares), most)
    shares[id(sequence)] = shares.get(id(sequence), 0) + tokens
    return tokens


def _whole_prompts(behind: Seq[Sequence], budget: int, shares: dict[int, int]) -> None:
    """The first one always; then, shortest first, whoever still fits."""
    for sequence in [behind[0], *sorted(behind[1:], key=need)]:
        tokens = need(sequence)
        if tokens <= budget or not shares:
            shares[id(sequence)] = tokens
            budget -= tokens
